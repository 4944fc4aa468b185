"""Sweeps as diagrams."""

from __future__ import annotations

import pytest

from bench.replay.figures import COLOURS
from bench.sim.frontier import marked
from bench.sim.frontier_panels import frontier_panels
from tests.bench.sim.test_frontier import point


def test_all_settings_are_points_and_those_on_the_frontier_a_line() -> None:
    points = marked(
        [point(150, 0.99, num_gpus=16), point(100, 0.9), point(200, 0.95, 0.1), point(80, 1.0, system="sllm")]
    )
    ((by_cost, by_ttft, by_gpus),) = frontier_panels(points, ("blitz", "sllm-60s"))
    line, dots = by_cost.curves[:2]
    assert (line.x, line.y) == ((100, 150), (90.0, 99.0))
    assert (dots.dots, dots.x) == (True, (150, 100, 200))
    assert [curve.colour for curve in by_cost.curves] == [COLOURS[0], COLOURS[0], COLOURS[1], COLOURS[1]]
    assert by_ttft.curves[0].y == (200.0, 100.0)
    assert by_gpus.curves[0].x == (8.0, 16.0)
    assert by_gpus.curves[0].y == (95.0, 99.0)


def test_the_price_is_the_cost_where_there_is_one() -> None:
    panel = frontier_panels(marked([point(100, 0.9, cost=2.0)]), ("blitz",))[0][0]
    assert (panel.x_label, panel.curves[0].x) == ("cost", (2.0,))


def test_where_only_the_time_to_give_back_differs_a_line_goes_through_all_times_in_their_order() -> None:
    points = [
        point(120, 0.99, 0.1, give_back_s=5.8, requests=1000), point(100, 0.9, 0.3, give_back_s=2.0, requests=1000),
        point(100, 0.9, 0.3, give_back_s=2.0, system="sllm", requests=1000),
        point(140, 1.0, 0.2, give_back_s=15.0, system="sllm", requests=1000),
        point(300, 1.0, 0.1, give_back_s=None, system="static-full", requests=1000),
    ]  # fmt: skip
    (absolute, five_times), (mean, p99) = frontier_panels(marked(points), ("blitz", "sllm", "static-full"))
    line, dots, other, _, full, _ = absolute.curves
    assert (line.x, line.y) == ((100, 120), (pytest.approx(1), pytest.approx(2)))
    assert dots.dots
    assert dots.labels == ("2", "5.8")
    # The same point is labelled once, and seen below the thinner line of the next system.
    assert absolute.curves[3].labels == ("", "15")
    assert line.width > other.width == full.width == 1.0
    assert [name for _, name in absolute.y_ticks] == [
        "85",
        "90",
        "93",
        "95",
        "97",
        "98",
        "99",
        "99.5",
        "99.8",
        "99.9",
        "100",
    ]
    assert absolute.y_ticks[-1][0] == pytest.approx(other.y[1])
    assert absolute.curves[5].labels == ("static-full",)
    assert five_times.curves[0].y == (other.y[1], other.y[1])
    assert (mean.curves[0].y, p99.curves[0].y) == ((100, 100), (300, 100))
