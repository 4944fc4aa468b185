from __future__ import annotations

import random
from array import array
from itertools import pairwise

import pytest

from bench.sim import gaps as gaps_module
from bench.sim.gaps import Gaps
from bench.stats import Summary


def test_the_summary_is_that_of_all_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps_module, "BUFFERED", 50)
    draw, gaps, every = random.Random(7), Gaps(), []
    for _ in range(100):
        times_s = [draw.uniform(0.0, 1e4)]
        for _ in range(draw.randrange(20)):
            times_s.append(times_s[-1] + draw.lognormvariate(-4.0, 1.5))
        gaps.add(array("d", times_s))
        every += [later - earlier for earlier, later in pairwise(times_s)]
    summary, expected = gaps.summary(), Summary.of(every)
    assert summary is not None
    assert expected is not None
    assert len(gaps) == summary.count == expected.count
    assert summary.mean == pytest.approx(expected.mean, rel=1e-12)
    assert summary.max == expected.max
    # A percentile between two of so few values is that of the lower one here.
    ordered = sorted(every)
    assert summary.p50 == pytest.approx(ordered[(len(ordered) - 1) // 2], rel=1 / (1 << 14))
    assert summary.p99 == pytest.approx(ordered[int((len(ordered) - 1) * 0.99)], rel=1 / (1 << 14))


def test_tokens_that_came_together_count() -> None:
    gaps = Gaps()
    assert gaps.summary() is None
    gaps.add(array("d", [1.0]))
    assert gaps.summary() is None
    gaps.add(array("d", [1.0, 1.0, 1.0, 3.0]))
    summary = gaps.summary()
    assert summary is not None
    assert (summary.count, summary.max) == (3, 2.0)
    assert summary.p50 == pytest.approx(0.0)
    assert summary.mean == pytest.approx(2 / 3)
