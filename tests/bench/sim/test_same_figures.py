"""Runs, pairs and moves come to the figures that are kept of them, whatever they are simulated with."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.bench.sim.figure_cases import CASES
from tests.bench.sim.figures import Kept

GOLDEN: dict[str, Kept] = json.loads((Path(__file__).parent / "golden" / "figures.json").read_text())


def test_figures_of_every_case_are_kept() -> None:
    assert sorted(GOLDEN) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_case_comes_to_the_same_figures(name: str) -> None:
    assert CASES[name]() == GOLDEN[name]


def test_the_cases_have_what_may_differ() -> None:
    """Pairs that end in every way, batches that targets ran layers of, instances that come, go and change roles, and
    requests that are sent again or go on elsewhere."""
    sums: Counter[str] = Counter()
    for kept in GOLDEN.values():
        for name in ("operations", "pairs"):
            sums.update({f"{name}: {key}": count for key, count in kept.get(name, {}).items()})
        sums["handed on"] += kept["handed_on"]
        sums["sent again"] += max(0, kept.get("attempts", 0) - kept.get("requests", 0))
        sums["at targets"] += sum(count for layers, count in kept["batches_by_target_layers"].items() if layers != "0")
    there = {f"operations: {what}" for what in ("out", "in", "mutate")}
    there |= {f"pairs: {what}" for what in ("dissolved", "failed", "unknown")}
    assert {*there, "handed on", "sent again", "at targets"} <= {name for name, count in sums.items() if count}
