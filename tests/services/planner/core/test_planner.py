"""The planner's core, driven as a simulation drives it."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from services.planner.core.multicast.overhead import Overheads
from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.operation import Operation
from services.planner.core.operations.operations import Operations
from services.planner.core.rounds.by_hand import asked_by_hand
from services.planner.core.rounds.decider import MAX_ROUND_S, SHRINK_S
from services.planner.core.rounds.moment import Moment
from services.planner.core.rounds.pair_planner import PairPlanner
from services.planner.core.rounds.plan_writer import AnyPlan, Begun, PlanWriter
from services.planner.core.rounds.rounds import LEASE_TRIES
from services.planner.core.rounds.settings import LiveSettings
from services.planner.core.rounds.waiting import ROOM_WAIT_S, SHORT_S
from shared.engines import traits_of
from shared.errors import BadRequest, Conflict, NoCapacity, Unavailable
from shared.messages.codec import encode
from shared.messages.operations import StartScale
from shared.messages.plans import DrainPlan, MutatePlan, ScalePlan
from shared.messages.progress import ProgressEvent
from shared.messages.registry import WorkerRecord
from shared.subjects import Process
from tests.records import model, worker_record
from tests.services.monitor.core.reports import report
from tests.services.planner.core.driven import Driven
from tests.services.pool.host_copies import copy_of

INF = float("inf")


def spare(num: int) -> list[WorkerRecord]:
    return [worker_record(f"w{i}") for i in range(num)]


def serving(num: int, name: str = "m", **changes: object) -> Driven:
    record = model(name, min_instances=0, **changes)
    return Driven([record], [worker_record(f"w{i}", record, "serving", epoch=i + 1) for i in range(num)])


def test_from_a_demand_to_an_instance_that_serves() -> None:
    made = Driven([model("m", min_instances=0)], spare(2))
    assert made.due_in_s == INF
    made.demand("m", 1)
    assert made.due_in_s == 0.0
    made.round()
    (plan,) = made.plans
    assert isinstance(plan, ScalePlan)
    (target,) = plan.targets
    assert (plan.plan_id, target.instance_id, plan.triggered_at_s) == ("plan-1", f"1-{target.worker_id}", 100.0)
    made.demand("m", 1)
    made.round()
    assert (made.plans, len(made.settled), made.due_in_s) == ([plan], 1, INF), "it is on its way"
    made.now_s += 3.0
    for event in ("accepted", "loaded", "serving"):
        made.report("plan-1", event, target.worker_id, target.instance_id)  # type: ignore[arg-type]
    (ended,) = made.planner.operations.just_finished()
    assert (ended.record().status, ended.record().trigger_to_serving_ms) == ("done", 3000.0)


def test_who_finds_no_worker_is_refused_and_tried_again_when_one_may_be_spare_for_a_while() -> None:
    made = Driven([model("m", min_instances=0)], [])
    made.demand("m", 2)
    made.round()
    (refused,) = made.refused
    assert (refused.error.code, refused.repeated) == ("no_capacity", False)
    (shown,) = made.planner.rounds.unplanned(made.moment)
    assert (shown.model, shown.wanted) == ("m", 2)
    assert made.due_in_s == INF
    made.now_s += SHORT_S
    made.planner.rounds.try_again(made.moment)
    assert made.due_in_s <= 0.0
    made.round()
    assert made.refused[1].repeated
    made.now_s += 0.1
    made.planner.rounds.try_again(made.moment)
    assert made.due_in_s == INF, "the monitor has said it again by then, or it is met"


def test_a_round_or_lease_that_failed_says_nothing_of_room() -> None:
    made = Driven([model("m", min_instances=0)], [])

    def undecided() -> bool:
        (shown,) = made.planner.rounds.unplanned(made.moment)
        return shown.undecided

    made.demand("m", 1)
    made.round()
    assert not undecided()
    made.workers = tuple(spare(1))
    for error in (Unavailable("the registry recovers"), NoCapacity("the worker is gone")):
        made.demand("m", 1)
        begun = made.planner.rounds.begin(made.moment)
        made.planner.rounds.fail(begun, error, made.moment)
        assert undecided()
        made.workers = ()
        made.demand("m", 1)
        made.round()
        assert not undecided()
        made.workers = tuple(spare(1))
        made.errors = [error]
        made.demand("m", 1)
        made.round()
        assert undecided()


def test_an_instance_whose_lease_is_asked_for_is_on_its_way() -> None:
    made = Driven([model("m", min_instances=0)], [])
    made.demand("m", 1)
    made.round()
    made.workers = tuple(spare(1))
    made.demand("m", 1)
    rounds = made.planner.rounds
    begun = rounds.begin(made.moment)
    rounds.decide(begun, made.view, made.moment)
    (shown,) = rounds.unplanned(made.moment)
    assert shown.coming
    rounds.fail(begun, Unavailable("no answer"), made.moment)
    (shown,) = rounds.unplanned(made.moment)
    assert not shown.coming


def test_who_asked_by_hand_waits_for_room_that_others_make_and_not_for_ever() -> None:
    busy, waits = model("busy", min_instances=0), model("waits", min_instances=0)
    made = Driven([busy, waits], [worker_record("w0", busy, "serving")])
    made.demand("busy", 1, 1, idle=1, idle_for_s=10.0)
    asked = made.ask("waits", 1)
    made.round()
    (drain,) = made.plans
    assert isinstance(drain, DrainPlan)
    assert (drain.model, made.refused, made.due_in_s) == ("busy", [], ROOM_WAIT_S)
    made.now_s += 1.0
    made.planner.rounds.try_again(made.moment)
    made.round()
    assert (made.refused, made.due_in_s) == ([], ROOM_WAIT_S - 1.0), "the room is not there yet"
    made.wait_until_due()
    made.round()
    (refused,) = made.refused
    assert refused.one is asked
    assert isinstance(refused.error, NoCapacity)
    assert made.due_in_s == INF


def test_nobody_waits_who_withdrew() -> None:
    made = Driven([model("m", min_instances=0)], spare(1))
    made.planner.rounds.withdraw(made.ask("m", 1))
    made.round()
    assert made.plans == []


def test_instances_go_only_after_a_moment_in_which_another_role_may_use_them() -> None:
    made = serving(2)
    made.demand("m", 1, 2)
    made.now_s += SHRINK_S / 2
    made.round()
    assert made.plans == []
    assert made.due_in_s == pytest.approx(SHRINK_S / 2)
    made.wait_until_due()
    made.round()
    (drain,) = made.plans
    assert isinstance(drain, DrainPlan)
    assert [t.worker_id for t in drain.targets] == ["w1"]


def beside_its_copy(name: str) -> Driven:
    """Two idle instances, of which the older one is on the worker that holds the host copy."""
    record = model(name, min_instances=0)
    workers = [worker_record(f"w{i}", record, "serving", epoch=i + 1, host=f"h{i}") for i in range(2)]
    workers[0] = msgspec.structs.replace(workers[0], host_copies=(copy_of(record),))
    return Driven([record, model("waits", min_instances=0)], workers)


def test_the_instance_on_the_worker_of_the_host_copy_goes_before_a_newer_one() -> None:
    made = beside_its_copy("m")
    made.demand("m", 1, 2)
    made.now_s += SHRINK_S
    made.round()
    (drain,) = made.plans
    assert isinstance(drain, DrainPlan)
    assert [t.worker_id for t in drain.targets] == ["w0"]


def test_it_goes_first_for_another_model_too() -> None:
    made = beside_its_copy("m")
    made.demand("m", 2, 2, idle=1, idle_for_s=10.0)
    made.demand("waits", 1)
    made.round()
    (drain,) = made.plans
    assert isinstance(drain, DrainPlan)
    assert (drain.model, [t.worker_id for t in drain.targets]) == ("m", ["w0"])


def test_a_worker_that_another_plan_took_is_not_waited_for_longer_than_a_few_tries() -> None:
    made = Driven([model("m", min_instances=0)], spare(1))
    made.errors = [Conflict("w0 is leased")] * LEASE_TRIES
    made.demand("m", 1)
    for _ in range(LEASE_TRIES):
        assert made.refused == []
        assert made.due_in_s <= 0.0
        made.round()
    (refused,) = made.refused
    assert (refused.error.code, made.plans, made.due_in_s) == ("conflict", [], INF)


def test_a_worker_that_was_started_anew_since_the_snapshot_is_planned_with_again() -> None:
    made = Driven([model("m", min_instances=0)], spare(1))
    made.demand("m", 1)

    def start_anew() -> float:
        made.workers = (worker_record("w0", incarnation="2"),)
        return 0.0

    made.round(start_anew)
    assert (made.plans, made.refused, made.due_in_s) == ([], [], 0.0)
    made.round()
    (plan,) = made.plans
    assert isinstance(plan, ScalePlan)
    assert [t.worker for t in plan.targets] == [Process("w0", "2")]


def test_a_worker_that_was_started_anew_since_it_was_leased_is_planned_with_again_at_once() -> None:
    made = Driven([model("m", min_instances=0)], spare(1))
    made.demand("m", 1)
    made.round()
    made.workers = (worker_record("w0", incarnation="2"),)
    made.now_s += 0.5
    made.planner.tracker.check(made.view, made.moment)
    (ended,) = made.planner.operations.just_finished()
    assert "started anew" in ended.record().targets[0].failure
    assert made.planner.refusals.avoided("m", made.now_s) == {}, "it did nothing wrong"
    made.demand("m", 1)
    made.round()
    plan = made.plans[-1]
    assert isinstance(plan, ScalePlan)
    assert [t.worker for t in plan.targets] == [Process("w0", "2")]


def test_a_worker_that_dies_of_each_plan_before_it_can_say_anything_does_not_keep_the_model_from_another() -> None:
    made = Driven([model("m", min_instances=0)], spare(2))
    told: list[str] = []
    for number in range(3):
        made.demand("m", 1)
        made.round()
        plan = made.plans[-1]
        assert isinstance(plan, ScalePlan)
        (target,) = plan.targets
        told.append(target.worker_id)
        made.workers = (worker_record("w0", incarnation=f"again-{number}"), worker_record("w1"))
        made.now_s += 0.5
        made.planner.tracker.check(made.view, made.moment)
    assert told == ["w0", "w0", "w1"]


def test_a_worker_that_died_of_what_it_accepted_is_left_alone_for_a_while() -> None:
    made = Driven([model("m", min_instances=0)], spare(1))
    made.demand("m", 1)
    made.round()
    (plan,) = made.plans
    assert isinstance(plan, ScalePlan)
    (target,) = plan.targets
    made.report(plan.plan_id, "accepted", "w0", target.instance_id)
    made.workers = (worker_record("w0", incarnation="2"),)
    made.now_s += 0.5
    made.planner.tracker.check(made.view, made.moment)
    assert made.planner.refusals.avoided("m", made.now_s) == {"w0": "the worker died and started again"}


def test_what_does_not_fit_into_a_round_is_decided_in_the_next_one() -> None:
    made = Driven([model(f"m{i}", min_instances=0) for i in range(3)], spare(3))
    for i in range(3):
        made.demand(f"m{i}", 1)
    spent = iter([0.0, *[2 * MAX_ROUND_S] * 9])
    made.round(lambda: next(spent))
    assert [p.model.name for p in made.plans if isinstance(p, ScalePlan)] == ["m0"]
    assert made.due_in_s == 0.0
    made.round()
    assert [p.model.name for p in made.plans if isinstance(p, ScalePlan)] == ["m0", "m1", "m2"]


def test_a_request_that_breaks_the_planner_does_not_keep_others_from_their_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Driven([model("a", min_instances=0), model("b", min_instances=0)], spare(2))
    scaler = made.planner.scaler
    plan = scaler.plan_with_roles

    def breaks(request, *args, **kwargs):  # type: ignore[no-untyped-def]
        if request.model == "a":
            raise ZeroDivisionError
        return plan(request, *args, **kwargs)

    monkeypatch.setattr(scaler, "plan_with_roles", breaks)
    made.demand("a", 1)
    made.demand("b", 1)
    made.round()
    (refused,) = made.refused
    assert (refused.one.request.model, refused.error.code) == ("a", "internal")
    assert isinstance(refused.error.__cause__, ZeroDivisionError)
    assert [p.model.name for p in made.plans if isinstance(p, ScalePlan)] == ["b"]


def test_of_a_round_that_cannot_be_finished_nothing_is_left_waiting() -> None:
    made = Driven([model("m", min_instances=0)], spare(1))
    asked = made.ask("m", 1)
    begun = made.planner.rounds.begin(made.moment)
    made.demand("m", 1)
    failed = made.planner.rounds.fail(begun, Unavailable("the registry is away"), made.moment)
    assert [one.one for one in failed] == [asked, failed[1].one]
    assert made.due_in_s == INF


def test_what_is_asked_while_a_round_has_begun_is_due() -> None:
    made = Driven([model("m", min_instances=0)], spare(1))
    made.ask("m", 1)
    begun = made.planner.rounds.begin(made.moment)
    made.ask("m", 0)
    made.planner.rounds.decide(begun, made.view, made.moment)
    assert [step.request.desired for _, step in begun.steps] == [1]
    assert made.due_in_s == 0.0


def test_an_instance_whose_worker_is_to_be_free_goes_where_another_serves() -> None:
    made = serving(2)
    assert made.planner.evacuations(made.view, made.moment) == []
    made.workers = (msgspec.structs.replace(made.workers[0], cordoned=True), made.workers[1])
    (step,) = made.planner.evacuations(made.view, made.moment)
    told = made.planner.writer.begin(step, None, 1, made.moment)
    (plan,) = told.plans
    assert isinstance(plan, DrainPlan)
    assert [t.worker_id for t in plan.targets] == ["w0"]
    assert made.planner.evacuations(made.view, made.moment) == [], "once"


def test_requests_move_where_one_has_lacked_kv_for_a_while_and_then_rest() -> None:
    made = serving(2)

    def say() -> list[str]:
        lacks = {"kv_blocks_used": 90, "head_blocks": 30, "running_requests": 3}
        for worker_id, changes in (("w0", lacks), ("w1", {"kv_blocks_used": 40})):
            loaded = report(f"i-{worker_id}", worker_id=worker_id, kv_block_tokens=16, **changes)
            made.planner.on_load(loaded, made.moment)
        return [plan.plan_id for plan in made.planner.migrations.make_room(made.view, made.moment, 1)]

    assert say() == []
    made.now_s += 1.0
    assert say() == ["move-1"]
    made.now_s += 1.0
    assert say() == []


class Shifted(Driven):
    """A planner whose host's time of day is off."""

    shift_s = 0.0

    @property
    def moment(self) -> Moment:
        return Moment(self.now_s + self.shift_s, self.now_s)


