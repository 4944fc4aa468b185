"""Models that exist on disk only, because host memory does not hold a copy of every one."""

from __future__ import annotations

import pytest

from services.pool.core.cluster import PUSH_EVERY_S, ClusterView
from services.pool.core.on_disk import ANSWER_S, ASKING_S, OnDisk
from services.pool.core.placement import UNUSED_S, Placer
from services.pool.core.steps import Drop, Hold, PlacementDecision
from shared.messages.registry import HostCopy, ModelRecord
from tests.records import model
from tests.services.pool.deciding import ANY_NUMBER
from tests.services.pool.host_copies import copy_of, holding

A, B, C, D = (model(name, weights_bytes=100) for name in "abcd")
BEGIN_S, LATER_S = 1000.0, 1000.0 + 10 * UNUSED_S


class World:
    """``w0`` has room for two copies, ``gpu`` for an instance; both do as they are told."""

    def __init__(self, *models: ModelRecord, readable: str = "abcd") -> None:
        self.cluster = ClusterView((), ANY_NUMBER)
        self.placer = Placer(self.cluster)
        self.readable = readable
        self.held: dict[str, HostCopy] = {}
        self.now_s = BEGIN_S
        self.sequence = 0
        self.asked: list[str] = []
        for record in models:
            self.cluster.copies.put_model(record)
        self.report()
        self.serve(None)

    def report(self) -> None:
        self.sequence += 1
        copies = [self.held[key] for key in sorted(self.held)]
        self.cluster.put_report(holding("w0", copies, capacity=200, sequence=self.sequence), self.now_s)

    def serve(self, record: ModelRecord | None, *, draining: bool = False) -> None:
        self.sequence += 1
        state = "draining" if draining else "serving"
        self.cluster.put_report(
            holding("gpu", serves=record, state=state, capacity=0, sequence=self.sequence),
            self.now_s,
        )

    def look(self) -> PlacementDecision:
        """One look, and all that it leads to at once."""
        decided = self.placer.look(self.now_s)
        for ask in decided.asks:
            self.asked.append(ask.record.name)
            readable = ask.record.name in self.readable
            self.cluster.disk_answered(ask.record.model_hash, self.now_s, readable=readable)
        for step in decided.steps:
            if isinstance(step, Hold):
                self.held[step.record.name] = copy_of(step.record)
            else:
                del self.held[step.model]
        if decided.steps:
            self.report()
        return decided

    def settle(self) -> list[tuple[str, str]]:
        """What was done until nothing more is: (what, model)."""
        done: list[tuple[str, str]] = []
        for _ in range(20):
            decided = self.look()
            done += [("drop", s.model) if isinstance(s, Drop) else ("hold", s.record.name) for s in decided.steps]
            if not (decided.steps or decided.asks or decided.unfinished):
                return done
        raise AssertionError("it does not come to rest")

    def on_disk(self) -> list[str]:
        return [entry.model for entry in self.look().unplaced if entry.on_disk]


def world(readable: str = "abcd") -> World:
    """``a`` and ``b`` have the room; ``c`` came later. Long unused, all of them."""
    made = World(A, B, C, readable=readable)
    assert made.settle() == [("hold", "a"), ("hold", "b")]
    made.now_s = LATER_S
    return made


def test_a_model_that_nobody_uses_pushes_out_none_and_is_said_to_be_on_disk() -> None:
    made = world()
    assert made.settle() == []
    assert (made.on_disk(), set(made.asked)) == (["c"], {"c"})


def test_what_no_worker_can_read_is_missing() -> None:
    made = world(readable="")
    made.settle()
    assert [(entry.model, entry.on_disk) for entry in made.look().unplaced] == [("c", False)]


def test_a_model_that_is_used_gets_the_room_of_the_one_that_was_unused_for_longest() -> None:
    made = world()
    made.serve(A)
    made.serve(None)
    made.now_s += 2 * UNUSED_S
    made.serve(C)
    assert made.settle() == [("drop", "b"), ("hold", "c")]
    assert made.on_disk() == ["b"]


def test_what_is_on_disk_only_does_not_come_back_before_it_is_used_or_there_is_room() -> None:
    made = world()
    made.serve(C)
    made.settle()
    made.serve(None)
    made.now_s += 100 * UNUSED_S
    assert made.settle() == []
    del made.held["b"]
    made.cluster.copies.remove_model("b")
    made.report()
    assert made.settle() == [("hold", "a")]
    assert made.on_disk() == []


def test_while_one_model_is_pushed_out_for_another_nobody_takes_the_room() -> None:
    made = World(A, B, C, D)
    made.settle()
    made.now_s = LATER_S
    made.serve(D)
    assert made.settle() == [("drop", "a"), ("hold", "d")]
    assert made.on_disk() == ["a", "c"]


@pytest.mark.parametrize("unused_s", [0.0, UNUSED_S - 1])
def test_models_that_take_turns_push_out_none(unused_s: float) -> None:
    made = world()
    for record in (A, B):
        made.serve(record)
    made.serve(None)
    made.now_s += unused_s
    made.serve(C)
    assert made.settle() == []
    made.now_s += UNUSED_S
    assert made.settle() == [("drop", "a"), ("hold", "c")]


def test_a_worker_lets_last_copies_go_one_after_the_other() -> None:
    made = world()
    made.serve(C)
    assert made.settle() == [("drop", "a"), ("hold", "c")]
    made.serve(A)
    made.now_s += PUSH_EVERY_S - 1
    assert made.settle() == []
    made.now_s += 10 * PUSH_EVERY_S
    assert made.settle() == [("drop", "b"), ("hold", "a")]


def test_neither_what_is_in_use_nor_what_cannot_be_read_goes() -> None:
    made = world(readable="bc")
    made.serve(B)
    made.sequence += 1
    made.cluster.put_report(holding("gpu-2", serves=C, capacity=0, sequence=made.sequence), made.now_s)
    assert made.settle() == []
    assert "a" in made.asked


def test_what_just_began_to_load_counts_as_used() -> None:
    made = world()
    made.sequence += 1
    loading = holding("gpu-2", serves=A, state="loading", capacity=0, sequence=made.sequence)
    made.cluster.put_report(loading, made.now_s)
    made.serve(C)
    assert made.settle() == [("drop", "b"), ("hold", "c")]


def test_a_model_on_disk_only_evicts_no_copy_of_a_model_that_a_gpu_serves() -> None:
    made = world()
    made.settle()
    made.serve(A)
    assert made.settle() == []


def test_a_pool_that_knows_nothing_of_earlier_uses_pushes_out_none_at_first() -> None:
    made = World(A, B, C)
    made.settle()
    made.serve(C)
    made.now_s += UNUSED_S - 1
    assert made.settle() == []


def test_answers_are_asked_for_again_and_end() -> None:
    on_disk = OnDisk()
    assert on_disk.wants_asking("h", 0.0)
    on_disk.asked("h", 0.0)
    assert not on_disk.wants_asking("h", ASKING_S - 1)
    assert on_disk.wants_asking("h", ASKING_S)
    assert on_disk.answered("h", 1.0, readable=True)
    assert not on_disk.answered("h", 2.0, readable=True)
    assert not on_disk.wants_asking("h", ANSWER_S)
    assert on_disk.wants_asking("h", 2.0 + ANSWER_S)
    assert on_disk.is_readable("h", 1.0 + ANSWER_S) is True
    assert on_disk.is_readable("h", 2.0 + 2 * ANSWER_S) is None
    assert on_disk.answered("h", 500.0, readable=False)
