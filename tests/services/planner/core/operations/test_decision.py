from __future__ import annotations

import msgspec
import pytest

from services.planner.core.operations.decision import decide
from shared.messages.common import Role
from shared.messages.registry import Floor, WorkerRecord
from tests.records import model, worker_record

M = model("m", max_instances=4)
ROLES: tuple[Role, ...] = ("colocated", "prefill", "decode")


def test_missing_instances_are_loaded() -> None:
    decision = decide(M, [worker_record("w0", M, "serving"), worker_record("w1")], 3, None)
    assert (decision.current, decision.load, decision.revive, decision.drain) == (1, 2, (), ())


def test_all_roles_together_have_the_most() -> None:
    workers = [worker_record(f"w{i}", M, "serving", role=role) for i, role in enumerate(("prefill", "decode"))]
    assert decide(M, workers, 9, None, role="decode").load == 2
    assert decide(M, workers, 9, Floor(model="m", instances=4, left_s=1.0, role="decode"), role="decode").load == 2
    # The limit is lower than it was: nothing goes for it that is asked to stay.
    low = msgspec.structs.replace(M, max_instances=2)
    workers.append(worker_record("w2", M, "serving", role="decode"))
    assert decide(low, workers, 2, None, role="decode").nothing
    assert decide(low, workers, 3, None, role="prefill").nothing
    assert [w.worker.worker_id for w in decide(low, workers, 1, None, role="decode").drain] == ["w1"]


def test_loading_instances_and_leased_workers_count() -> None:
    workers = [
        worker_record("w0", M, "serving"),
        worker_record("w1", M, "loading"),
        worker_record("w2", lease_plan_id="p", lease_model="m"),
        worker_record("w3", lease_plan_id="q", lease_model="other"),
    ]
    assert decide(M, workers, 3, None).nothing


def test_an_instance_whose_lease_still_shows_counts_once() -> None:
    workers = [
        worker_record("w0", M, "serving"),
        worker_record("w1", M, "loading", lease_plan_id="p", lease_model="m"),
    ]
    decision = decide(M, workers, 3, None)
    assert (decision.current, decision.load) == (2, 1)


def test_draining_instances_are_revived_before_anything_is_loaded() -> None:
    workers = [worker_record("w0", M, "serving"), worker_record("w1", M, "draining")]
    decision = decide(M, workers, 3, None)
    assert [w.worker.worker_id for w in decision.revive] == ["w1"]
    assert decision.load == 1


def test_the_newest_instances_are_drained() -> None:
    workers = [worker_record(f"w{i}", M, "serving", epoch=10 - i) for i in range(3)]
    decision = decide(M, workers, 1, None)
    assert [w.worker.worker_id for w in decision.drain] == ["w0", "w1"]


def test_of_those_with_as_much_to_do_who_shares_a_worker_or_a_host_with_the_only_copy_goes_first() -> None:
    hosts = {"w0": "x", "w1": "x", "w2": "y"}
    workers = [worker_record(f"w{i}", M, "serving", epoch=i, host=hosts[f"w{i}"]) for i in range(3)]

    def drained(desired: int, *holders: WorkerRecord, busy: str = "") -> list[str]:
        copies_at = [holder.worker for holder in holders]
        decision = decide(M, workers, desired, None, at_work=lambda i: i == f"i-{busy}", copies_at=copies_at)
        return [w.worker.worker_id for w in decision.drain]

    assert drained(1, workers[0]) == ["w0", "w1"]
    assert drained(1, worker_record("c", host="x")) == ["w1", "w0"]
    assert drained(2, workers[0], busy="w0") == ["w1"]
    assert drained(2, workers[0], worker_record("c", host="z")) == ["w2"], "the other copy stays"
    assert drained(2, workers[0], workers[1]) == ["w1"], "their host has both"
    assert drained(1) == ["w2", "w1"]


def test_of_those_that_drain_who_is_apart_from_the_only_copy_is_revived_first() -> None:
    hosts = {"w0": "x", "w1": "x", "w2": "y"}
    workers = [worker_record(f"w{i}", M, "draining", host=hosts[f"w{i}"]) for i in range(3)]
    revived = decide(M, workers, 2, None, copies_at=[workers[0].worker]).revive
    assert [w.worker.worker_id for w in revived] == ["w2", "w1"]


def test_members_of_a_pair_are_drained_only_when_nothing_else_is_left() -> None:
    workers = [worker_record(f"w{i}", M, "serving", epoch=i) for i in range(3)]
    assert [w.worker.worker_id for w in decide(M, workers, 2, None, {"i-w2"}).drain] == ["w1"]
    assert [w.worker.worker_id for w in decide(M, workers, 1, None, {"i-w2", "i-w1"}).drain] == ["w0", "w2"]