def _busy_seconds(shift_s: float = 0.0) -> list[AnyPlan]:
    """Roles change, models take each other's workers, instances go and come."""
    pd = model("pd", min_instances=0, serving="disaggregated")
    others = [model(name, min_instances=0) for name in "abcdef"]
    roles = ["prefill", "prefill", "prefill", "decode"]
    workers = [worker_record(f"p{i}", pd, "serving", role=role) for i, role in enumerate(roles)]  # type: ignore[arg-type]
    made = Shifted([pd, *others], [*workers, *spare(4)])
    made.shift_s = shift_s
    for second in range(20):
        made.now_s += 1.0
        name = "abcdef"[second % 6]
        made.demand(name, second % 4, 1, idle=second % 2, idle_for_s=9.0 if second % 2 else None)
        made.demand("pd", 1 + second % 3, 3, role="prefill")
        made.demand("pd", 2 + second % 2, 1, role="decode")
        while made.due_in_s < 0.5:
            made.wait_until_due()
            made.round()
    return made.plans


@pytest.mark.parametrize("shift_s", [-30.0, 30.0])
def test_the_same_is_decided_whatever_the_time_of_day_is_at_the_planner(shift_s: float) -> None:
    def decided(shift_s: float) -> list[bytes]:
        return [encode(msgspec.structs.replace(plan, triggered_at_s=0.0)) for plan in _busy_seconds(shift_s)]

    assert decided(shift_s) == decided(0.0)


