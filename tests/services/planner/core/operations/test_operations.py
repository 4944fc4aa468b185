from __future__ import annotations

import msgspec
import pytest

from services.planner.core.multicast.traffic import SETTLING_S
from services.planner.core.operations.operation import (
    LEAST_LOAD_S,
    LOST_WORD_S,
    MISSING_S,
    Operation,
    give_up_s,
)
from services.planner.core.operations.operations import Operations
from services.planner.core.operations.pair_record import LIVE_REPORT_WAIT_S
from services.planner.core.operations.target import Direction
from shared.messages.common import InstanceState
from shared.messages.live import LayerRuns
from shared.messages.operations import LiveRecord
from shared.messages.plans import DrainPlan, DrainTarget
from shared.messages.progress import ScaleProgress
from shared.messages.registry import WorkerRecord
from tests.processes import INCARNATION
from tests.records import model, targets, worker_record
from tests.services.planner.core.live.some_pairs import assignment, report


def operation(direction: Direction = "out", plan_id: str = "p") -> Operation:
    return Operation(
        plan_id=plan_id,
        model="m",
        direction=direction,
        desired=3,
        reason="load",
        triggered_s=100.0,
        targets=targets(("w1", "i1"), ("w2", "i2")),
    )


def event(
    worker_id: str, kind: str, at_s: float, plan_id: str = "p", way_s: float = 0.0, **fields: object
) -> tuple[ScaleProgress, float]:
    """A report of then, and when it comes; the worker's first one was sent at 100."""
    made = ScaleProgress(
        plan_id=plan_id,
        worker_id=worker_id,
        instance_id=f"i{worker_id[1]}",
        event=kind,  # type: ignore[arg-type]
        after_s=at_s - 100.0,
        **fields,  # type: ignore[arg-type]
    )
    return made, at_s + way_s


def test_the_record_counts_from_the_trigger_and_waits_for_the_last_target() -> None:
    op = operation()
    op.planned(100.005)
    for worker_id, delay in (("w1", 0.0), ("w2", 0.1)):
        op.apply(*event(worker_id, "accepted", 100.01 + delay))
        op.apply(*event(worker_id, "first_byte", 100.01 + delay))
        op.apply(*event(worker_id, "layer_ready", 100.2 + delay, layer=0, received_bytes=50))
        op.apply(*event(worker_id, "layer_ready", 100.3 + delay, layer=1, received_bytes=90))
        op.apply(*event(worker_id, "loaded", 101.01 + delay, received_bytes=125_000_000))
        assert op.record().status == "running"
        op.apply(*event(worker_id, "serving", 101.1 + delay))
    record = op.record()
    assert record.status == "done"
    assert record.trigger_to_plan_ms == 5.0
    assert record.trigger_to_first_byte_ms == 10.0
    assert record.layer_ready_ms == (300.0, 400.0)
    assert record.trigger_to_loaded_ms == 1110.0
    assert record.trigger_to_serving_ms == 1200.0
    assert record.bytes == 250_000_000
    assert abs(record.gbps - 1.0) < 1e-6
    assert [target.gbps for target in record.targets] == [pytest.approx(1.0)] * 2


def test_since_when_a_target_serves_is_known_from_what_it_took_by_its_own_clock() -> None:
    op = operation()
    op.planned(100.0)
    op.apply(*event("w1", "accepted", 100.0))
    assert op.served_since("w1") is None
    op.apply(*event("w1", "serving", 101.5, way_s=0.25))
    assert op.served_since("w1") == (101.5, 1.5)


def test_the_report_that_was_fastest_on_its_way_tells_when_the_later_ones_were_sent() -> None:
    op = operation()
    op.apply(*event("w1", "accepted", 100.0, way_s=0.3))
    op.apply(*event("w1", "first_byte", 100.1, way_s=0.1))
    op.apply(*event("w1", "loaded", 101.0, way_s=5.0))
    [target, _] = op.record().targets
    assert (target.first_byte_ms, target.loaded_ms) == pytest.approx((200.0, 1100.0))


def test_a_failed_target_fails_the_operation_once_the_others_ended() -> None:
    op = operation()
    op.apply(*event("w1", "failed", 101.0, detail="disk is gone"))
    assert not op.finished
    op.apply(*event("w2", "serving", 101.0))
    record = op.record()
    assert record.status == "failed"
    assert record.targets[0].failure == "disk is gone"


