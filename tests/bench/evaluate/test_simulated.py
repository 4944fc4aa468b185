"""Plans of the lab in virtual time."""

from __future__ import annotations

from functools import cache

import pytest

from bench.evaluate.models import find_model
from bench.evaluate.run import SETTLE_S
from bench.evaluate.saved_run import Placed, Plan
from bench.evaluate.simulated import SimulatedLab
from bench.evaluate.windows import Window
from bench.sim.cluster import known_cluster
from bench.sim.setup import Imposed
from bench.systems import find
from bench.traces.request import Trace, TraceRequest
from tests.bench.evaluate.runs import plan

STATIC, BLITZ = find("static-full"), find("blitz")


@cache
def lab(workers: int = 4) -> SimulatedLab:
    return SimulatedLab.of(find_model("llama3-8b"), known_cluster("lab"), workers=workers)


def of(system: str, seconds: float = 20.0, **instances: int) -> Plan:
    return plan(system, workers=4, window=Window(10.0, seconds), instances=instances or {"prefill": 1, "decode": 1})


def trace(*arrivals_s: float, tokens: int = 2000) -> Trace:
    return Trace("t.csv", tuple(TraceRequest(at_s, tokens, 10) for at_s in arrivals_s))


def test_what_comes_before_the_window_is_there_and_does_not_count() -> None:
    static = of("static-full", prefill=1, decode=3)
    alone = lab().run(STATIC, static, trace(11.0, 15.0))
    after_others = lab().run(STATIC, static, trace(*[10.0 - n / 100 for n in range(1, 21)][::-1], 11.0, 15.0))
    assert [record.index for record in after_others.records] == [record.index for record in alone.records] == [0, 1]
    # Twenty prompts take longer than the second after which the first one of the window comes, and not five.
    assert (after_others.records[0].ttft_s or 0) > 5 * (alone.records[0].ttft_s or 0)
    assert after_others.records[1].ttft_s == pytest.approx(alone.records[1].ttft_s)


def test_gpu_seconds_count_for_as_long_as_in_the_lab() -> None:
    result = lab().run(STATIC, of("static-full", prefill=2, decode=2), trace(2.0, 11.0, 12.0))
    assert result.cluster.gpu_seconds == pytest.approx(4 * (20.0 + SETTLE_S))
    assert result.zero_s + 1.0 == pytest.approx(result.cluster.begin_s)


def test_a_load_takes_what_the_links_of_the_lab_give() -> None:
    burst = trace(*[11.0 + n / 50 for n in range(60)])
    outs = [o for o in lab().run(BLITZ, of("blitz"), burst).cluster.operations if o.direction == "out"]
    assert outs
    # 40.2 MB over 250 Mbit/s, and what precedes and follows.
    assert [o for o in outs if not 1.25 < (o.trigger_to_serving_ms or 0) / 1000 < 1.8] == []


@pytest.mark.parametrize(("copies", "load_s"), [(range(2), 12.9), (range(4), 1.06)])
def test_it_begins_where_the_lab_was(copies: range, load_s: float) -> None:
    placed = Placed(instances={0: "prefill", 1: "decode"}, copies=dict.fromkeys(copies, True))
    burst = trace(*[11.0 + n / 50 for n in range(60)])
    result = lab().run(find("sllm"), of("sllm"), burst, placed=placed)
    outs = [o.trigger_to_serving_ms for o in result.cluster.operations if o.direction == "out"]
    # From the disk, or from the memory of its host.
    assert (outs[0] or 0) / 1000 == pytest.approx(load_s, rel=0.05)


def test_imposed_events_come_when_they_are_told_and_no_others() -> None:
    burst = trace(*[11.0 + n / 50 for n in range(60)])
    imposed = [Imposed(3.0, "prefill", 2), Imposed(9.0, "prefill", 1)]
    result = lab().run(BLITZ, of("blitz"), burst, imposed=imposed)
    found = [(round(o.at_s - result.zero_s, 1), o.direction, o.desired) for o in result.cluster.operations]
    assert found == [(3.0, "out", 2), (9.0, "in", 1)]
    assert not lab().run(BLITZ, of("blitz"), burst, imposed=[]).cluster.operations


def test_the_monitors_looks_are_shifted() -> None:
    burst = trace(*[11.0 + n / 50 for n in range(60)])
    first, second = (
        lab().run(BLITZ, of("blitz"), burst, looks_after_s=after_s).cluster.operations[0].at_s
        for after_s in (0.0, 0.05)
    )
    assert first != second
