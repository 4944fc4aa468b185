"""Sweeps as diagrams."""

from __future__ import annotations

from bench.replay.figures import COLOURS
from bench.sim.frontier import marked
from bench.sim.frontier_panels import frontier_panels
from tests.bench.sim.test_frontier import point


def test_all_settings_are_points_and_those_on_the_frontier_a_line() -> None:
    points = marked(
        [point(150, 0.99, num_gpus=16), point(100, 0.9), point(200, 0.95, 0.1), point(80, 1.0, system="sllm")]
    )
    by_cost, by_ttft, by_gpus = frontier_panels(points, ("blitz", "sllm-60s"))
    line, dots = by_cost.curves[:2]
    assert (line.x, line.y) == ((100, 150), (90.0, 99.0))
    assert (dots.dots, dots.x) == (True, (150, 100, 200))
    assert [curve.colour for curve in by_cost.curves] == [COLOURS[0], COLOURS[0], COLOURS[1], COLOURS[1]]
    assert by_ttft.curves[0].y == (200.0, 100.0)
    assert by_gpus.curves[0].x == (8.0, 16.0)
    assert by_gpus.curves[0].y == (95.0, 99.0)


def test_the_price_is_the_cost_where_there_is_one() -> None:
    panel = frontier_panels(marked([point(100, 0.9, cost=2.0)]), ("blitz",))[0]
    assert (panel.x_label, panel.curves[0].x) == ("cost", (2.0,))
