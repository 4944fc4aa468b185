#!/usr/bin/env python3
"""No module reaches into the private names (``_x``) of another: ``make lint`` runs this over products and tests.

Found are ``import _x``, ``from module import _x``, ``thing._x`` where ``thing`` is neither ``self`` nor ``cls`` and the
same file defines no ``_x``, and ``_x`` by its name in ``getattr`` or ``setattr``. ``private_names.txt`` holds what is
allowed, with reasons; what it allows for nothing is an error as well, so that it only gets shorter.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("shared", "services", "compose", "bench", "tests")
ALLOWED = Path(__file__).with_suffix(".txt")
_BY_NAME = {"getattr", "setattr", "delattr", "hasattr"}
_DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields", "_make", "_typeshed"}
"""Of the standard library: the underscore means something else."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in _DOCUMENTED


def own_names(tree: ast.AST) -> set[str]:
    """Private names that the file itself makes: functions, classes, variables, attributes of ``self``, slots."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.keyword(arg=str(name)) | ast.arg(arg=name):
                found.add(name)
    return found


def reached(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of another module."""
    own = own_names(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import():
                names = [part for alias in node.names for part in alias.name.split(".")]
            case ast.ImportFrom():
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=name) if name not in own:
                names = [name]
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in _BY_NAME:
                texts = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                names = [text.rpartition(".")[2] for text in texts if text.rpartition(".")[2] not in own]
        for name in names:
            if is_private(name):
                yield node.lineno, name


def allowed() -> dict[str, set[str]]:
    """Private names by file; lines are ``file: _name _name``, and reasons are comments."""
    found: dict[str, set[str]] = {}
    for line in ALLOWED.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            file, _, names = text.partition(":")
            found.setdefault(file.strip(), set()).update(names.split())
    return found


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    files = sorted(name for name in listed.stdout.split("\n") if name.endswith(".py") and (ROOT / name).exists())
    unused, faults = allowed(), []
    permitted = {file: set(names) for file, names in unused.items()}
    for file in files:
        for line, name in reached(ast.parse((ROOT / file).read_text(encoding="utf-8"), file)):
            unused.get(file, set()).discard(name)
            if name not in permitted.get(file, set()):
                faults.append(f"{file}:{line}: {name} is private to another module")
    faults += [f"{ALLOWED.name}: {file} does not use {name}: take it out" for file in unused for name in unused[file]]
    print("\n".join(faults) or "No module reaches into the private names of another.")  # noqa: T201
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
