#!/usr/bin/env python3
"""Wall clocks are for people: ``make lint`` runs this over the products.

Hosts' clocks differ, and are set. So decisions go by monotonic clocks and by durations in messages, and each file that
looks at the time of day is in ``wall_clocks.txt`` with its reason; what that allows for nothing is an error as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("shared", "services", "compose")
ALLOWED = Path(__file__).with_suffix(".txt")
_CLOCKS = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}


def looked_at(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each wall clock that is used, or imported by its bare name."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                if name in _CLOCKS.get(owner, ()):
                    yield node.lineno, name
            case ast.ImportFrom(module="time"):
                yield from ((node.lineno, alias.name) for alias in node.names if alias.name in _CLOCKS["time"])


def allowed() -> dict[str, set[str]]:
    """Clocks by file; lines are ``file: name name  # why``."""
    lines = (line.partition("#")[0].strip() for line in ALLOWED.read_text(encoding="utf-8").splitlines())
    return {file.strip(): set(names.split()) for file, _, names in (line.partition(":") for line in lines if line)}


def main() -> int:
    permitted = allowed()
    unused, faults = {file: set(names) for file, names in permitted.items()}, []
    for file in sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for line, name in looked_at(ast.parse((ROOT / file).read_text(encoding="utf-8"), file)):
            unused.get(file, set()).discard(name)
            if name not in permitted.get(file, set()):
                faults.append(
                    f"{file}:{line}: {name} is a wall clock: take a monotonic one, or list it with its reason"
                )
    faults += [f"{ALLOWED.name}: {file} does not use {name}: take it out" for file in unused for name in unused[file]]
    print("\n".join(faults) or "Wall clocks are looked at for people only.")  # noqa: T201
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