def test_scaling_in_ends_when_every_target_is_spare() -> None:
    op = operation("in")
    op.apply(*event("w1", "spare", 101.0))
    assert not op.finished
    op.apply(*event("w2", "spare", 102.0))
    assert op.record().status == "done"
    assert op.record().trigger_to_spare_ms == 2000.0


def test_a_target_that_returns_to_spare_without_serving_failed() -> None:
    op = operation()
    op.apply(*event("w1", "spare", 101.0))
    op.apply(*event("w2", "serving", 101.0))
    assert op.record().status == "failed"


def test_events_of_strangers_and_of_older_instances_are_ignored() -> None:
    op = operation()
    op.apply(*event("w9", "serving", 101.0))
    op.apply(
        ScaleProgress(plan_id="p", worker_id="w1", instance_id="older", event="failed", after_s=1.0, detail="x"), 101.0
    )
    assert op.open_targets == (("w1", "i1"), ("w2", "i2"))


def test_finished_operations_are_forgotten_first() -> None:
    operations = Operations(keep=2)
    running = operation(plan_id="a")
    operations.add(running)
    done = operation("in", plan_id="b")
    for worker_id in ("w1", "w2"):
        done.apply(*event(worker_id, "spare", 101.0))
    operations.add(done)
    operations.add(operation(plan_id="c"))
    assert operations.get("b") is None
    assert operations.get("a") is running
    assert [o.plan_id for o in operations.newest(5)] == ["c", "a"]


def test_pairs_of_an_earlier_planner_are_listed_without_details_too() -> None:
    pair = LiveRecord(pair_id="x", source="w1", target="w2", policy="zigzag", why="y", outcome="dissolved")
    detailed = msgspec.structs.replace(pair, tokens=(1, 2), source_layers=(1,), bucket_ms=10.0)
    whole = msgspec.structs.replace(operation(plan_id="past").record(), live=(detailed,))
    operations = Operations(keep=2)
    operations.remember(whole)
    operations.add(operation(plan_id="mine"))
    assert operations.past("past") == whole
    mine, past = operations.newest(5)
    assert (mine.plan_id, past.live) == ("mine", (pair,))
    assert [one.plan_id for one in operations.newest(1)] == ["mine"]
    assert operations.newest(0) == []


def test_what_runs_is_not_forgotten_however_much_there_is() -> None:
    operations = Operations(keep=2)
    draining = [operation("in", plan_id=f"p{i}") for i in range(5)]
    for one in draining:
        operations.add(one)
    assert [operations.get(one.plan_id) for one in draining] == draining
    assert len(operations.running()) == 5
    for one in draining[:4]:
        for worker_id in ("w1", "w2"):
            one.apply(*event(worker_id, "spare", 101.0))
    assert operations.running() == draining[4:]
    operations.add(operation(plan_id="last"))
    assert [o.plan_id for o in operations.newest(9)] == ["last", "p4"], "and no more is kept once they have ended"


def test_at_rest_what_is_asked_again_is_made_out_once_but_what_is_added_counts() -> None:
    operations = Operations()
    operations.add(first := operation("in", plan_id="p0"))
    with operations.at_rest():
        draining = operations.instances_to_drain()
        assert draining
        assert operations.instances_to_drain() is draining
        assert operations.instances_to_drain(0.0) == frozenset()
        operations.add(operation(plan_id="p1"))
        assert operations.instances_to_drain() is not draining
    first.fail_target("w1", "gone")
    first.fail_target("w2", "gone")
    assert operations.instances_to_drain() == frozenset()


def test_a_target_that_died_and_was_back_before_it_was_missed_has_failed() -> None:
    op = loads(accept_by_s=110.0, deadline_s=120.0)
    record = worker_record("w1", model("m"), "loading")
    assert record.instance is not None
    own = msgspec.structs.replace(record.instance, instance_id="i1")
    spare = worker_record("w1", incarnation="2")
    op.apply(*event("w1", "accepted", 100.5))
    for known in (worker_record("w1", lease_plan_id="p"), msgspec.structs.replace(record, instance=own)):
        op.check({"w1": known}, 101.0)
        assert op.record().targets[0].failure == ""
    op.check({"w1": spare}, 101.5)
    assert op.record().targets[0].failure == "the worker died and started again"


