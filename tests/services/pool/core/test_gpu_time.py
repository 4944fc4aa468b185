"""The time of all GPUs goes somewhere, and no further than it should."""

from __future__ import annotations

import random

import pytest

from services.pool.core.gpu_time import IDLE, NO_MODEL, GpuTime
from services.pool.core.registry import Registry
from shared.messages.common import InstanceState
from shared.messages.registry import ModelRecord
from tests.records import heartbeat, model

M, N = model("m"), model("n", min_instances=0, serving="disaggregated")
LOOK_S = 0.2
KINDS: tuple[tuple[ModelRecord | None, InstanceState], ...] = (
    (None, "spare"), (M, "loading"), (M, "serving"), (M, "draining"), (N, "serving"),
)  # fmt: skip


def test_an_hour_of_workers_that_come_and_go_adds_up_to_their_gpu_seconds_across_a_change_of_leaders() -> None:
    """Clocks are moved by hand: the second leader begins when the first one's lease is over."""
    draw = random.Random(7)
    registry = Registry("pool-1")
    for record in (M, N):
        registry.put_model(record)
    alive: set[str] = set()
    now_s, sequence, changes_at_s, wall_s = 100.0, 0, 100.0, 0.0
    leaders = [GpuTime(registry, now_s)]
    while now_s < 3700.0:
        if now_s >= changes_at_s:
            changes_at_s = now_s + draw.expovariate(1 / 3)
            sequence += 1
            worker_id = f"w{draw.randrange(40)}"
            if worker_id in alive and draw.random() < 0.2:
                registry.forget([worker_id])
                alive.discard(worker_id)
            else:
                registry.take(heartbeat(worker_id, *draw.choice(KINDS), sequence=sequence), now_s, 1e6)
                alive.add(worker_id)
        if len(leaders) == 1 and now_s > 1900.0:
            leaders.append(GpuTime(registry, now_s))
        # A busy pool looks later than it should.
        step_s = draw.choice((LOOK_S, LOOK_S, 3.1))
        next_change_s = max(changes_at_s, now_s + 0.01)
        now_s, before_s = min(now_s + step_s, next_change_s), now_s
        wall_s += len(alive) * (now_s - before_s)
        leaders[-1].look(now_s)
    counted = [sum(leader.seconds.values()) for leader in leaders]
    assert all(counted)
    assert sum(counted) == pytest.approx(wall_s, rel=0.01)
    assert {name for name, _ in leaders[-1].seconds} == {"m", "n", NO_MODEL}


def test_each_model_gets_the_time_of_its_instances_and_what_is_of_none_is_idle() -> None:
    registry = Registry("pool-1")
    registry.put_model(M)
    registry.put_model(N)
    gpu_time = GpuTime(registry, 10.0)
    registry.take(heartbeat("w0", M, "serving"), 10.0, 60.0)
    registry.take(heartbeat("w1", M, "loading"), 10.0, 60.0)
    registry.take(heartbeat("w2"), 10.0, 60.0)
    registry.take(heartbeat("w3", model("unknown"), "draining"), 10.0, 60.0)
    gpu_time.look(14.0)
    assert gpu_time.seconds == {
        ("m", "serving"): 4,
        ("m", "loading"): 4,
        (NO_MODEL, IDLE): 4,
        (NO_MODEL, "draining"): 4,
    }
    assert gpu_time.instances == {
        ("m", "colocated", "serving"): 1,
        ("m", "colocated", "loading"): 1,
        ("n", "prefill", "serving"): 0,
        ("n", "decode", "serving"): 0,
        (NO_MODEL, "colocated", "draining"): 1,
    }
    assert [*gpu_time.instances] == sorted(gpu_time.instances)
    assert gpu_time.least == {("m", "colocated"): 1, ("n", "prefill"): 0, ("n", "decode"): 0}
    gpu_time.look(12.0)  # this process was stopped, and its lease is over: nothing more is its to count
    assert sum(gpu_time.seconds.values()) == 16
    registry.remove_model("m", 15.0)
    gpu_time.look(15.0)
    assert gpu_time.seconds == {(NO_MODEL, "serving"): 1, (NO_MODEL, "loading"): 1, (NO_MODEL, IDLE): 5,
                                (NO_MODEL, "draining"): 5}  # fmt: skip
    assert all(name != "m" for name, *_ in gpu_time.instances)


def test_a_report_is_of_all_or_of_one_model_and_what_is_idle_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry("pool-1")
    for record in (M, N):
        registry.put_model(record)
    gpu_time = GpuTime(registry, 10.0)
    for worker_id, serves, state in (("w0", M, "serving"), ("w1", N, "serving"), ("w2", N, "serving")):
        registry.take(heartbeat(worker_id, serves, state), 10.0, 1e6)
    registry.take(heartbeat("w3", None, "spare"), 10.0, 1e6)
    gpu_time.look(14.0)
    found = gpu_time.report("", 2.0)
    assert (found.counted_s, found.total_s, found.hour_cost) == (4.0, 16.0, 2.0)
    assert [(use.model, use.state, use.seconds) for use in found.uses] == [
        ("n", "serving", 8.0), ("", IDLE, 4.0), ("m", "serving", 4.0),
    ]  # fmt: skip
    assert [use.model for use in gpu_time.report("m", 0.0).uses] == ["", "m"]
    monkeypatch.setattr("services.pool.core.gpu_time.MAX_USES", 1)
    cut = gpu_time.report("", 2.0)
    assert ([use.model for use in cut.uses], cut.total_s) == (["n"], 16.0)
