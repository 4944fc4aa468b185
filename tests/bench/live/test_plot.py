from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.live.modes import BEST_EFFORT, PLAIN, STOP_THE_WORLD, ZIGZAG
from tests.bench.live.samples import result, run

TTFT_S = (0.05, 0.08, 0.11, 0.2)


@pytest.fixture
def plot() -> Any:
    """Imported only where it is used: with ``matplotlib`` it takes a second."""
    return pytest.importorskip("bench.live.plot", reason="needs matplotlib")


def test_a_made_up_result_becomes_a_png(plot: Any, tmp_path: Path) -> None:
    file = tmp_path / "live.png"
    mock = result(*[run(mode, TTFT_S) for mode in (STOP_THE_WORLD, BEST_EFFORT, ZIGZAG)])
    torch = result(run(ZIGZAG, TTFT_S, engine="torch"), engine="torch")
    plot.save([mock], file)
    one = file.read_bytes()
    plot.save([mock, torch], file)
    assert one.startswith(b"\x89PNG")
    assert len(file.read_bytes()) > len(one) > 10_000


def test_a_result_without_pairs_is_drawn_too(plot: Any, tmp_path: Path) -> None:
    plot.save([result(run(PLAIN, TTFT_S))], tmp_path / "plain.png")
    assert (tmp_path / "plain.png").stat().st_size > 0