def test_the_same_is_decided_each_time() -> None:
    first = _busy_seconds()
    assert {type(plan) for plan in first} == {ScalePlan, DrainPlan, MutatePlan}
    assert [encode(plan) for plan in first] == [encode(plan) for plan in _busy_seconds()]


def test_people_are_told_unix_times_and_all_that_is_decided_goes_by_the_other_clock() -> None:
    made = Driven([model("m", min_instances=0)], spare(1))
    made.demand("m", 1)
    rounds, later = made.planner.rounds, Moment(unix_s=5e9, monotonic_s=made.now_s)
    begun = rounds.begin(later)
    rounds.decide(begun, made.view, later)
    (lease,) = begun.leases(made.settings.lease_ttl_s, 1)
    granted, _ = rounds.granted(begun, [made.verdict(lease)], later)
    (plan,) = made.planner.writer.begin(granted[0].step, granted[0].grant, 1, later).plans
    assert isinstance(plan, ScalePlan)
    assert (plan.triggered_at_s, plan.triggered_ago_s) == (5e9, 0.0)
    # The clock is set back: a worker that fails is still left alone for a second.
    made.now_s += 10.0
    early = Moment(unix_s=0.0, monotonic_s=made.now_s)
    (target,) = plan.targets
    made.report(plan.plan_id, "failed", target.worker_id, target.instance_id, moment=early)
    assert made.planner.refusals.avoided("m", made.now_s + 0.9)
    assert not made.planner.refusals.avoided("m", made.now_s + 1.0)