def test_an_instance_that_still_loads_is_not_drained() -> None:
    workers = [worker_record("w0", M, "serving"), worker_record("w1", M, "loading", epoch=9)]
    decision = decide(M, workers, 1, None)
    assert [w.worker.worker_id for w in decision.drain] == ["w0"]


def test_load_takes_none_that_serves_in_favour_of_one_that_loads() -> None:
    loading = [worker_record("w0", M, "loading", epoch=9), worker_record("w1", M, "live", epoch=8)]
    serving = [worker_record(f"w{i}", M, "serving", epoch=i) for i in (2, 3)]
    assert decide(M, [*loading, *serving[:1]], 1, None, until_up=True).nothing
    assert [w.worker.worker_id for w in decide(M, [*loading, *serving], 1, None, until_up=True).drain] == ["w3"]
    up = [worker_record("w0", M, "serving", epoch=9), *serving[:1]]
    assert [w.worker.worker_id for w in decide(M, up, 1, None, until_up=True).drain] == ["w0"]
    none = msgspec.structs.replace(M, min_instances=0)
    assert len(decide(none, [*loading, *serving], 0, None, until_up=True).drain) == 2


def test_instances_of_other_models_do_not_count() -> None:
    assert decide(M, [worker_record("w0", model("other"), "serving")], 1, None).load == 1


def test_instances_of_other_weights_under_the_same_name_are_neither_counted_nor_revived() -> None:
    old = model("m", model_hash="old")
    workers = [worker_record("w0", old, "serving"), worker_record("w1", old, "draining")]
    decision = decide(M, workers, 2, None)
    assert (decision.current, decision.load, decision.revive) == (0, 2, ())


@pytest.mark.parametrize("role", ROLES)
def test_instances_and_leases_of_other_roles_do_not_count(role: Role) -> None:
    other: Role = "decode" if role == "prefill" else "prefill"
    workers = [
        worker_record("w0", M, "serving", role=role),
        worker_record("w1", lease_plan_id="p", lease_model="m", lease_role=role),
        worker_record("w2", M, "serving", role=other),
        worker_record("w3", M, "loading", role=other),
        worker_record("w4", lease_plan_id="q", lease_model="m", lease_role=other),
    ]
    unlimited = msgspec.structs.replace(M, max_instances=9)
    decision = decide(unlimited, workers, 3, None, role=role)
    assert (decision.current, decision.load) == (2, 1)


@pytest.mark.parametrize("role", ROLES)
def test_only_instances_of_the_role_are_revived_and_drained(role: Role) -> None:
    """Those of other roles would be first by any other rule: they are newer, or drain already."""
    others = [r for r in ROLES if r != role]
    workers = [worker_record(f"w{i}", M, "serving", epoch=i, role=role) for i in (1, 2)]
    workers += [worker_record(f"x{r}", M, "serving", epoch=9, role=r) for r in others]
    floor = Floor(model="m", instances=1, left_s=1.0, role=role)
    assert [w.worker.worker_id for w in decide(M, workers, 0, floor, role=role).drain] == ["w2"]
    workers += [worker_record(f"a{r}", M, "draining", role=r) for r in others]
    workers += [worker_record("w3", M, "draining", role=role)]
    unlimited = msgspec.structs.replace(M, max_instances=9)
    decision = decide(unlimited, workers, 4, None, role=role)
    assert ([w.worker.worker_id for w in decision.revive], decision.load) == (["w3"], 1)


def test_what_drains_on_a_worker_that_is_about_to_end_is_not_revived_and_nothing_there_counts() -> None:
    ending = msgspec.structs.replace(worker_record("w1", M, "draining"), stopping=True)
    decision = decide(M, [worker_record("w0", M, "serving"), ending], 2, None)
    assert (decision.revive, decision.load) == ((), 1)
    serving = msgspec.structs.replace(worker_record("w1", M, "serving"), stopping=True)
    decision = decide(M, [worker_record("w0", M, "serving"), serving], 2, None)
    assert (decision.current, decision.load) == (1, 1)
    leased = msgspec.structs.replace(worker_record("w1", lease_plan_id="p", lease_model="m"), stopping=True)
    assert decide(M, [worker_record("w0", M, "serving"), leased], 2, None).load == 1


def test_an_instance_that_was_told_to_drain_drains_although_it_does_not_show_yet() -> None:
    workers = [worker_record(f"w{i}", M, "serving", epoch=i) for i in range(3)]
    assert decide(M, workers, 2, None, leaving={"i-w2"}).nothing
    again = decide(M, workers, 1, None, leaving={"i-w2"})
    assert [w.worker.worker_id for w in again.drain] == ["w1"]
    back = decide(M, workers, 3, None, leaving={"i-w2"})
    assert ([w.worker.worker_id for w in back.revive], back.load) == (["w2"], 0)