def test_a_target_that_was_started_anew_before_it_took_the_plan_has_failed_at_once() -> None:
    """What is told to the process before never reaches it."""
    op = loads(accept_by_s=110.0, deadline_s=120.0)
    anew = worker_record("w1", lease_plan_id="p", incarnation="2")
    op.check({"w1": anew, "w2": worker_record("w2", lease_plan_id="p")}, 101.0)
    assert [t.failure for t in op.record().targets] == ["the worker was started anew before it accepted the plan", ""]


def test_a_target_that_has_given_its_instance_up_and_was_not_heard_has_failed() -> None:
    op = loads(accept_by_s=110.0, deadline_s=120.0)
    op.apply(*event("w1", "accepted", 100.5))
    op.check({"w1": worker_record("w1")}, 101.5)
    assert op.record().targets[0].failure == "its instance is gone"


def test_targets_that_died_or_never_took_the_plan_fail() -> None:
    op = Operation(
        plan_id="p",
        model="m",
        direction="out",
        desired=3,
        reason="load",
        triggered_s=100.0,
        targets=targets(("w1", "i-w1"), ("w2", "i-w2"), ("w3", "i-w3")),
        accept_by_s=110.0,
        deadline_s=120.0,
    )
    m = model("m")
    workers = {
        "w2": worker_record("w2"),
        "w3": worker_record("w3", m, "loading"),
    }
    op.check(workers, 101.0)
    assert [t.failure for t in op.record().targets] == ["", "", ""]
    op.check(workers, 103.0)
    assert [t.failure for t in op.record().targets] == ["the worker died", "", ""]
    op.check(workers, 111.0)
    assert op.record().targets[1].failure == "the plan was never accepted"
    assert not op.finished
    op.check(workers, 121.0)
    assert op.record().status == "failed"


def loads(plan_id: str = "p", **fields: object) -> Operation:
    """w1 feeds w2 (5 s) after it received from w0 (2 s)."""
    op = Operation(
        plan_id=plan_id,
        model="m",
        direction="out",
        desired=3,
        reason="load",
        triggered_s=100.0,
        targets=targets(("w1", "i1"), ("w2", "i2")),
        links=(("w0", "w1"), ("w1", "w2")),
        predicted_s={"w1": 2.0, "w2": 5.0},
        **fields,  # type: ignore[arg-type]
    )
    op.planned(101.0)
    return op


def test_a_transfer_goes_on_until_its_target_has_loaded() -> None:
    operations = Operations()
    op = loads()
    operations.add(op)
    operations.add(operation("in", plan_id="b"))
    assert operations.transfers(102.0).running == (("w0", "w1"), ("w1", "w2"))
    op.apply(*event("w1", "loaded", 103.0))
    assert operations.transfers(103.5).running == (("w1", "w2"),)
    assert operations.transfers(103.5).settling == (("w0", "w1"),)
    assert operations.transfers(103.5 + SETTLING_S).settling == ()
    op.apply(*event("w2", "failed", 104.0, detail="disk is gone"))
    assert operations.transfers(104.0).running == ()


def test_a_plan_that_was_never_published_sends_nothing() -> None:
    operations = Operations()
    op = loads()
    operations.add(op)
    op.fail("no publisher")
    assert operations.transfers(102.0).running == ()
    assert operations.remaining_s(102.0) == {}


def test_the_time_that_a_target_still_needs_is_what_was_predicted_for_it() -> None:
    operations = Operations()
    op = loads()
    operations.add(op)
    assert operations.remaining_s(102.0) == {("w1", "i1"): 1.0, ("w2", "i2"): 4.0}
    op.apply(*event("w1", "loaded", 103.0))
    assert operations.remaining_s(103.0) == {("w2", "i2"): 3.0}
    assert operations.remaining_s(200.0) == {("w2", "i2"): 0.0}


def test_who_loads_from_a_target_does_not_wait_for_what_both_take_beside_their_bytes() -> None:
    op = loads(overhead_s={"w1": 0.5})
    assert op.remaining_s(102.0) == {("w1", "i1"): 0.5, ("w2", "i2"): 4.0}


def registered(op: Operation, state: InstanceState, *worker_ids: str) -> dict[str, WorkerRecord]:
    """Its targets as the registry shows them."""
    workers = {}
    for name, instance_id in op.open_targets:
        if name in worker_ids:
            record = worker_record(name, model("m"), state)
            assert record.instance is not None
            own = msgspec.structs.replace(record.instance, instance_id=instance_id)
            workers[name] = msgspec.structs.replace(record, instance=own)
    return workers


