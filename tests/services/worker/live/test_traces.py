"""The two members of a pair say to each other what they always said (``traces``)."""

from __future__ import annotations

import pytest

from tests.services.worker.live.traces import CASES, FOLDER, trace, written


@pytest.mark.parametrize("name", CASES)
def test_what_a_pair_says_is_what_it_always_said(name: str) -> None:
    case = CASES[name]
    traces = {seed: trace(case, seed) for seed in case.seeds}
    first = case.seeds[0]
    assert trace(case, first) == traces[first], "it differs from run to run"
    assert written(traces).splitlines() == (FOLDER / f"{name}.json").read_text().splitlines()


def test_nothing_else_is_written_down() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(CASES)
