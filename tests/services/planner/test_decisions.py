"""What was decided of a model, why, at what cost and what else would have been: asked for later, of any planner."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from services.planner.core.rounds.decision_log import MAX_MODELS, MAX_OF_MODEL, MAX_UNTOLD, DecisionLog
from shared import subjects
from shared.bus.base import M, Stored
from shared.errors import Unavailable
from shared.messages.decisions import MAX_DECISIONS, DecisionRecord, Decisions, ListDecisions
from shared.messages.load import Demand
from tests.records import model, worker_record
from tests.services.planner.rig import Rig, running
from tests.wait_until import WAIT_S, eventually


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(Rig()) as made:
        yield made


async def decisions(rig: Rig, name: str = "m", until_s: float | None = None, limit: int = 10) -> list[DecisionRecord]:
    message = ListDecisions(model=name, until_s=until_s, limit=limit)
    asked = rig.client.request(subjects.planner("decisions"), message, Decisions, timeout_s=WAIT_S)
    return list((await asked).decisions)


async def test_a_load_has_its_reason_source_cost_and_alternative(rig: Rig) -> None:
    serving = worker_record("w0", rig.model, "serving")
    rig.pool.workers = (serving, worker_record("w1"), worker_record("w2"))
    message = Demand(
        publisher="monitor", sequence=1, model="m", role="colocated", desired=3, observed=1, triggered_ago_s=0.0,
        reason="prefill 9.1; 9 would be needed, and max_instances is 3", term=1, spare=0, urgent=0, deficit=2.0,
        bound="9 would be needed, and max_instances is 3",
    )  # fmt: skip
    await rig.client.publish(subjects.demand(), message)
    await eventually(rig.plans)
    (one,) = await decisions(rig)
    assert (one.model, one.role, one.asked_by, one.outcome) == ("m", "colocated", "load", "load")
    assert (one.asked, one.there, one.wanted) == (3, 1, 3)
    assert (one.seen, one.bound) == ("prefill 9.1", "9 would be needed, and max_instances is 3")
    assert one.chosen.startswith("2 instances load on w1, w2; ")
    assert "w0 -> " in one.chosen
    assert " to load" in one.cost
    assert one.otherwise == "1 instance would have 200 % more to do than they can within the objectives"
    (record,) = await rig.records()
    assert one.plan_id == record.plan_id
    assert abs(one.at_s - time.time()) < WAIT_S


async def test_what_cannot_be_done_is_noted_once_while_it_stays_so(rig: Rig) -> None:
    rig.pool.workers = (worker_record("w0", rig.model, "serving"),)
    for _ in range(3):
        await rig.demand(2)
        await rig.scale(1)  # a round of its own: the demand has been decided on
    refusals = [one for one in await decisions(rig) if one.outcome == "refuse"]
    assert len(refusals) == 1
    (one,) = refusals
    assert "no worker is spare" in one.chosen
    assert one.otherwise == "it stays at 1 instance until that changes"
    assert (one.there, one.wanted, one.plan_id) == (1, 2, "")


async def test_by_hand_a_number_that_is_there_is_answered_and_bounds_are_named(rig: Rig) -> None:
    rig.model = model("m", min_instances=1, max_instances=4)
    rig.pool.models = (rig.model,)
    rig.pool.workers = (worker_record("w0", rig.model, "serving"), worker_record("w1", rig.model, "serving"))
    await rig.scale(0)
    await rig.scale(2)
    kept, drained = await decisions(rig)
    assert (drained.outcome, drained.asked_by, drained.asked, drained.wanted) == ("drain", "hand", 0, 1)
    assert drained.bound == "min_instances 1"
    assert (kept.outcome, kept.asked_by, kept.bound) in {("keep", "hand", ""), ("revive", "hand", "")}


async def test_another_model_that_waits_is_the_reason_why_an_instance_goes(rig: Rig) -> None:
    waiting = model("other", min_instances=0)
    rig.pool.models = (rig.model, waiting)
    rig.pool.workers = (worker_record("w0", rig.model, "serving"),)
    await rig.client.publish(
        subjects.demand(),
        Demand(
            publisher="monitor", sequence=1, model="m", role="colocated", desired=1, observed=1, triggered_ago_s=0.0,
            reason="idle", term=1, idle=1, idle_for_s=60.0, spare=1, urgent=0,
        ),
    )  # fmt: skip
    await rig.demand_of("other", 1)
    await eventually(rig.plans)
    (gone,) = await decisions(rig)
    assert (gone.outcome, gone.asked_by, gone.otherwise) == (
        "drain",
        "room",
        "the model that waits would have no worker",
    )
    (refused,) = await decisions(rig, "other")
    assert refused.outcome == "refuse"


async def test_how_many_could_not_be_had_is_one_refusal_however_the_load_varies(rig: Rig) -> None:
    rig.pool.workers = (worker_record("w0", rig.model, "serving"),)
    for desired in (2, 3, 2, 4, 3):
        await rig.demand(desired)
        await rig.scale(1)
    assert len([one for one in await decisions(rig) if one.outcome == "refuse"]) == 1


async def test_a_worker_that_is_drained_by_hand_is_the_reason(rig: Rig) -> None:
    cordoned = msgspec.structs.replace(worker_record("w0", rig.model, "serving"), cordoned=True)
    rig.pool.workers = (cordoned, worker_record("w1", rig.model, "serving"))
    await eventually(rig.plans)
    (one,) = await decisions(rig)
    assert (one.asked_by, one.outcome, one.there, one.wanted) == ("drain", "drain", 2, 1)
    assert one.chosen == "w0 give up their instances: their workers are drained by hand"
    assert one.otherwise == "their workers would not become free"


async def test_of_an_advised_model_that_is_the_bound(rig: Rig) -> None:
    advised = model("m", min_instances=0, max_instances=4, advise=True)
    rig.pool.models = (advised,)
    rig.pool.workers = (worker_record("w0", advised, "serving"), worker_record("w1"))
    await rig.demand(3)
    await rig.scale(1)
    by_load = next(one for one in await decisions(rig) if one.asked_by == "load")
    assert (by_load.outcome, by_load.there, by_load.wanted) == ("keep", 1, 1)
    assert by_load.bound == "3 would be wanted, and the model is only to be advised on"
    assert by_load.otherwise == "without it, another number would be wanted"


async def test_decisions_that_cannot_be_read_back_keep_nobody_from_leading(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.die()
    rig.pool.leader = ""
    heir = Rig(broker=rig.broker, pool=rig.pool)
    past_events = heir.bus.past_events

    async def past(subject: str, kind: type[M], *, limit: int) -> tuple[Stored[M], ...]:
        if subject == subjects.decisions():
            raise Unavailable("not now")
        return await past_events(subject, kind, limit=limit)

    monkeypatch.setattr(heir.bus, "past_events", past)
    await heir.start()
    assert await decisions(heir) == []
    await heir.stop()


async def test_what_was_decided_last_is_stored_when_a_planner_ends(rig: Rig) -> None:
    rig.spare("w0", "w1")
    await rig.demand(1)
    await eventually(lambda: any(e.subject == subjects.decisions() for e in rig.broker.events))
    await rig.scale(2)
    before = await decisions(rig)
    await rig.stop()
    heir = Rig(broker=rig.broker, pool=rig.pool)
    await heir.start()

    async def known() -> bool:
        return await decisions(heir) == before

    await eventually(known)
    await heir.stop()


async def test_the_next_planner_knows_what_this_one_decided(rig: Rig) -> None:
    rig.spare("w0", "w1")
    await rig.demand(1)
    await eventually(rig.plans)
    before = await decisions(rig)
    assert before
    await eventually(lambda: any(e.subject == subjects.decisions() for e in rig.broker.events))
    await rig.die()
    rig.pool.leader = ""
    heir = Rig(broker=rig.broker, pool=rig.pool)
    await heir.start()

    async def known() -> bool:
        return await decisions(heir) == before

    await eventually(known)
    await heir.stop()


# --- the log alone ---------------------------------------------------------------------------


def made(number: int, name: str = "m") -> DecisionRecord:
    return DecisionRecord(
        at_s=float(number), model=name, role="colocated", asked_by="load", seen="", asked=1, there=0, wanted=1,
        outcome="load", chosen="", otherwise="",
    )  # fmt: skip


def test_what_was_decided_by_a_time_is_found_newest_first() -> None:
    log = DecisionLog()
    log.recall(made(number) for number in range(10))
    assert [one.at_s for one in log.of("m", None, 3)] == [9.0, 8.0, 7.0]
    assert [one.at_s for one in log.of("m", 4.5, 2)] == [4.0, 3.0]
    assert log.of("m", None, 0) == log.of("another", None, 5) == ()


def test_models_and_decisions_are_bounded() -> None:
    log = DecisionLog()
    log.recall(made(number, f"m{number % (MAX_MODELS + 5)}") for number in range(2 * MAX_MODELS))
    assert log.of("m1997", None, 5) == (), "others were decided on since"
    assert len(log.of("m7", None, 5)) == 1
    log = DecisionLog()
    log.recall(made(number) for number in range(MAX_OF_MODEL + 5))
    assert len(log.of("m", None, 1000)) == MAX_OF_MODEL


def test_what_the_stream_does_not_take_is_kept_up_to_a_limit() -> None:
    log = DecisionLog()
    for number in range(MAX_UNTOLD + 10):
        log.add(made(number))
    batch = log.untold()
    assert [one.at_s for one in batch] == [float(number) for number in range(10, 10 + MAX_DECISIONS)]
    log.told(batch)
    log.told(batch)  # told again by a call that was repeated
    assert log.untold()[0].at_s == 10.0 + MAX_DECISIONS
