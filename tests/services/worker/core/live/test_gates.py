"""A computed split: put in force whenever its batches come, dropped when layers are late."""

from __future__ import annotations

import pytest

from services.worker.core.live.gates import Gates
from shared.messages.live import Gate
from shared.zigzag.queue import Claim, Policy, Queue, Wait
from tests.services.worker.live.members import assignment

PLANNED_S = (100.0, 102.0, 104.0, 106.0)


def gates(**changes: object) -> Gates:
    return Gates(assignment(**({"layers_ready_s": PLANNED_S} | changes)))


def gate(batch_id: str, num_layers: int) -> Gate:
    return Gate(batch_id=batch_id, num_layers=num_layers)


def queue_of(*batch_ids: str, policy: Policy = Policy.ZIGZAG) -> Queue:
    queue = Queue(4, policy)
    for batch_id in batch_ids:
        queue.add(batch_id, 1.0)
    return queue


def in_force(queue: Queue) -> dict[str, int | None]:
    return {b.batch_id: b.gate for b in queue.batches()}


def test_batches_that_are_here_are_gated_at_once() -> None:
    queue = queue_of("a", "b", "c")
    gates().set(queue, [gate("a", 2), gate("c", 0)])
    assert in_force(queue) == {"a": 2, "b": None, "c": 0}
    assert queue.pull("1") == Wait("a", "gate")


def test_a_batch_that_comes_later_is_gated_when_it_comes() -> None:
    kept, queue = gates(), queue_of("a")
    kept.set(queue, [gate("b", 3)])
    assert in_force(queue) == {"a": None}
    queue.add("b", 1.0)
    kept.added(queue, "b")
    queue.add("c", 1.0)
    kept.added(queue, "c")
    assert in_force(queue) == {"a": None, "b": 3, "c": None}


def test_before_there_is_a_split_batches_come_without_gates() -> None:
    kept, queue = gates(), queue_of("a")
    kept.added(queue, "a")
    assert in_force(queue) == {"a": None}
    assert not kept.lapse_if_late(queue, 1e9)


def test_a_newer_split_replaces_the_older_one() -> None:
    kept, queue = gates(), queue_of("a", "b")
    kept.set(queue, [gate("a", 2), gate("later", 1)])
    kept.set(queue, [gate("b", 1)])
    assert in_force(queue) == {"a": None, "b": 1}
    queue.add("later", 1.0)
    kept.added(queue, "later")
    assert in_force(queue)["later"] is None


@pytest.mark.parametrize("num_layers", [-1, 5, 1000])
def test_nonsense_is_left_out(num_layers: int) -> None:
    queue = queue_of("a", "b")
    gates().set(queue, [gate("a", num_layers), gate("b", 4), gate("nobody", 2)])
    assert in_force(queue) == {"a": None, "b": 4}


def test_what_has_ended_is_not_gated() -> None:
    queue = queue_of("a")
    queue.cancel("a")
    kept = gates()
    kept.set(queue, [gate("a", 2)])
    kept.added(queue, "a")
    assert queue.batch("a").gate is None


@pytest.mark.parametrize("policy", [Policy.BEST_EFFORT, Policy.OVERLAP, Policy.STOP_THE_WORLD])
def test_the_baselines_have_no_gates(policy: Policy) -> None:
    kept, queue = gates(), queue_of("a", policy=policy)
    kept.set(queue, [gate("a", 2)])
    kept.added(queue, "a")
    assert in_force(queue) == {"a": None}
    assert not kept.lapse_if_late(queue, 1e9)


@pytest.mark.parametrize("layers_ready", range(4))
def test_they_lapse_when_the_next_layer_is_late_by_the_time_of_one(layers_ready: int) -> None:
    kept, queue = gates(), queue_of("a")
    kept.set(queue, [gate("a", 4)])
    queue.set_layers_ready(layers_ready)
    due_s = PLANNED_S[layers_ready]
    assert not kept.lapse_if_late(queue, due_s + 1.99)
    assert in_force(queue) == {"a": 4}
    assert kept.lapse_if_late(queue, due_s + 2.0)
    assert in_force(queue) == {"a": None}
    assert not kept.lapse_if_late(queue, due_s + 3.0), "once"
    queue.add("b", 1.0)
    kept.added(queue, "b")
    assert isinstance(queue.pull("1"), Claim)


def test_after_a_lapse_later_batches_are_not_gated() -> None:
    kept, queue = gates(), queue_of("a")
    kept.set(queue, [gate("a", 2), gate("b", 2)])
    assert kept.lapse_if_late(queue, 102.0)
    queue.add("b", 1.0)
    kept.added(queue, "b")
    assert in_force(queue)["b"] is None


def test_a_split_computed_after_a_lapse_counts_until_the_next_one() -> None:
    kept, queue = gates(), queue_of("a")
    kept.set(queue, [gate("a", 2)])
    kept.lapse_if_late(queue, 102.0)
    queue.set_layers_ready(1)
    kept.set(queue, [gate("a", 3)])
    assert in_force(queue) == {"a": 3}
    assert not kept.lapse_if_late(queue, 103.9)
    assert kept.lapse_if_late(queue, 104.0)


def test_once_everything_is_loaded_nothing_is_late() -> None:
    kept, queue = gates(), queue_of("a")
    kept.set(queue, [gate("a", 2)])
    queue.set_layers_ready(4)
    assert not kept.lapse_if_late(queue, 1e9)


@pytest.mark.parametrize("planned", [(), (100.0,)])
def test_without_planned_times_nothing_is_late(planned: tuple[float, ...]) -> None:
    kept, queue = gates(layers_ready_s=planned), queue_of("a")
    kept.set(queue, [gate("a", 2)])
    assert not kept.lapse_if_late(queue, 1e9)
    assert in_force(queue) == {"a": 2}
