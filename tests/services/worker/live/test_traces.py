"""The two members of a pair say to each other what they always said (``traces``)."""

from __future__ import annotations

import pytest

from tests.services.worker.live.traces import CASES, FOLDER, SEEDS, trace, written


@pytest.mark.parametrize("name", CASES)
def test_what_a_pair_says_is_what_it_always_said(name: str) -> None:
    traces = {seed: trace(CASES[name], seed) for seed in SEEDS}
    assert trace(CASES[name], SEEDS[0]) == traces[SEEDS[0]], "it differs from run to run"
    assert written(traces).splitlines() == (FOLDER / f"{name}.json").read_text().splitlines()


def test_nothing_else_is_written_down() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(CASES)