def test_a_target_that_does_not_end_in_time_has_failed() -> None:
    op = loads(accept_by_s=110.0, deadline_s=120.0)
    workers = registered(op, "loading", "w1", "w2")
    op.check(workers, 119.5)
    assert op.record().status == "running"
    op.check(workers, 120.5)
    assert op.failures == dict.fromkeys(("w1", "w2"), "it did not end within the deadline")


@pytest.mark.parametrize("state", ["serving", "draining"])
def test_the_registry_tells_what_lost_reports_did_not(state: InstanceState) -> None:
    op = loads(accept_by_s=110.0, deadline_s=120.0)
    op.check(registered(op, state, "w1") | registered(op, "loading", "w2"), 105.0)
    assert [w for w, _ in op.open_targets] == ["w2"]
    assert not op.running_links() or all(target == "w2" for _, target in op.running_links())
    # A report that comes late after all tells when it really was.
    op.apply(*event("w1", "serving", 103.0))
    assert op.record().targets[0].serving_ms == pytest.approx(3000.0)


def test_a_revived_instance_that_still_drains_is_not_revived_yet() -> None:
    plan = DrainPlan(
        plan_id="p",
        model="m",
        targets=(DrainTarget(worker_id="w1", incarnation=INCARNATION, instance_id="i-w1"),),
        revive=True,
        term=1,
    )
    op = Operation.of_drain(plan, "out", 100.0, 110.0)
    op.check({"w1": worker_record("w1", model("m"), "draining")}, 105.0)
    assert not op.finished
    op.check({"w1": worker_record("w1", model("m"), "serving")}, 106.0)
    assert op.record().status == "done"


def test_a_drain_that_was_never_heard_of_is_over_and_one_that_was_takes_its_time() -> None:
    targets = tuple(DrainTarget(worker_id=w, incarnation=INCARNATION, instance_id=f"i-{w}") for w in ("w1", "w2"))
    plan = DrainPlan(plan_id="p", model="m", targets=targets, revive=False, term=1)
    op = Operation.of_drain(plan, "in", 100.0, float("inf"), heed_by_s=115.0)
    workers = {
        "w1": worker_record("w1", model("m"), "draining"),
        "w2": worker_record("w2", model("m"), "serving"),
    }
    op.check(workers, 114.0)
    assert not op.failures
    op.check(workers, 10_000.0)
    assert [worker_id for worker_id, _ in op.open_targets] == ["w1"]
    assert list(op.failures) == ["w2"]


def test_the_time_to_give_up_follows_from_what_is_predicted() -> None:
    sixteen_gb = 16 * 10**9
    assert give_up_s(sixteen_gb, 0.1, [1.3, 1.3]) == LEAST_LOAD_S
    assert give_up_s(sixteen_gb, 0.1, [5.0]) == 50.0
    assert give_up_s(sixteen_gb, 0.1, []) == give_up_s(sixteen_gb, 0.1, [1.3, 0.0]) == 1280.0
    assert give_up_s(10**6, 0.1, [30.0]) == 90.0


def test_the_death_of_a_worker_in_the_middle_of_a_plan_fails_its_target_alone() -> None:
    op = loads(accept_by_s=110.0, deadline_s=120.0)
    workers = {"w2": worker_record("w2", model("m"), "loading")}
    for now_s in (102.0, 102.0 + MISSING_S):
        op.check(workers, now_s)
    assert [t.failure for t in op.record().targets] == ["the worker died", ""]
    assert not op.finished
    op.apply(*event("w2", "serving", 105.0))
    assert op.record().status == "failed"
    assert op.record().targets[1].serving_ms == 5000.0


# --- pairs that scale live ---------------------------------------------------------------------------


def with_pairs(*live: str) -> Operation:
    """w0's instance scales live with the first of ``live``, w8's with the second."""
    sources = ("w0", "w8")
    return Operation(
        plan_id="plan-p",
        model="m",
        direction="out",
        desired=3,
        reason="load",
        triggered_s=1000.0,
        targets=targets(("w1", "i1"), ("w2", "i2")),
        assignments=[assignment(source, target) for source, target in zip(sources, live, strict=False)],
    )