def test_a_plan_without_pairs_is_written_without_a_look_at_other_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Driven([model(f"m{i}", min_instances=0) for i in range(3)], spare(3))
    happened: list[str] = []
    begin, running = PlanWriter.begin, Operations.running

    def begins(writer: PlanWriter, *args: Any) -> Begun:
        happened.append("begins")
        told = begin(writer, *args)
        happened.append("is written")
        return told

    def looks(operations: Operations) -> list[Operation]:
        happened.append("looks")
        return running(operations)

    monkeypatch.setattr(PlanWriter, "begin", begins)
    monkeypatch.setattr(Operations, "running", looks)
    for i in range(3):
        made.demand(f"m{i}", 1)
    made.round()
    assert len(made.plans) == 3
    assert [what for what in happened if what == "is written"] == ["is written"] * 3
    assert all(after == "is written" for what, after in itertools.pairwise(happened) if what == "begins")


def test_an_instance_that_still_loads_makes_no_room_in_place_of_one_that_is_needed() -> None:
    """Of two observed one is idle: the one that loads. The other one has requests."""
    a, b = model("a", min_instances=0), model("b", min_instances=0)
    needed, loads = worker_record("w0", a, "serving"), worker_record("w1", a, "loading", epoch=2)
    workers = [needed, loads, worker_record("w2", b, "serving")]
    driven = Driven([a, b], workers)
    for _ in range(3):
        driven.demand("a", 2, 2, idle=1, idle_for_s=driven.now_s - 99.0)
        driven.demand("b", 2, 1)
        driven.round()
        driven.now_s += 0.5
    assert driven.plans == []


