from __future__ import annotations

import pytest

from bench.fidelity.comparison import ALL, Row, pooled, rows
from bench.fidelity.condensed import Figures
from tests.bench.fidelity.runs import figures

LAB = [figures((0.1, 0.3, None)), figures((0.2, 0.4, None)), figures((0.3, 0.5, None))]


def test_medians_over_repetitions_beside_each_other() -> None:
    found = {row.figure: row for row in rows(10.0, "blitz", LAB, [figures((0.31, 0.35))])}
    mean = found["ttft_mean_s"]
    assert (mean.lab.median, mean.lab.low, mean.lab.high) == pytest.approx((0.3, 0.2, 0.4))
    assert mean.off == pytest.approx(0.1)
    assert mean.holds
    assert found["gpu_seconds"].off == 0.0
    assert found["tbt_mean_s"].holds is None


@pytest.mark.parametrize(
    ("gpu_seconds", "holds"), [(104.9, True), (105.1, False), (95.1, True), (94.0, False), (0.0, False)]
)
def test_what_is_outside_of_goal_and_range_does_not_hold(gpu_seconds: float, holds: bool) -> None:
    found = {row.figure: row for row in rows(10.0, "blitz", LAB, [figures((0.3,), gpu_seconds=gpu_seconds)])}
    assert found["gpu_seconds"].holds is holds


def test_what_lies_in_the_labs_own_range_holds() -> None:
    lab = [figures((0.3,), gpu_seconds=value) for value in (80.0, 100.0, 130.0)]
    found = {row.figure: row for row in rows(10.0, "blitz", lab, [figures((0.3,), gpu_seconds=125.0)])}
    assert found["gpu_seconds"].off == pytest.approx(0.25)
    assert found["gpu_seconds"].holds


NONE = figures((0.3,), took_s=None)
"""A run in which nothing was scaled out."""


def test_a_figure_that_neither_side_has_makes_no_row() -> None:
    found = {row.figure for row in rows(10.0, "static-full", [NONE], [NONE])}
    assert "scale_out_mean_s" not in found
    assert "scale_outs" in found


@pytest.mark.parametrize(("lab", "simulated"), [(LAB, [NONE]), ([NONE], LAB)])
def test_a_figure_that_only_one_side_has_misses_its_goal(lab: list[Figures], simulated: list[Figures]) -> None:
    found = {row.figure: row for row in rows(10.0, "blitz", lab, simulated)}
    assert found["scale_out_mean_s"].holds is False


def test_a_figure_that_few_runs_of_a_side_have_is_none_of_it() -> None:
    few = {row.figure: row for row in rows(10.0, "blitz", LAB, [NONE, NONE, LAB[0]])}
    assert few["scale_out_mean_s"].simulated.median == 0.0
    most = {row.figure: row for row in rows(10.0, "blitz", LAB, [NONE, LAB[0], LAB[0]])}
    assert most["scale_out_mean_s"].simulated.median == 1.0


def test_with_imposed_events_beside_it() -> None:
    (row, *_) = rows(10.0, "blitz", LAB, [figures((0.3,))], [figures((0.33,))])
    assert row.imposed_off == pytest.approx(0.1)


def of_windows() -> list[Row]:
    """GPU seconds 4 % less and 8 % more than in the lab, and as many."""
    lab = [figures((0.3,))]
    return [
        *rows(10.0, "blitz", lab, [figures((0.3,), gpu_seconds=96.0)], [figures((0.3,), gpu_seconds=99.0)]),
        *rows(10.0, "static-full", [NONE], [NONE]),
        *rows(20.0, "blitz", lab, [figures((0.3,), gpu_seconds=108.0)], [figures((0.3,), gpu_seconds=103.0)]),
    ]


def test_over_all_windows_errors_do_not_cancel_each_other() -> None:
    found = {one.system: one for one in pooled(of_windows())}
    assert list(found) == ["blitz", "static-full", ALL]
    assert found["blitz"].off["gpu_seconds"] == pytest.approx(0.06)
    assert found["blitz"].imposed_off["gpu_seconds"] == pytest.approx(0.02)
    assert found[ALL].off["gpu_seconds"] == pytest.approx(0.04)
    assert set(found["blitz"].off) == {"ttft_mean_s", "ttft_p99_s", "gpu_seconds", "scale_out_mean_s"}


def test_figures_that_a_system_does_not_have_are_not_pooled() -> None:
    found = {one.system: one for one in pooled(of_windows())}
    assert "scale_out_mean_s" not in found["static-full"].off
    assert not found["static-full"].imposed_off


def test_the_share_of_figures_that_keep_their_goals() -> None:
    found = {one.system: one for one in pooled(of_windows())}
    assert (found["blitz"].kept, found["blitz"].figures, found["blitz"].share) == (7, 8, 0.875)
    assert (found[ALL].kept, found[ALL].figures) == (10, 11)


def test_nothing_is_pooled_of_nothing() -> None:
    assert pooled([]) == []


def test_another_goal_than_its_own() -> None:
    lab = [figures((0.3,))]
    found = {row.figure: row for row in rows(10.0, "blitz", lab, [figures((0.3,), gpu_seconds=112.0)])}
    assert not found["gpu_seconds"].holds
    assert found["gpu_seconds"].within(0.15)
    assert not found["gpu_seconds"].within(0.1)
