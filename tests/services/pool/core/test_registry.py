"""The registry in memory, and that readers of changes see what readers of everything see."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.pool.core import pages, table
from services.pool.core.pages import page_of
from services.pool.core.registry import Registry
from services.pool.core.worker_entry import Lease
from shared import subjects
from shared.errors import Conflict
from shared.messages.codec import encode
from shared.messages.common import InstanceState
from shared.messages.registry import Floor, GetSnapshot, Route, RouteChanges, Snapshot, Unplaced
from shared.registry import RegistryReader, RegistryView
from tests.records import heartbeat, model
from tests.services.pool.host_copies import copy_of, holding
from tests.shared.bus.memory import MemoryBroker

LEASE_S = 2.0
M, N = model("m"), model("n")


def page(registry: Registry) -> Snapshot:
    """The first page of everything."""
    found = page_of(registry, "", "", 0.0)
    assert found is not None
    return found


def filled(num_workers: int = 3) -> Registry:
    registry = Registry("pool-1")
    registry.put_model(M)
    for index in range(num_workers):
        registry.take(heartbeat(f"w{index}", M, "serving"), 0.0, LEASE_S)
    return registry


# --- reports -----------------------------------------------------------------------------------


def test_a_report_that_changes_nothing_is_not_stored_and_no_change_for_readers() -> None:
    registry = filled(1)
    first = registry.take(heartbeat("w0", M, "serving", sequence=2), 1.0, LEASE_S)
    assert first.store, "Redis was not told yet"
    registry.is_stored(registry.reports()[0])
    version = registry.version.number
    again = registry.take(heartbeat("w0", M, "serving", sequence=3), 1.5, LEASE_S)
    assert (again.accepted, again.store) == (True, False)
    assert registry.version.number == version
    assert registry.take(heartbeat("w0", M, "draining", sequence=4), 2.0, LEASE_S).store


def test_what_redis_did_not_take_is_stored_with_the_next_report() -> None:
    registry = filled(1)
    assert registry.take(heartbeat("w0", M, "serving", sequence=2), 0.1, LEASE_S).store
    assert registry.take(heartbeat("w0", M, "serving", sequence=3), 0.2, LEASE_S).store


def test_an_old_report_and_the_farewell_of_a_predecessor_are_not_taken() -> None:
    registry = filled(1)
    assert not registry.take(heartbeat("w0", sequence=1), 0.1, LEASE_S).accepted
    assert not registry.take(heartbeat("w0", leaving=True, incarnation="older", sequence=9), 0.1, LEASE_S).accepted
    assert registry.take(heartbeat("w0", incarnation="newer"), 0.1, LEASE_S).accepted
    assert registry.reports()[0].state == "spare"


def test_silent_workers_are_those_whose_lease_ran_out() -> None:
    registry = filled(3)
    registry.take(heartbeat("w1", M, "serving", sequence=2), 1.5, LEASE_S)
    assert registry.silent(1.9) == ()
    assert registry.silent(2.0) == ("w0", "w2")
    registry.lease(Lease("w0", "plan", "m", "colocated", 1, 9.0))
    assert registry.silent(2.0) == ("w0", "w2"), "a lease is no sign of life"


def test_traffic_counts_as_changed_from_two_per_cent_of_the_nic() -> None:
    registry = Registry("pool-1")
    registry.take(heartbeat("w0", nic_egress_gbps=1.0), 0.0, LEASE_S)
    version = registry.version.number
    registry.take(heartbeat("w0", nic_egress_gbps=1.1, sequence=2), 0.0, LEASE_S)
    assert registry.version.number == version
    registry.take(heartbeat("w0", nic_egress_gbps=1.3, sequence=3), 0.0, LEASE_S)
    assert page(registry).workers[0].nic_egress_gbps == 1.3


def test_a_copy_that_may_go_is_redis_business_until_it_is_gone() -> None:
    registry = Registry("pool-1")
    registry.take(holding("w0", [copy_of(M)]), 0.0, LEASE_S)
    registry.is_stored(registry.reports()[0])
    registry.retired("w0", "w0/host")
    assert registry.take(holding("w0", [copy_of(M)], sequence=2), 0.0, LEASE_S).store
    registry.is_stored(registry.reports()[0])
    registry.take(holding("w0", sequence=3), 0.0, LEASE_S)
    registry.is_stored(registry.reports()[0])
    assert not registry.take(holding("w0", sequence=4), 0.0, LEASE_S).store


def test_a_lease_ends_when_its_worker_works_under_it_or_its_time_is_over() -> None:
    registry = Registry("pool-1")
    for name in ("w0", "w1"):
        registry.take(heartbeat(name), 0.0, LEASE_S)
        registry.lease(Lease(name, "plan", "m", "decode", 7, 5.0))
    leases = [(w.lease_plan_id, w.lease_role) for w in page(registry).workers]
    assert leases == [("plan", "decode"), ("plan", "decode")]
    registry.take(heartbeat("w0", M, "loading", epoch=7, sequence=2), 0.0, LEASE_S)
    registry.end_leases(4.9)
    assert [lease.worker_id for lease in tuple(registry.leases.values())] == ["w1"]
    registry.end_leases(5.0)
    assert tuple(registry.leases.values()) == ()
    assert [w.lease_plan_id for w in page(registry).workers] == ["", ""]


def test_a_worker_that_is_about_to_end_is_seen_as_that() -> None:
    registry = Registry("pool-1")
    registry.put_model(M)
    registry.take(heartbeat("w0", M, "draining", stopping=True), 0.0, LEASE_S)
    assert page(registry).workers[0].stopping
    assert registry.table("m")[0].stopping


def test_removals_are_forgotten_when_old_or_many_but_not_while_a_worker_holds_something() -> None:
    registry = Registry("pool-1")
    for at_s, name in enumerate(("old", "held", "newer", "newest")):
        registry.put_model(model(name))
        registry.remove_model(name, float(at_s))
    registry.take(holding("w0", [copy_of(model("held"))]), 0.0, LEASE_S)
    assert registry.forget_removed(1.0, keep=100) == ("old",)
    assert registry.forget_removed(0.0, keep=1) == ("newer",)
    assert sorted(registry.models.removed()) == ["held", "newest"]


# --- routes ------------------------------------------------------------------------------------


def apply(known: dict[str, dict[str, Route]], event: RouteChanges) -> None:
    for name in event.removed_models:
        known.pop(name, None)
    for record in event.models:
        known.setdefault(record.name, {})
    for gone in event.gone:
        known[gone.model].pop(gone.instance_id, None)
    for found in event.routes:
        known[found.model][found.route.instance_id] = found.route


def test_a_change_of_one_route_says_nothing_of_the_others() -> None:
    registry = filled(100)
    registry.routes.take("pool-1")
    registry.take(heartbeat("w7", M, "draining", sequence=2), 0.0, LEASE_S)
    (event,), about = registry.routes.take("pool-1")
    assert [(r.model, r.route.worker_id, r.route.state) for r in event.routes] == [("m", "w7", "draining")]
    assert (event.models, event.gone, about) == ((), (), frozenset({"m"}))
    assert not registry.routes.waiting


def test_a_load_of_changes_is_cut_into_events_of_bounded_size_with_numbers_in_order() -> None:
    registry = filled(3000)
    events, _ = registry.routes.take("pool-1")
    assert len(events) > 1
    assert [e.sequence for e in events] == list(range(1, len(events) + 1))
    assert max(len(encode(e)) for e in events) < 160 * 1024
    assert sum(len(e.routes) for e in events) == 3000


STATES: tuple[InstanceState, ...] = ("spare", "loading", "live", "serving", "draining")
NAMES = ("m", "n")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), st.integers(0, 4), st.sampled_from(STATES), st.sampled_from(NAMES)),
        st.tuples(st.just("die"), st.integers(0, 4)),
        st.tuples(st.just("add"), st.sampled_from(NAMES), st.integers(0, 1)),
        st.tuples(st.just("remove"), st.sampled_from(NAMES)),
        st.tuples(st.just("floor"), st.sampled_from(NAMES), st.integers(0, 3)),
        st.tuples(st.just("unplaced"), st.sampled_from(NAMES)),
        st.tuples(st.just("lease"), st.integers(0, 4)),
        st.tuples(st.just("read")),
    ),
    max_size=60,
)


class Driver:
    """A registry, a reader of its changes, and one of its routes."""

    def __init__(self) -> None:
        self.registry = Registry("pool-1")
        self.sequence = 0
        self.known: dict[str, dict[str, Route]] = {}
        self.numbers: list[int] = []

    def do(self, step: tuple[Any, ...]) -> None:
        kind, *rest = step
        match kind:
            case "beat":
                index, state, name = rest
                self.sequence += 1
                self.registry.take(heartbeat(f"w{index}", model(name), state, sequence=self.sequence), 0.0, LEASE_S)
            case "die":
                self.registry.forget([f"w{rest[0]}"])
            case "add":
                name, weights = rest
                found = self.registry.models.get(name)
                if found is None:
                    self.registry.put_model(model(name, **({"model_hash": "other"} if weights else {})))
            case "remove":
                self.registry.remove_model(rest[0], 0.0)
            case "floor":
                self.registry.models.set_floor(Floor(model=rest[0], instances=rest[1], left_s=9.0), 0.0)
            case "unplaced":
                self.registry.models.set_unplaced([Unplaced(model=rest[0], model_hash="h", reason="full")])
            case "lease":
                self.registry.lease(Lease(f"w{rest[0]}", "plan", "m", "colocated", 1 << 40, 9.0))
            case "read":
                self.follow()

    def follow(self) -> None:
        events, _ = self.registry.routes.take("pool-1")
        for event in events:
            self.numbers.append(event.sequence)
            apply(self.known, event)


async def read_all(registry: Registry, read: Callable[[RegistryReader], Any] | None = None) -> RegistryView:
    broker = MemoryBroker()
    await broker.bus("pool").respond(subjects.pool("snapshot"), GetSnapshot, answering(registry))
    return await RegistryReader(broker.bus("reader")).read(timeout_s=60)


def timeless(view: RegistryView) -> RegistryView:
    """Without what floors have left."""
    floors = {about: msgspec.structs.replace(floor, left_s=0.0) for about, floor in view.floors.items()}
    return dataclasses.replace(view, floors=floors)


def answering(registry: Registry) -> Callable[[GetSnapshot], Any]:
    async def on_snapshot(request: GetSnapshot) -> Snapshot:
        found = page_of(registry, request.cursor, request.since, 0.0)
        if found is None:
            raise Conflict("another registry")
        return found

    return on_snapshot


@settings(max_examples=150, deadline=None)
@given(steps=steps, page_bytes=st.sampled_from([1, 600, 100_000]))
def test_readers_of_changes_know_what_readers_of_everything_know(steps: list[tuple[Any, ...]], page_bytes: int) -> None:
    async def run() -> None:
        driver = Driver()
        broker = MemoryBroker()
        await broker.bus("pool").respond(subjects.pool("snapshot"), GetSnapshot, answering(driver.registry))
        reader = RegistryReader(broker.bus("reader"))
        for step in steps:
            driver.do(step)
            if step[0] == "read":
                assert timeless(await reader.read(timeout_s=60)) == timeless(await read_all(driver.registry))
        assert timeless(await reader.read(timeout_s=60)) == timeless(await read_all(driver.registry))
        driver.follow()
        names = [record.name for record in driver.registry.models.records()]
        tables = {name: driver.registry.table(name) for name in names}
        assert {n: tuple(sorted(r.values(), key=lambda r: r.instance_id)) for n, r in driver.known.items()} == tables
        assert driver.numbers == list(range(1, len(driver.numbers) + 1))

    before = pages.PAGE_BYTES
    pages.PAGE_BYTES = page_bytes
    try:
        asyncio.run(run())
    finally:
        pages.PAGE_BYTES = before


# --- readers -----------------------------------------------------------------------------------


def test_pages_are_bounded_by_bytes_whatever_the_number_of_models() -> None:
    registry = Registry("pool-1")
    for index in range(500):
        registry.put_model(model(f"m{index:03}"))
    for index in range(500):
        registry.take(heartbeat(f"w{index:03}", model(f"m{index:03}"), "serving"), 0.0, LEASE_S)
    pages, cursor = [], ""
    while True:
        found = page_of(registry, cursor, "", 0.0)
        assert found is not None
        pages.append(found)
        cursor = found.next_cursor
        if not cursor:
            break
    assert max(len(encode(p)) for p in pages) < 256 * 1024
    assert [m.name for p in pages for m in p.models] == [f"m{index:03}" for index in range(500)]
    assert len([w for p in pages for w in p.workers]) == 500
    assert len(pages) < 10


def test_changes_cost_what_changed() -> None:
    registry = filled(1000)
    first = page_of(registry, "", "", 0.0)
    assert first is not None
    registry.take(heartbeat("w5", M, "draining", sequence=2), 0.0, LEASE_S)
    registry.forget(["w6"])
    page = page_of(registry, "", first.version, 0.0)
    assert page is not None
    assert [w.worker.worker_id for w in page.workers] == ["w5"]
    assert (page.partial, page.gone_workers, page.models, page.next_cursor) == (True, ("w6",), (), "")


@pytest.mark.parametrize("since", ["", "pool-0/5", "pool-1/x", "pool-1/999999", "rubbish"])
def test_a_version_that_is_not_known_gets_everything(since: str) -> None:
    page = page_of(filled(2), "", since, 0.0)
    assert page is not None
    assert not page.partial
    assert len(page.workers) == 2


def test_who_asks_for_changes_of_too_long_ago_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_GONE", 2)
    registry = filled(5)
    first = page_of(registry, "", "", 0.0)
    assert first is not None
    registry.forget(["w0", "w1"])
    page = page_of(registry, "", first.version, 0.0)
    assert page is not None
    assert page.partial
    registry.forget(["w2"])
    page = page_of(registry, "", first.version, 0.0)
    assert page is not None
    assert not page.partial


@pytest.mark.parametrize("cursor", ["pool-2/1/m/", "pool-1/x/m/", "pool-1/1/z/", "rubbish"])
def test_a_cursor_of_another_registry_is_refused(cursor: str) -> None:
    assert page_of(filled(), cursor, "", 0.0) is None
