"""Copies that loads leave on their hosts: they go when they have been of no use there for a while."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.pool.core.cluster import ClusterView
from services.pool.core.copies_policy import CopiesPolicy, copy_rules
from services.pool.core.steps import Drop, PlacementDecision
from shared.messages.registry import HostCopy, ModelRecord
from tests.records import model
from tests.services.pool.deciding import ANY_NUMBER
from tests.services.pool.host_copies import copy_of, holding

A, B = model("a", weights_bytes=100), model("b", weights_bytes=100)
KEEP_S = 60.0


class World:
    """Workers ``x0``, ``x1`` and ``y0`` on hosts ``x`` and ``y``."""

    def __init__(self, policy: CopiesPolicy = "kept", keep_copies_s: float = KEEP_S) -> None:
        self.cluster = ClusterView((), ANY_NUMBER)
        self.rules = copy_rules(policy, self.cluster, keep_copies_s)
        self.sequence = 0
        self.readable: bool | None = True
        for record in (A, B):
            self.cluster.copies.put_model(record)
        for worker_id in ("x0", "x1", "y0"):
            self.report(worker_id, 0.0)

    def report(
        self, worker_id: str, now_s: float, *copies: HostCopy, serves: ModelRecord | None = None, leaves: bool = False
    ) -> None:
        self.sequence += 1
        state = "draining" if leaves else "serving"
        beat = holding(worker_id, copies, serves=serves, state=state, host=worker_id[0], sequence=self.sequence)
        if beat.instance is not None:
            whole = msgspec.structs.replace(beat.instance, weights_digest="whole")
            beat = msgspec.structs.replace(beat, instance=whole)
        self.cluster.put_report(beat, now_s)
        self.cluster.refresh()

    def look(self, now_s: float) -> PlacementDecision:
        """One look; workers answer what they are asked."""
        decided = self.rules.look(now_s)
        for ask in decided.asks:
            if self.readable is not None:
                self.cluster.disk_answered(ask.record.model_hash, now_s, readable=self.readable)
        return decided

    def dropped(self, now_s: float) -> list[tuple[str, str]]:
        return [(step.worker.id, step.model) for step in self.look(now_s).steps if isinstance(step, Drop)]


def left(record: ModelRecord, *, serial: int = 1) -> HostCopy:
    return copy_of(record, cached=True, serial=serial)


def test_the_pool_places_none() -> None:
    world = World()
    world.report("x0", 1.0, serves=A)
    world.report("y0", 1.0, left(B))
    decided = world.look(2.0)
    assert (decided.steps, decided.unplaced, decided.asks) == ((), (), ())


def test_a_model_without_any_copy_is_shown_as_on_disk_once_a_worker_has_said_so() -> None:
    world = World()
    world.report("x0", 1.0, serves=A)
    assert [ask.record.name for ask in world.look(2.0).asks] == ["b"]
    assert [(u.model, u.on_disk) for u in world.look(2.1).unplaced] == [("b", True)]
    assert world.look(50.0).asks == ()
    assert [ask.record.name for ask in world.look(70.0).asks] == ["b"], "the answer has grown old"


def test_a_copy_goes_when_its_host_has_had_no_instance_for_the_time_to_keep_it() -> None:
    world = World()
    world.report("x0", 0.0, left(A), serves=A)
    world.report("y0", 0.0, serves=A)
    assert world.dropped(10 * KEEP_S) == [], "its instance uses it"
    world.report("x0", 1000.0, left(A))
    assert world.dropped(1000.0 + KEEP_S - 1) == []
    assert world.dropped(1000.0 + KEEP_S) == [("x0", "a")], "what runs on another host does not count"


def test_an_instance_on_another_worker_of_the_host_uses_it_too() -> None:
    world = World()
    world.report("y0", 0.0, serves=A)
    world.report("x0", 0.0, left(A))
    world.report("x1", KEEP_S - 1, serves=A)
    assert world.dropped(2 * KEEP_S) == []
    world.report("x1", 200.0)
    assert world.dropped(200.0 + KEEP_S - 1) == []
    assert world.dropped(200.0 + KEEP_S) == [("x0", "a")]


def test_what_does_not_change_does_not_put_it_off() -> None:
    world = World()
    world.report("y0", 0.0, serves=A)
    world.report("x0", 0.0, left(A))
    for now_s in (10.0, 20.0, 30.0):
        world.report("y0", now_s, left(B), serves=A)
        world.report("x0", now_s, *([left(A), left(B)] if now_s == 20.0 else [left(A)]))
    assert world.dropped(KEEP_S) == [("x0", "a")]


def test_zero_drops_it_at_once_and_without_limit_it_stays() -> None:
    for keep_s, dropped in ((0.0, [("x0", "a")]), (math.inf, [])):
        world = World(keep_copies_s=keep_s)
        world.report("y0", 0.0, serves=A)
        world.report("x0", 1.0, left(A))
        assert world.dropped(1.0) == dropped
        assert world.dropped(1e9) == []


def test_the_last_copy_goes_only_once_a_worker_says_that_it_can_read_the_model() -> None:
    world = World()
    world.readable = None
    world.report("x0", 0.0, left(A))
    world.report("x1", 0.0, serves=B)
    assert [ask.record.name for ask in world.look(KEEP_S).asks] == ["a"]
    assert world.dropped(KEEP_S + 1) == []
    world.cluster.disk_answered(A.model_hash, KEEP_S + 1, readable=True)
    assert world.dropped(KEEP_S + 2) == [("x0", "a")]
    assert world.cluster.outstanding.goes_to_disk(("x0", A.model_hash))


def test_a_last_copy_that_no_worker_can_read_stays() -> None:
    world = World()
    world.readable = False
    world.report("x0", 0.0, left(A))
    assert [world.dropped(KEEP_S + i) for i in range(3)] == [[], [], []]


def test_of_two_last_copies_one_counts_as_the_last() -> None:
    world = World()
    world.readable = False
    world.report("x0", 0.0, left(A))
    world.report("y0", 1.0, left(A))
    assert world.dropped(10 * KEEP_S) == [("x0", "a")]


def test_a_copy_that_its_worker_did_not_let_go_is_tried_again_after_as_long() -> None:
    world = World()
    world.report("y0", 0.0, serves=A)
    world.report("x0", 0.0, left(A))
    assert world.dropped(KEEP_S) == [("x0", "a")]
    world.cluster.outstanding.drop_over(("x0", A.model_hash))
    world.report("x0", KEEP_S + 1, left(A, serial=2))
    assert world.dropped(2 * KEEP_S) == []
    assert world.dropped(2 * KEEP_S + 1) == [("x0", "a")]


def test_the_workers_of_a_host_keep_one_copy() -> None:
    world = World()
    world.report("x0", 0.0, left(A), serves=A)
    world.report("x1", 0.0, left(A), serves=A)
    world.report("y0", 0.0, left(A), serves=A)
    assert world.dropped(1.0) == [("x1", "a")]


def test_whether_a_gpus_last_copy_is_on_disk_is_asked_when_it_is_to_go() -> None:
    world = World()
    world.report("x0", 0.0, left(B), serves=A, leaves=True)
    assert world.look(1.0).asks == ()
    assert world.rules.may_stay_on_disk(("x0", A.model_hash))
    assert not world.rules.could_take(A.model_hash)
    assert [ask.record.name for ask in world.look(2.0).asks] == ["a"]


@pytest.mark.parametrize("policy", ["one", "every-host"])
def test_other_rules_let_cached_copies_go_too_but_never_the_last(policy: CopiesPolicy) -> None:
    world = World(policy)
    for worker_id in ("x0", "y0"):
        world.report(worker_id, 0.0, copy_of(B), left(A) if worker_id == "x0" else copy_of(A))
    world.report("x1", 0.0, copy_of(A), copy_of(B))
    assert ("x0", "a") in world.dropped(KEEP_S)
    alone = World("one")
    alone.cluster.outstanding.hold_failed(("x0", A.model_hash), 0.0)  # so that it does not become the placed one
    alone.report("x0", 0.0, left(A))
    assert alone.dropped(KEEP_S) == []


Event = tuple[str, bool, ModelRecord | None, float]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["x0", "x1", "y0"]), st.booleans(), st.sampled_from([A, None]), st.floats(0.0, 2 * KEEP_S)
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS, readable=st.booleans())
def test_a_copy_that_is_used_or_the_last_and_not_on_disk_never_goes(events: list[Event], readable: bool) -> None:
    world, now_s = World(), 0.0
    world.readable = readable
    has: dict[str, tuple[bool, bool]] = {}
    for worker_id, holds, serves, after_s in events:
        now_s += after_s
        world.report(worker_id, now_s, *([left(A)] if holds else []), serves=serves)
        has[worker_id] = holds, serves is not None
        gone = {step.worker.id for step in world.look(now_s).steps}
        for name in gone:
            on_host = [w for w in has if w[0] == name[0]]
            others = any(has[w][0] for w in on_host if w not in gone)
            assert others or not any(has[w][1] for w in on_host), "it is the host's only one, and used"
        staying = sum(holds for w, (holds, _) in has.items() if w not in gone) + sum(s for _, s in has.values())
        assert staying or readable or not gone
        for name in gone:
            world.cluster.outstanding.drop_over((name, A.model_hash))
            has[name] = False, has[name][1]
            world.report(name, now_s, serves=A if has[name][1] else None)