def test_nor_does_it_let_one_that_is_needed_have_another_role() -> None:
    pd = model("pd", min_instances=0, serving="disaggregated")
    workers = [
        worker_record("w0", pd, "serving", role="prefill"),
        worker_record("w1", pd, "serving", role="decode"),
        worker_record("w2", pd, "serving", role="decode", epoch=2),
        worker_record("w3", pd, "loading", role="decode", epoch=3),
    ]
    driven = Driven([pd], workers)
    driven.demand("pd", 3, 3, role="decode", idle=1, idle_for_s=60.0)
    driven.demand("pd", 2, 1, role="prefill")
    driven.round()
    assert driven.plans == []
    driven.workers = (*workers[:3], worker_record("w3", pd, "serving", role="decode", epoch=3))
    driven.demand("pd", 3, 3, role="decode", idle=1, idle_for_s=60.0)
    driven.demand("pd", 2, 1, role="prefill")
    driven.round()
    assert [type(plan).__name__ for plan in driven.plans] == ["MutatePlan"]


@pytest.mark.parametrize("shift_s", [-50.0, 50.0])
def test_a_clock_that_is_set_does_not_change_how_long_a_slice_lasts(shift_s: float) -> None:
    a, b = model("a", min_instances=0), model("b", min_instances=0)
    made = Shifted([a, b], spare(1))
    made.demand("a", 1)
    made.round()
    (plan,) = made.plans
    (target,) = plan.targets
    events: tuple[ProgressEvent, ...] = ("accepted", "loaded", "serving")
    for event in events:
        made.now_s += 0.3
        made.report(plan.plan_id, event, target.worker_id, target.instance_id)
    record = worker_record("w0", a, "serving")
    assert record.instance is not None
    instance = msgspec.structs.replace(record.instance, plan_id=plan.plan_id, instance_id=target.instance_id)
    made.workers = (msgspec.structs.replace(record, instance=instance),)
    made.now_s, made.shift_s = made.now_s + 5.0, shift_s
    made.demand("b", 1)
    made.round()
    assert [type(plan) for plan in made.plans[1:]] == [DrainPlan]


def of_another_engine(num: int, **changes: object) -> Driven:
    made = serving(num, engine="vllm", **changes)
    made.workers = tuple(
        msgspec.structs.replace(w, worker=msgspec.structs.replace(w.worker, engines=("vllm",))) for w in made.workers
    )
    return made


