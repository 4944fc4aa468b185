"""``.ci/private_names.py`` finds what reaches into another module, and nothing else."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

reached = runpy.run_path(str(Path(__file__).parents[1] / ".ci/private_names.py"))["reached"]


@pytest.mark.parametrize(
    "code",
    [
        "from a import _x",
        "from a._x import b",
        "import a._x",
        "thing._x",
        "thing.other._x = 1",
        "getattr(thing, '_x')",
        "monkeypatch.setattr(thing, '_x', 1)",
        "monkeypatch.setattr('a.b._x', 1)",
    ],
)
def test_a_private_name_of_another_module_is_found(code: str) -> None:
    assert list(reached(ast.parse(code))) == [(1, "_x")]


@pytest.mark.parametrize(
    "code",
    [
        "self._x",
        "cls._x",
        "super()._x()",
        "class A:\n    def _x(self): ...\n    def y(self, other): return other._x",
        "class A:\n    def __init__(self): self._x = 1\n    def __eq__(self, other): return other._x == 1",
        "from __future__ import annotations",
        "os._exit(1)",
        "row._replace(a=1)",
        "thing.__class__",
    ],
)
def test_what_is_ones_own_or_documented_is_not(code: str) -> None:
    assert list(reached(ast.parse(code))) == []
