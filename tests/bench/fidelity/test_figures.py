"""What a comparison looks like."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.evaluate.saved_run import Plan
from bench.evaluate.windows import Window
from bench.fidelity.condensed import Figures
from bench.fidelity.figures import Compared, beside
from bench.replay import plot
from tests.bench.evaluate.runs import plan
from tests.bench.fidelity.runs import figures


def at(system: str, start_s: float) -> Plan:
    return msgspec.structs.replace(plan(system), window=Window(start_s, 30.0))


LAB = (figures((0.1, 0.3, None)), figures((0.2, 0.5, None)))
SIMULATED = (figures((0.15, 0.4, 0.7)),)


def compared(system: str, start_s: float, simulated: tuple[Figures, ...] = SIMULATED) -> Compared:
    return Compared(at(system, start_s), LAB, simulated)


def test_a_window_is_a_row_and_a_system_a_colour() -> None:
    drawn = beside([compared("static-full", 15.0), compared("blitz", 15.0), compared("blitz", 60.0)])
    assert [name for name, _ in drawn.legend] == ["static-full", "blitz"]
    colours = dict(drawn.legend)
    (first, medians), (second, _) = drawn.rows
    assert [curve.colour for curve in first.curves] == [colours[n] for n in ("static-full",) * 2 + ("blitz",) * 2]
    assert [curve.colour for curve in second.curves] == [colours["blitz"]] * 2
    assert "15 s" in first.title
    assert "60 s" in second.title
    assert medians.title.startswith("TTFT of blitz"), "the one that scales"


def test_what_did_not_end_is_in_no_distribution_and_has_no_median() -> None:
    ((distributions, medians),) = beside([compared("blitz", 15.0)]).rows
    lab, simulated = distributions.curves
    assert (min(lab.x), max(lab.x)) == (100.0, 500.0), "of all runs together"
    assert (min(simulated.x), max(simulated.x)) == (150.0, 700.0)
    assert lab.y[0] == 0.0
    assert lab.y[-1] == 1.0
    assert [curve.y for curve in medians.curves] == [(150.0, 400.0, None), (150.0, 400.0, 700.0)]


def test_where_nothing_ended_there_is_a_picture_of_nothing(tmp_path: Path) -> None:
    none = (figures((None, None)),)
    drawn = beside([Compared(at("blitz", 15.0), none, none)])
    assert drawn.rows[0][0].curves == ()
    plot.save((), tmp_path / "nothing.png", drawn)
    assert (tmp_path / "nothing.png").read_bytes().startswith(b"\x89PNG")
