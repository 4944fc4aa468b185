"""A model without a request is looked at in a short way, and the verdict is the same."""

from __future__ import annotations

import random

import pytest

from services.monitor.core.demand import DemandSettings, ModelDemand
from services.monitor.core.policy import DemandPolicy
from shared.messages.load import LoadReport, ModelQueue
from tests.services.monitor.core.reports import queue, report


def _same_twice(seed: int) -> list[tuple[int, float]]:
    """The verdicts of some minutes' moments, idle ones among them, in both ways; they must not differ."""
    rng = random.Random(seed)
    short, long = ModelDemand(DemandPolicy(down_window_s=0.0)), ModelDemand(DemandPolicy(down_window_s=0.0))
    long.is_idle = lambda reports: False  # type: ignore[method-assign]
    verdicts, now_s, arrived, observed = [], 100.0, 0, 3
    for _ in range(300):
        now_s += rng.choice((0.1, 0.1, 0.1, 1.0, 3.0))
        busy = rng.random() < 0.4
        if busy:
            arrived += 1
        for message in _messages(rng, busy, arrived):
            for demand in (short, long):
                if isinstance(message, LoadReport):
                    demand.on_load(message, now_s)
                else:
                    demand.on_queue("gw", message, now_s)
        one, other = (d.colocated(now_s, observed, DemandSettings(slo_tbt_s=0.05)) for d in (short, long))
        assert (one.desired, one.needed) == (other.desired, other.needed)
        assert short.tokens_per_s == long.tokens_per_s
        verdicts.append((one.desired, one.needed))
        observed = max(1, one.desired)
    return verdicts


def _messages(rng: random.Random, busy: bool, arrived: int) -> list[LoadReport | ModelQueue]:
    load = rng.randrange(1, 2000) if busy else 0
    found: list[LoadReport | ModelQueue] = []
    if rng.random() < 0.9:
        running = rng.randrange(40) if busy else 0
        found.append(report(queued_tokens=load, running_requests=running, decode_request_s=0.001))
    if rng.random() < 0.7:
        found.append(queue(arrived * 500, load, inflight=int(busy)))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_short_way_comes_to_the_same_verdicts(seed: int) -> None:
    verdicts = _same_twice(seed)
    assert any(needed > 0 for _, needed in verdicts)
    assert any(needed == 0 for _, needed in verdicts)
