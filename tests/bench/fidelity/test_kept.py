"""The simulator beside runs of the lab that are kept in ``docs/results``.

Those of a look-alike are always compared, those of a published trace only where ``BLITZSCALE_TRACES`` names a folder
that has it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from bench.fidelity.comparison import rows
from bench.fidelity.condensed import read
from bench.fidelity.groups import Group, groups, labels
from bench.fidelity.simulation import Simulation
from bench.traces.reader import read_trace
from bench.traces.request import Trace
from bench.traces.synthetic import synthesise

FOLDER = Path(__file__).parents[3] / "docs" / "results"
FILES = sorted(FOLDER.glob("fidelity-*.json"))
GOAL = 0.15
LOOK_ALIKE_S = 300.0


def trace_of(name: str) -> Trace:
    """The one that a plan names."""
    made = re.fullmatch(r"synthetic (\S+), seed (\d+)", name)
    if made is not None:
        return synthesise(made[1], seed=int(made[2]), duration_s=LOOK_ALIKE_S)
    folder = os.environ.get("BLITZSCALE_TRACES")
    if folder is None:
        pytest.skip(f"BLITZSCALE_TRACES names no folder with {name}")
    file = next(Path(folder).rglob(name), None)
    if file is None:
        pytest.skip(f"there is no {name} in {folder}")
    return read_trace(file)


def test_a_look_alike_is_kept() -> None:
    assert "fidelity-look-alike.json" in [file.name for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_simulator_is_as_close_to_the_lab_as_it_was(file: Path) -> None:
    found = groups(read(file))
    simulation = Simulation(trace_of(found[0].plan.trace))
    assert all(group.runs for group in found)
    off = [
        f"{label}: {line}"
        for label, group in zip(labels(found), found, strict=True)
        for line in too_far(simulation, group)
    ]
    assert not off, "\n".join(off)


def too_far(simulation: Simulation, group: Group) -> list[str]:
    """The figures with a goal that are farther off than ``GOAL``, and outside of the lab's own range."""
    simulation.check(group.plan)
    lab = [run.figures for run in group.runs]
    compared = rows(group.plan.window.start_s, group.plan.system, lab, simulation.repeated(group.runs))
    return [
        f"{row.figure} is {row.simulated.median:.4g} simulated, {row.lab.low:.4g} to {row.lab.high:.4g} in the lab"
        for row in compared
        if row.goal is not None and not row.within(GOAL)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_kept_is_small_and_has_no_arrivals_and_no_lengths(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text) < 400_000 * len({group.plan.window.start_s for group in groups(read(file))})
    assert not re.search(r"arrival|due_s|_tokens|prompt", text)
