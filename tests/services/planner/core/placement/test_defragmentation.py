"""Whose requests move so that one that waits for KV can begin."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.placement.defragmentation import LACKS_S, RESERVE_SHARE, REST_S, Relief, Serves, relief
from services.planner.core.placement.migration import MAX_DESTINATIONS
from shared.messages.common import Role
from tests.processes import process

SMALL = 1000
"""Bytes of KV per token."""


def serves(
    name: str,
    free: int = 1000,
    head: int = 0,
    *,
    role: Role = "colocated",
    queued: int | None = None,
    lacked_s: float | None = None,
    slots: int = 4,
    decoding: int = 3,
    context: int = 4096,
    kv: int = 1000,
) -> Serves:
    return Serves(
        process(f"w-{name}"),
        name,
        role,
        context,
        free_slots=slots,
        decoding=decoding,
        kv=kv,
        free_kv=free,
        queued_kv=head if queued is None else queued,
        head_kv=head,
        lacked_s=(LACKS_S if head > free else 0.0) if lacked_s is None else lacked_s,
    )


def named(found: Relief | None) -> list[tuple[str, int]]:
    return [(d.instance_id, d.kv_tokens) for d in found.destinations] if found is not None else []


def test_who_lacks_kv_gives_to_those_that_have_the_most_beyond_their_own_needs_and_a_reserve() -> None:
    others = [serves("b", 400), serves("c", 600, head=200), serves("d", 90)]
    found = relief([serves("a", 100, 500), *others], SMALL)
    assert found is not None
    assert (found.source.worker.id, named(found)) == ("w-a", [("b", 300), ("c", 300)])
    assert found.why == (
        "the first waiting request of a has lacked KV of 400 tokens for 0.5 s, and 2 others have that much to spare"
    )
    assert relief([serves("a", 100, 701), *others], SMALL) is None, "601 are more than the two have"


def test_the_smallest_move_comes_first() -> None:
    instances = [serves("a", 100, 500), serves("b", 100, 200), serves("c")]
    found = relief(instances, SMALL)
    assert found is not None
    assert found.source.instance_id == "b"
    found = relief(instances, SMALL, relieved={"b"}, taken={"c"})
    assert found is not None
    assert (found.source.instance_id, named(found)) == ("a", [("c", 900)])
    assert relief(instances, SMALL, relieved={"a", "b"}) is None
    assert relief(instances, SMALL, taken={"a", "b"}) is None
    assert relief(instances, SMALL, relieved={"c"}) is None


@pytest.mark.parametrize(
    "other",
    [
        serves("b", role="decode"),
        serves("b", slots=0),
        serves("b", context=4095),
        serves("b", 300, queued=201),
        serves("b", 199),
        serves("b", 50, 60),
        serves("b", 1000, kv=10_000),
    ],
    ids=["role", "slots", "context", "queue", "reserve", "lacks itself", "no more than its reserve"],
)
def test_who_has_no_use_for_it_or_no_room_takes_nothing(other: Serves) -> None:
    assert relief([serves("a", 100, 200), other], SMALL) is None


@pytest.mark.parametrize(
    "source",
    [
        serves("a", 200, 200),
        serves("a", 100, 200, lacked_s=LACKS_S - 0.01),
        serves("a", 100, 200, decoding=0),
        serves("a", 100, 200, role="prefill"),
    ],
    ids=["it fits", "only now", "nothing runs", "prefill"],
)
def test_without_need_nothing_moves(source: Serves) -> None:
    assert relief([source, serves("b", role=source.role)], SMALL) is None


def test_what_takes_long_to_move_waits_for_as_long_first() -> None:
    megabyte = 1 << 20
    waiting = {seconds: serves("a", 100, 900, lacked_s=seconds) for seconds in (LACKS_S, 1.0)}
    assert relief([waiting[LACKS_S], serves("b")], megabyte) is None
    assert relief([waiting[1.0], serves("b")], megabyte) is not None


def test_decode_instances_help_each_other() -> None:
    assert named(relief([serves("a", 0, 200, role="decode"), serves("b", role="decode")], SMALL)) == [("b", 900)]


some = st.builds(
    serves,
    st.integers(0, 5).map(str),
    st.integers(0, 1000),
    st.integers(0, 1000),
    role=st.sampled_from(("colocated", "decode", "prefill")),
    queued=st.integers(0, 1000),
    lacked_s=st.floats(0.0, 3.0),
    slots=st.integers(0, 2),
    decoding=st.integers(0, 2),
    context=st.sampled_from((1024, 4096)),
)


@given(st.lists(some, max_size=6, unique_by=lambda one: one.instance_id), st.sets(st.sampled_from("012345")))
def test_any_move_has_a_need_and_room_for_it(instances: list[Serves], relieved: set[str]) -> None:
    found = relief(instances, SMALL, relieved=relieved)
    if found is None:
        return
    source, by_id = found.source, {one.instance_id: one for one in instances}
    assert source.lacking_kv > 0
    assert source.lacked_s >= LACKS_S
    assert source.instance_id not in relieved
    assert 0 < len(found.destinations) <= MAX_DESTINATIONS
    assert sum(d.kv_tokens for d in found.destinations) >= source.lacking_kv
    for destination in found.destinations:
        taker = by_id[destination.instance_id]
        assert taker.instance_id not in relieved | {source.instance_id}
        assert taker.role == source.role
        assert taker.free_slots > 0
        left = taker.free_kv - destination.kv_tokens
        assert destination.kv_tokens > 0
        assert left >= max(taker.head_kv, taker.queued_kv, int(RESERVE_SHARE * taker.kv))


@dataclass
class Simulated:
    """An instance whose requests neither end nor grow."""

    name: str
    running: list[int]
    waiting: list[int] = field(default_factory=list)

    @property
    def free(self) -> int:
        return 1000 - sum(self.running)

    def admit(self) -> None:
        while self.waiting and self.waiting[0] <= self.free:
            self.running.append(self.waiting.pop(0))

    def as_reported(self) -> Serves:
        head = self.waiting[0] if self.waiting else 0
        return serves(self.name, self.free, head, queued=sum(self.waiting), slots=9, decoding=len(self.running))


sizes = st.integers(20, 400)


@given(st.lists(st.tuples(st.lists(sizes, max_size=4), st.lists(sizes, max_size=4)), min_size=2, max_size=4))
def test_requests_do_not_go_round_and_round(fleet: list[tuple[list[int], list[int]]]) -> None:
    instances = [Simulated(str(i), [], [*running, *waiting]) for i, (running, waiting) in enumerate(fleet)]
    for one in instances:
        one.admit()
    by_id, waiting, moves = {one.name: one for one in instances}, sum(len(one.waiting) for one in instances), 0
    relieved: dict[str, float] = {}
    taken: dict[str, float] = {}
    for second in range(100):
        relieved = {i: s for i, s in relieved.items() if second - s < REST_S}
        taken = {i: s for i, s in taken.items() if second - s < REST_S}
        found = relief([one.as_reported() for one in instances], SMALL, relieved=relieved, taken=taken)
        if found is None:
            continue
        source, first = by_id[found.source.instance_id], found.destinations[0]
        relieved[source.name] = second
        taken |= {d.instance_id: second for d in found.destinations}
        # The worker moves what makes room, or nothing.
        suffices = [size for size in source.running if found.source.lacking_kv <= size <= first.kv_tokens]
        if suffices:
            moves += 1
            source.running.remove(min(suffices))
            by_id[first.instance_id].running.append(min(suffices))
            source.admit()
            assert all(one.free >= 0 for one in instances)
    assert moves <= waiting, "each lets one begin"
