#!/usr/bin/env python3
"""No two modules of the product define public classes of the same name: ``make lint`` runs this.

``class_names.txt`` holds the names that may occur more than once, with reasons; one that does not is an error as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT, ALLOWED = Path(__file__).resolve().parents[1], Path(__file__).with_suffix(".txt")


def repeated(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Public top-level classes that several of the files (name, code) define, with these files."""
    found: dict[str, list[str]] = {}
    for file, code in sources:
        for node in ast.parse(code, file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(file)
    return {name: files for name, files in found.items() if len(files) > 1}


def main() -> int:
    files = sorted(file for folder in ("shared", "services", "compose") for file in (ROOT / folder).rglob("*.py"))
    found = repeated((str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")) for file in files)
    allowed = {name for line in ALLOWED.read_text().splitlines() for name in line.partition("#")[0].split()}
    faults = [f"class {name}: {', '.join(found[name])}" for name in sorted(found.keys() - allowed)]
    faults += [f"{ALLOWED.name}: {name} occurs once: take it out" for name in sorted(allowed - found.keys())]
    print("\n".join(faults) or "No two public classes of the product have the same name.")  # noqa: T201
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
