"""``.ci/wall_clocks.py`` finds what looks at the time of day, and nothing else."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

checker = runpy.run_path(str(Path(__file__).parents[1] / ".ci/wall_clocks.py"))


@pytest.mark.parametrize(
    "code",
    ["time.time()", "now = time.time", "time.time_ns()", "from time import time", "datetime.now()", "date.today()",
     "datetime.datetime.now(UTC)", "datetime.utcnow()", "time.gmtime()"],
)  # fmt: skip
def test_a_wall_clock_is_found(code: str) -> None:
    assert [line for line, _ in checker["looked_at"](ast.parse(code))] == [1]


@pytest.mark.parametrize(
    "code", ["time.monotonic()", "from time import monotonic", "clock.now()", "self.time()", "now()"]
)
def test_other_clocks_are_not(code: str) -> None:
    assert list(checker["looked_at"](ast.parse(code))) == []


def test_no_wall_clock_is_looked_at_without_a_reason() -> None:
    assert checker["main"]() == 0
