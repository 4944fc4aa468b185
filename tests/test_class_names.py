"""``.ci/class_names.py`` finds public classes of the same name, and nothing else."""

from __future__ import annotations

import runpy
from pathlib import Path

repeated = runpy.run_path(str(Path(__file__).parents[1] / ".ci/class_names.py"))["repeated"]


def test_a_class_that_two_modules_define_is_found() -> None:
    assert repeated([("a.py", "class X: ..."), ("b.py", "class X: ..."), ("c.py", "class Y: ...")]) == {
        "X": ["a.py", "b.py"]
    }


def test_private_classes_inner_classes_and_imports_are_not() -> None:
    code = "from a import X\nclass _Y: ...\nclass {}:\n    class Inner: ...\ndef f():\n    class Local: ..."
    assert repeated([("a.py", "class X: ..."), *((f"{i}.py", code.format(f"Z{i}")) for i in range(2))]) == {}