@pytest.mark.parametrize("engine", ["", "vllm"])
def test_an_instance_whose_engine_moves_no_kv_sends_all_back_when_it_goes(engine: str) -> None:
    made = of_another_engine(2) if engine else serving(2)
    for n in range(2):
        made.planner.on_load(report(f"i-w{n}", worker_id=f"w{n}", kv_block_tokens=16, kv_blocks_used=10), made.moment)
    stopped = made.planner.migrations.of("i-w0", made.view)
    assert (len(stopped.destinations), stopped.send_back) == ((0, "all") if engine else (1, "waiting"))
    made.ask("m", 1)
    made.round()
    (drain,) = made.plans
    assert isinstance(drain, DrainPlan)
    (target,) = drain.targets
    expected = ((), "all") if engine else (("i-w0",), "waiting")
    assert (tuple(d.instance_id for d in target.destinations), target.send_back) == expected
    # Nobody else is left that would take what the other one has.
    alone = made.planner.migrations.of("i-w0", made.view)
    assert (alone.destinations, alone.send_back) == ((), "none")


@pytest.mark.parametrize("engine", ["", "vllm"])
def test_nothing_moves_for_a_prompt_where_kv_stays(engine: str) -> None:
    made = of_another_engine(2) if engine else serving(2)
    for _ in range(30):
        made.now_s += 0.1
        lacks = {"kv_blocks_used": 90, "head_blocks": 30, "running_requests": 3}
        made.planner.on_load(report("i-w0", worker_id="w0", kv_block_tokens=16, **lacks), made.moment)
        made.planner.on_load(report("i-w1", worker_id="w1", kv_block_tokens=16, kv_blocks_used=40), made.moment)
    assert len(made.planner.migrations.make_room(made.view, made.moment, 1)) == (0 if engine else 1)


@pytest.mark.parametrize("engine", ["", "vllm"])
def test_an_engine_that_lends_no_layers_makes_no_pairs(engine: str) -> None:
    made = of_another_engine(1) if engine else serving(1)
    made.workers += (worker_record("free", engines=(engine,) if engine else ()),)
    made.planner.on_load(report("i-w0", worker_id="w0"), made.moment)
    request = ScaleRequest("m", 2, made.now_s, "asked", "always", by_hand=True)
    made.planner.rounds.ask(request, made.moment)
    made.round()
    (plan,) = made.plans
    assert isinstance(plan, ScalePlan)
    assert [t.worker_id for t in plan.targets] == ["free"]
    (operation,) = made.planner.operations.running()
    assert len(operation.pairs) == (0 if engine else 1)
    assert ("not live: instances of the engine vllm lend no layers" in plan.explain) == bool(engine)


@pytest.mark.parametrize("engine", ["", "vllm"])
def test_other_roles_are_not_asked_for_where_kv_stays(engine: str) -> None:
    made = serving(1, engine=engine)
    asked = StartScale(model="m", instances=1, hold_s=0.0, role="decode")
    if not engine:
        assert asked_by_hand(asked, made.view, made.now_s).role == "decode"
        return
    with pytest.raises(BadRequest, match="vllm take no KV") as refused:
        asked_by_hand(asked, made.view, made.now_s)
    assert refused.value.param == "role"


def test_an_engine_that_starts_slowly_is_given_the_time_for_it() -> None:
    plans = []
    for engine in ("", "vllm"):
        made = Driven([model("m", min_instances=0, engine=engine)], [worker_record("w0", engines=("vllm",))])
        made.demand("m", 1)
        made.round()
        plans += made.plans
    ours, theirs = plans
    assert isinstance(ours, ScalePlan)
    assert isinstance(theirs, ScalePlan)
    assert theirs.give_up_s == ours.give_up_s + traits_of("vllm").start_s > ours.give_up_s


@pytest.mark.parametrize("engine", ["", "vllm"])
def test_instances_get_no_other_role_where_kv_stays(engine: str) -> None:
    made = serving(2, engine=engine)
    made.ask("m", 1)
    made.ask("m", 1, "decode")
    made.round()
    assert any(isinstance(plan, MutatePlan) for plan in made.plans) == (not engine)


def test_a_profile_of_our_engine_says_nothing_of_another() -> None:
    asked: list[str] = []

    def find(*, engine: str, **_: str) -> None:
        asked.append(engine)

    pairs = PairPlanner(Operations(), LiveSettings(), Overheads(), find)
    on = worker_record("w0", engine="torch", engines=("vllm",))
    for engine in ("", "vllm"):
        pairs.profile_of(model("m", engine=engine), on)
    assert asked == ["torch", "vllm"]