def all_there() -> dict[str, WorkerRecord]:
    """The members of pairs, and what they hold by the plan."""
    found = {}
    for worker_id, state in (("w0", "serving"), ("w8", "serving"), ("w1", "live"), ("w2", "live")):
        record = worker_record(worker_id, model("m"), state)  # type: ignore[arg-type]
        assert record.instance is not None
        own = msgspec.structs.replace(record.instance, instance_id=f"i{worker_id[1]}")
        found[worker_id] = msgspec.structs.replace(record, instance=own)
    return found


def both_serve(op: Operation) -> None:
    for worker_id in ("w1", "w2"):
        op.apply(*event(worker_id, "serving", 1002.0, plan_id="plan-p"))


def test_an_operation_ends_when_its_pairs_have_reported_too() -> None:
    op = with_pairs("w1", "w2")
    both_serve(op)
    assert op.open_targets == ()
    assert (op.finished, op.record().status) == (False, "running")
    op.apply_live(report(assignment("w0", "w1")), 1000.9)
    assert not op.finished
    op.apply_live(report(assignment("w8", "w2")), 1000.9)
    assert (op.finished, op.record().status) == (True, "done")
    assert [(pair.source, pair.outcome) for pair in op.record().live] == [("w0", "dissolved"), ("w8", "dissolved")]


def test_a_pair_that_reports_first_does_not_end_the_operation() -> None:
    op = with_pairs("w1")
    op.apply_live(report(assignment("w0", "w1")), 1000.9)
    assert not op.finished
    both_serve(op)
    assert op.finished


def test_a_failed_pair_does_not_fail_the_operation() -> None:
    op = with_pairs("w1")
    both_serve(op)
    op.apply_live(report(assignment("w0", "w1"), outcome="failed", reason="the source was told to drain"), 1000.9)
    record = op.record()
    assert (record.status, record.live[0].outcome) == ("done", "failed")


def test_a_pair_that_does_not_report_is_not_waited_for_for_ever() -> None:
    op = with_pairs("w1")
    op.check(all_there(), 1001.0)
    both_serve(op)
    op.check(all_there(), 1002.0)
    op.check(all_there(), 1001.9 + LIVE_REPORT_WAIT_S)
    assert not op.finished
    op.check(all_there(), 1002.0 + LIVE_REPORT_WAIT_S)
    assert (op.finished, op.record().status, op.record().live[0].outcome) == (True, "done", "unknown")


def test_a_pair_whose_target_failed_is_waited_for_from_then_on() -> None:
    op = with_pairs("w1")
    op.apply(*event("w2", "serving", 1001.0, plan_id="plan-p"))
    op.check(all_there(), 1001.0 + 10 * LIVE_REPORT_WAIT_S)
    assert op.pairs["plan-p-w1"].running, "its target loads"
    op.fail_target("w1", "the worker died")
    op.check(all_there(), 2000.0)
    op.check(all_there(), 1999.9 + LIVE_REPORT_WAIT_S)
    assert op.pairs["plan-p-w1"].running
    op.check(all_there(), 2000.0 + LIVE_REPORT_WAIT_S)
    assert (op.record().status, op.record().live[0].outcome) == ("failed", "unknown")


def test_a_pair_whose_sources_worker_died_is_over_and_leaves_its_instances_free() -> None:
    operations = Operations()
    op = with_pairs("w1")
    operations.add(op)
    missing = {name: worker for name, worker in all_there().items() if name != "w0"}
    op.check(missing, 1001.0)
    op.check(missing, 1000.9 + MISSING_S)
    assert operations.instances_in_pairs() == {"i0", "i1"}
    # It was back in between, as after a registry was emptied.
    op.check(all_there(), 1001.0 + MISSING_S)
    op.check(missing, 1002.0 + MISSING_S)
    assert operations.instances_in_pairs() == {"i0", "i1"}
    op.check(missing, 1002.0 + 2 * MISSING_S)
    (pair,) = op.record().live
    assert (pair.outcome, "died" in pair.reason) == ("unknown", True)
    assert operations.instances_in_pairs() == set()
    assert op.open_targets == (("w1", "i1"), ("w2", "i2")), "the targets load on"
    op.apply_live(report(assignment("w0", "w1"), outcome="failed", reason="late, and better"), 1000.9)
    assert op.record().live[0].reason == "late, and better"


