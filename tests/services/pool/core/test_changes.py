"""That a reader in the pool's own process, told only what changed, knows what there is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.pool.core import table
from services.pool.core.pages import page_of
from services.pool.core.registry import Registry
from services.pool.core.worker_entry import Lease
from shared.messages.registry import Floor, ModelRecord, Unplaced, WorkerHeartbeat
from tests.records import heartbeat, model
from tests.services.pool.host_copies import copy_of, holding

M = model("m")


class Follower:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.seen = 0
        self.models: dict[str, ModelRecord] = {}
        self.reports: dict[str, WorkerHeartbeat] = {}
        self.told = 0

    def read(self, registry: Registry) -> None:
        changes = registry.changes(self.seen)
        self.seen = changes.version
        self.told = len(changes.models) + len(changes.reports)
        if changes.whole:
            self.models, self.reports = {}, {}
        for name in changes.gone_models:
            self.models.pop(name, None)
        for worker_id in changes.gone_workers:
            self.reports.pop(worker_id, None)
        self.models |= {record.name: record for record in changes.models}
        self.reports |= {report.worker.worker_id: report for report in changes.reports}


def test_only_what_changed_is_told() -> None:
    registry, follower = Registry("pool-1"), Follower()
    for index in range(20):
        registry.put_model(model(f"m{index}"))
        registry.take(holding(f"w{index}"), 0.0, 2.0)
    follower.read(registry)
    assert follower.told == 40
    for index in range(20):
        registry.take(holding(f"w{index}", sequence=2), 0.0, 2.0)
    follower.read(registry)
    assert follower.told == 0
    registry.take(holding("w3", [copy_of(M)], sequence=3), 0.0, 2.0)
    registry.put_model(model("m5", slo_ttft_s=3.0))
    follower.read(registry)
    assert follower.told == 2
    assert follower.reports["w3"].host_copies[0].model == "m"


def test_who_missed_too_much_is_told_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_GONE", 2)
    registry, follower = Registry("pool-1"), Follower()
    for index in range(6):
        registry.take(heartbeat(f"w{index}"), 0.0, 2.0)
    follower.read(registry)
    registry.forget([f"w{index}" for index in range(4)])
    follower.read(registry)
    assert sorted(follower.reports) == ["w4", "w5"]
    assert follower.told == 2


names = st.sampled_from(["a", "b", "c"])
changes = st.one_of(
    st.tuples(st.just("report"), names, st.integers(0, 2)),
    st.tuples(st.just("put"), names, st.integers(0, 1)),
    st.tuples(st.sampled_from(["forget", "remove", "read"]), names, st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(changes, max_size=40))
def test_a_reader_of_changes_knows_what_there_is(made: list[tuple[str, str, Any]]) -> None:
    registry, follower = Registry("pool-1"), Follower()
    for sequence, (what, name, how) in enumerate(made, start=1):
        if what == "report":
            registry.take(holding(name, [copy_of(M)] * (how > 0), capacity=how, sequence=sequence), 0.0, 2.0)
        elif what == "put":
            registry.put_model(model(name, model_hash=f"{name}{how}"))
        elif what == "forget":
            registry.forget([name])
        elif what == "remove":
            registry.remove_model(name, 0.0)
        else:
            follower.read(registry)
    follower.read(registry)
    assert follower.models == {record.name: record for record in registry.models.records()}
    shown = {w: (r.worker, r.host_copies) for w, r in follower.reports.items()}
    assert shown == {r.worker.worker_id: (r.worker, r.host_copies) for r in registry.reports()}


def test_a_lease_or_floor_in_place_of_another_ends_when_the_new_one_does() -> None:
    registry = Registry("pool-1")
    registry.put_model(M)
    registry.take(heartbeat("w0"), 0.0, 2.0)
    registry.lease(Lease("w0", "first", "m", "colocated", 1, 5.0))
    registry.lease(Lease("w0", "second", "m", "colocated", 2, 9.0))
    registry.models.set_floor(Floor(model="m", instances=1, left_s=5.0), 0.0)
    registry.models.set_floor(Floor(model="m", instances=2, left_s=9.0), 0.0)
    registry.end_leases(6.0)
    registry.models.end_floors(6.0)
    assert [lease.plan_id for lease in tuple(registry.leases.values())] == ["second"]
    assert [floor.instances for floor in registry.models.floors(6.0)] == [2]
    registry.end_leases(9.0)
    registry.models.end_floors(9.0)
    assert (tuple(registry.leases.values()), registry.models.floors(6.0)) == ((), ())


def test_what_is_said_of_models_without_a_copy_is_forgotten_once_it_is_not_said_again() -> None:
    registry = Registry("pool-1")
    for name in ("a", "b", "c"):
        registry.put_model(model(name))
    said = {name: Unplaced(model=name, model_hash=f"hash-of-{name}", reason="full") for name in ("a", "b")}
    registry.models.set_unplaced(said.values())
    version = registry.version.number

    def told() -> tuple[Unplaced, ...]:
        page = page_of(registry, "", "", 0.0)
        assert page is not None
        return page.unplaced

    registry.models.set_unplaced([said["a"], said["b"]])
    assert registry.version.number == version
    registry.put_model(model("a", slo_ttft_s=1.0))
    assert told() == (said["a"], said["b"])
    registry.models.set_unplaced([said["b"]])
    assert told() == (said["b"],)


def test_a_removal_is_remembered_while_some_copy_bears_the_name() -> None:
    registry = Registry("pool-1")
    for name in ("a", "b"):
        registry.put_model(model(name))
        registry.remove_model(name, 0.0)
    registry.take(holding("w0", [copy_of(model("a"))]), 0.0, 2.0)
    registry.take(holding("w1", [copy_of(model("a")), copy_of(model("b"))]), 0.0, 2.0)
    registry.take(holding("w1", [copy_of(model("b"))], sequence=2), 0.0, 2.0)
    assert registry.forget_removed(1.0, keep=0) == ()
    registry.forget(["w0"])
    assert registry.forget_removed(1.0, keep=0) == ("a",)
    registry.take(holding("w1", sequence=3), 0.0, 2.0)
    assert registry.forget_removed(1.0, keep=0) == ("b",)