@pytest.mark.parametrize("now", [worker_record("w0"), worker_record("w0", model("m"), "serving")])
def test_a_pair_whose_source_holds_something_else_is_over(now: WorkerRecord) -> None:
    op = with_pairs("w1", "w2")
    op.check(all_there(), 1001.0)
    op.check(all_there() | {"w0": now}, 1001.5)
    lost, kept = op.record().live
    assert (lost.outcome, "does not hold its instance" in lost.reason) == ("unknown", True)
    assert kept.outcome == "running"


def test_a_plan_that_was_not_published_has_no_pairs_left() -> None:
    op = with_pairs("w1")
    op.fail("the plan could not be published")
    assert op.finished
    assert op.record().live[0].outcome == "failed"


def test_what_was_carried_out_does_not_fail_because_the_streams_word_on_it_was_lost() -> None:
    op = operation()
    for name in ("w1", "w2"):
        op.apply(*event(name, "serving", 100.3))
    op.fail("the plan could not be published")
    assert (op.record().status, op.record().reason) == ("done", "load")


def test_reports_on_strange_pairs_are_ignored() -> None:
    op = with_pairs("w1")
    op.apply_live(report(assignment("w0", "w9")), 1000.9)
    assert [pair.outcome for pair in op.record().live] == ["running"]


@pytest.mark.parametrize("kind", ["loaded", "serving", "failed", "spare"])
def test_a_target_loads_until_it_says_otherwise(kind: str) -> None:
    op = loads()
    op.apply(*event("w1", "layer_ready", 101.0, layer=0))
    assert [op.still_loads(w, 102.0) for w in ("w1", "w2")] == [True, True]
    op.apply(*event("w1", kind, 102.0))
    assert [op.still_loads(w, 102.5) for w in ("w1", "w2")] == [False, True]


def test_a_target_that_is_late_by_far_has_loaded_without_a_word() -> None:
    op = loads()
    # Planned at 101 s; 2 s and 5 s were predicted.
    assert [op.still_loads("w1", 103.0 + LOST_WORD_S - 0.1), op.still_loads("w1", 103.1 + LOST_WORD_S)] == [True, False]
    assert [op.still_loads("w2", 115.9), op.still_loads("w2", 116.1)] == [True, False]
    assert operation().still_loads("w1", 1e9), "nobody knows when"


def test_a_target_says_when_it_went_live() -> None:
    op = with_pairs("w1")
    for at_s in (1000.25, 1000.75):
        op.apply(*event("w1", "live", at_s, plan_id="plan-p"))
    assert [t.live_ms for t in op.record().targets] == [250.0, None]
    assert op.record().status == "running"


def test_the_layers_that_a_target_has_are_known_up_to_the_first_gap() -> None:
    op = operation()
    op.made_s = 100.0
    for layer in (1, 0, 3):
        op.apply(*event("w1", "layer_ready", 101.0 + layer, layer=layer))
    assert op.layers_ready_s("w1") == (1.0, 2.0)
    assert op.layers_ready_s("w2") == op.layers_ready_s("w9") == ()


def test_a_short_record_has_its_pairs_without_their_timelines() -> None:
    op = with_pairs("w1")
    runs = LayerRuns(started_ago_s=0.8, bucket_s=0.05, counts=(1,))
    op.apply_live(report(assignment("w0", "w1"), source_runs=runs), 1000.9)
    assert op.record().live[0].source_layers == (1,)
    assert op.record(details=False).live[0].source_layers == ()


def test_the_members_of_running_pairs_are_known() -> None:
    operations = Operations()
    op = with_pairs("w1", "w2")
    operations.add(op)
    operations.add(operation(plan_id="other"))
    assert operations.instances_in_pairs() == {"i0", "i1", "i8", "i2"}
    found = operations.pair("plan-p-w2")
    assert found is op.pairs["plan-p-w2"]
    assert operations.pair("nobody") is None
    op.apply_live(report(assignment("w0", "w1")), 1000.9)
    assert operations.instances_in_pairs() == {"i8", "i2"}
    op.fail("no publisher")
    assert operations.instances_in_pairs() == set()


def test_what_was_told_to_drain_is_known_until_it_has_or_is_revived() -> None:
    operations = Operations()
    drains = operation("in", plan_id="a")
    operations.add(drains)
    operations.add(operation("out", plan_id="b"))
    assert operations.instances_to_drain() == {"i1", "i2"}
    drains.apply(*event("w1", "spare", 101.0))
    assert operations.instances_to_drain() == {"i2"}
    operations.overrule_drains([("w2", "i2")], "c")
    assert operations.instances_to_drain() == set()
