"""Instances get other roles of their model instead of being loaded and drained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from services.planner.core.rounds.plan_writer import MUTATE_BY_S
from shared import subjects
from shared.bus.base import EventMaker
from shared.errors import Conflict, Unavailable
from shared.messages.codec import Message, decode
from shared.messages.common import Role
from shared.messages.live import WorkerOrder
from shared.messages.load import Demand
from shared.messages.plans import DrainPlan, MutatePlan, ScalePlan
from shared.messages.registry import Floor, WorkerRecord
from shared.profile import write_profile
from tests.processes import process
from tests.records import model, profile, worker_record
from tests.services.planner.rig import Rig, running
from tests.wait_until import eventually

BIG = 1 << 34
"""Bytes: loading so much takes seconds."""
M = model("m", max_instances=8, min_instances=0, weights_bytes=BIG)

P = TypeVar("P", DrainPlan, MutatePlan, ScalePlan)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running(Rig()) as made:
        made.pool.models = (M,)
        made.pool.shows_leases = True
        yield made


def serving(role: Role, *worker_ids: str) -> tuple[WorkerRecord, ...]:
    """The later in the list, the newer."""
    return tuple(worker_record(w, M, "serving", role=role, epoch=i + 1) for i, w in enumerate(worker_ids))


def spare(*worker_ids: str) -> tuple[WorkerRecord, ...]:
    return tuple(worker_record(w, arena_bytes=2 * BIG) for w in worker_ids)


async def say(
    rig: Rig,
    role: Role,
    desired: int,
    observed: int,
    *,
    idle: int = 0,
    idle_s: float = 5.0,
    reason: str = "load",
    spare: int | None = None,
    urgent: int | None = None,
) -> None:
    demand = Demand(
        publisher="monitor",
        sequence=1,
        model="m",
        role=role,
        desired=desired,
        observed=observed,
        triggered_ago_s=0.0,
        reason=reason,
        idle=idle,
        idle_for_s=idle_s if idle else None,
        spare=idle if spare is None else spare,
        urgent=desired if urgent is None else urgent,
        term=1,
    )
    await rig.client.publish(subjects.demand(), demand)


async def plans(rig: Rig, kind: type[P], number: int = 1) -> list[P]:
    def found() -> list[P]:
        return [plan for plan in rig.plans() if isinstance(plan, kind)]

    await eventually(lambda: len(found()) >= number)
    return found()


async def one(rig: Rig, kind: type[P]) -> P:
    found = await plans(rig, kind)
    assert len(found) == 1
    return found[0]


def moved(plan: MutatePlan) -> list[tuple[str, Role, Role]]:
    return [(t.worker_id, t.was, plan.role) for t in plan.targets]


async def settled(rig: Rig) -> None:
    """What was said until now has been decided on."""
    before = len(rig.plans())
    for _ in range(3):
        await asyncio.sleep(2 * 0.02)
    assert len(rig.plans()) == before


async def test_a_surplus_gets_the_role_that_lacks_an_instance(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w9")
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    plan = await one(rig, MutatePlan)
    assert moved(plan) == [("w1", "prefill", "decode")], "the newest"
    assert (plan.model, plan.desired, plan.reason) == ("m", 2, "load")
    assert plan.explain[0].startswith(
        "mutate: w1 from prefill to decode: 1 of 2 prefill instances are needed; otherwise"
    )
    orders = [
        decode(e.payload, WorkerOrder) for e in rig.broker.events if e.subject == subjects.worker_plans(process("w1"))
    ]
    mutations = [order.mutate for order in orders if order.mutate is not None]
    assert [msgspec.structs.replace(told, valid_s=plan.valid_s) for told in mutations] == [plan]
    # What is under way counts as done.
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    await settled(rig)
    record = await rig.record(plan.plan_id)
    assert (record.status, record.direction, record.role) == ("running", "mutate", "decode")
    await rig.report(plan.plan_id, "working", "w1", "i-w1")
    await rig.report(plan.plan_id, "serving", "w1", "i-w1")
    record = await rig.record(plan.plan_id, wait_s=5.0)
    assert record.status == "done"
    (target,) = record.targets
    assert (target.was, target.failure) == ("prefill", "")
    assert None not in (record.trigger_to_plan_ms, record.trigger_to_serving_ms, record.trigger_to_working_ms)
    assert target.working_ms == record.trigger_to_working_ms
    # The registry may show it later.
    await say(rig, "decode", 2, 1)
    await settled(rig)
    assert rig.planned("mutate") == 1


async def test_the_surplus_that_nobody_can_use_drains(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1", "w2") + serving("decode", "w3")
    await say(rig, "prefill", 1, 3)
    await say(rig, "decode", 2, 1)
    mutate, drain = await one(rig, MutatePlan), await one(rig, DrainPlan)
    assert {t.worker_id for t in mutate.targets} | {t.worker_id for t in drain.targets} == {"w1", "w2"}
    assert (len(mutate.targets), len(drain.targets)) == (1, 1)
    await settled(rig)


async def test_what_no_role_can_give_is_loaded(rig: Rig) -> None:
    rig.pool.workers = serving("decode", "w0", "w1") + serving("prefill", "w3") + spare("w9")
    await say(rig, "decode", 1, 2)
    await say(rig, "prefill", 3, 1)
    mutate, load = await one(rig, MutatePlan), await one(rig, ScalePlan)
    assert moved(mutate) == [("w1", "decode", "prefill")]
    assert ([t.worker_id for t in load.targets], load.role) == (["w9"], "prefill")


async def test_what_can_be_had_is_had_where_no_worker_is_spare(rig: Rig) -> None:
    rig.pool.workers = serving("decode", "w0", "w1") + serving("prefill", "w3")
    await say(rig, "decode", 1, 2)
    await say(rig, "prefill", 3, 1)
    plan = await one(rig, MutatePlan)
    assert moved(plan) == [("w1", "decode", "prefill")]
    assert (await rig.record(plan.plan_id)).left_out == plan.left_out
    assert "spare" in plan.left_out[0]
    await eventually(lambda: rig.planned("mutate") == 1)


async def test_idle_instances_go_first_and_only_after_a_while(rig: Rig) -> None:
    rig.pool.workers = serving("colocated", "w0", "w1") + serving("decode", "w2") + spare("w9")
    await say(rig, "colocated", 2, 2, idle=1, idle_s=0.1)
    await say(rig, "decode", 2, 1)
    await one(rig, ScalePlan)
    rig.pool.workers = serving("colocated", "w0", "w1") + serving("decode", "w2", "w9")
    await say(rig, "colocated", 2, 2, idle=1, idle_s=1.5)
    await say(rig, "decode", 3, 2)
    plan = await one(rig, MutatePlan)
    assert moved(plan) == [("w1", "colocated", "decode")]
    assert "have been idle for" in plan.explain[0]


async def test_what_is_idle_but_not_spare_keeps_its_role_unless_people_or_limits_ask(rig: Rig) -> None:
    rig.pool.workers = serving("decode", "w0", "w1") + serving("prefill", "w2") + spare("w9")
    await say(rig, "decode", 2, 2, idle=1, idle_s=5.0, spare=0)
    await say(rig, "prefill", 2, 1)
    load = await one(rig, ScalePlan)
    assert load.role == "prefill"
    assert not [p for p in rig.plans() if isinstance(p, MutatePlan)]
    record = await rig.scale(3, role="prefill")
    assert (record.direction, [t.worker_id for t in record.targets]) == ("mutate", ["w1"])


async def test_minimum_and_floor_keep_their_instances(rig: Rig) -> None:
    rig.pool.floors = (Floor(model="m", instances=2, left_s=4e9, role="prefill"),)
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w9")
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    # None but by making up for it.
    load = await one(rig, ScalePlan)
    assert load.role == "prefill"
    assert [p.role for p in await plans(rig, ScalePlan)] == ["prefill"]


async def test_not_the_last_that_takes_prompts_stops_taking_them(rig: Rig) -> None:
    rig.pool.workers = serving("colocated", "w0") + spare("w9")
    await say(rig, "colocated", 0, 1)
    await say(rig, "decode", 1, 0)
    load = await one(rig, ScalePlan)
    assert load.role == "decode"
    assert not [p for p in rig.plans() if isinstance(p, MutatePlan)]


async def test_all_roles_change_at_once(rig: Rig) -> None:
    """A model is served in another way from now on."""
    rig.pool.workers = serving("colocated", "w0", "w1")
    await say(rig, "colocated", 0, 2)
    await say(rig, "prefill", 1, 0)
    await say(rig, "decode", 1, 0)
    found = await plans(rig, MutatePlan, 2)
    assert sorted(plan.role for plan in found) == ["decode", "prefill"]
    assert {t.worker_id for plan in found for t in plan.targets} == {"w0", "w1"}
    await settled(rig)


async def test_the_last_one_that_takes_prompts_goes_on_taking_them_in_another_role(rig: Rig) -> None:
    """The monitor keeps it until another one takes prompts, and there is no worker for that."""
    rig.pool.models = (msgspec.structs.replace(M, serving="disaggregated", min_instances=1),)
    rig.pool.workers = serving("colocated", "w0")
    await say(rig, "prefill", 1, 0)
    plan = await one(rig, MutatePlan)
    assert moved(plan) == [("w0", "colocated", "prefill")]


async def test_a_model_is_served_in_another_way_without_a_load_or_a_drain(rig: Rig) -> None:
    """As the monitor says it: one instance is to take prompts until another one does."""
    rig.pool.models = (msgspec.structs.replace(M, serving="disaggregated", min_instances=1),)
    rig.pool.workers = serving("colocated", "w0", "w1") + spare("w9")
    await say(rig, "colocated", 1, 2, idle=1, idle_s=0.0)
    await say(rig, "prefill", 1, 0)
    await say(rig, "decode", 1, 0)
    found = await plans(rig, MutatePlan, 2)
    assert sorted(plan.role for plan in found) == ["decode", "prefill"]
    await say(rig, "colocated", 1, 2, idle=1, idle_s=0.0)
    await settled(rig)
    assert len(rig.plans()) == 2, "what the monitor said before it looked again asks for nothing"


async def test_what_no_worker_was_spare_for_gets_what_another_role_can_do_without_later(rig: Rig) -> None:
    rig.pool.workers = serving("colocated", "w0", "w1")
    await say(rig, "decode", 1, 0)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    await say(rig, "colocated", 1, 2)
    plan = await one(rig, MutatePlan)
    assert moved(plan) == [("w1", "colocated", "decode")]
    assert len(rig.plans()) == 1


async def test_by_hand_an_idle_instance_gets_the_role_and_the_record_says_so(rig: Rig) -> None:
    rig.pool.workers = serving("colocated", "w0", "w1")
    await say(rig, "colocated", 2, 2, idle=1, idle_s=0.1)
    await settled(rig)
    record = await rig.scale(1, role="prefill")
    assert (record.direction, record.role, record.desired) == ("mutate", "prefill", 1)
    assert [t.worker_id for t in record.targets] == ["w1"]


async def test_it_can_be_turned_off() -> None:
    async with running(Rig(mutation=False)) as rig:
        rig.pool.models = (M,)
        rig.pool.workers = serving("prefill", "w0", "w1", "w2") + serving("decode", "w3") + spare("w9")
        await say(rig, "prefill", 2, 3)
        await say(rig, "decode", 2, 1)
        load, drain = await one(rig, ScalePlan), await one(rig, DrainPlan)
        assert (load.role, drain.role) == ("decode", "prefill")


# --- decode instances without a surplus ----------------------------------------------------------


async def test_the_source_of_a_pair_keeps_its_role(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w8", "w9")
    record = await rig.scale(3, role="prefill", live="always")
    (pair,) = rig.assignments()
    await say(rig, "decode", 2, 1)
    mutate = await one(rig, MutatePlan)
    assert {t.worker_id for t in mutate.targets} == {"w0", "w1"} - {pair.source.worker_id}
    assert record.live


async def test_a_prefill_instance_decodes_and_another_one_loads_in_its_place(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w8", "w9")
    await say(rig, "decode", 2, 1)
    mutate, load = await one(rig, MutatePlan), await one(rig, ScalePlan)
    assert moved(mutate) == [("w1", "prefill", "decode")]
    assert (load.role, load.desired, len(load.targets)) == ("prefill", 2, 1)
    assert load.reason == "in place of w1, which decode from now on: load"
    assert (
        "a prefill instance loads in its place; otherwise a decode instance would load, in about" in mutate.explain[0]
    )
    await say(rig, "decode", 2, 1)
    await say(rig, "prefill", 2, 2)
    await settled(rig)


async def test_what_decode_lacks_less_than_prefill_would_or_only_ahead_loads(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1", "w2") + serving("decode", "w3") + spare("w7", "w8", "w9")
    await say(rig, "decode", 3, 1, urgent=2)
    mutate, loads = await one(rig, MutatePlan), await plans(rig, ScalePlan, 2)
    assert moved(mutate) == [("w2", "prefill", "decode")]
    assert {(p.role, len(p.targets)) for p in loads} == {("prefill", 1), ("decode", 1)}


async def test_as_many_as_there_are_workers_for_and_one_prefill_instance_stays(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1", "w2") + serving("decode", "w3") + spare("w7", "w8", "w9")
    await say(rig, "decode", 4, 1)
    mutate, loads = await one(rig, MutatePlan), await plans(rig, ScalePlan, 2)
    assert sorted(t.worker_id for t in mutate.targets) == ["w1", "w2"]
    assert {(p.role, len(p.targets)) for p in loads} == {("prefill", 2), ("decode", 1)}
    assert len({t.worker_id for p in loads for t in p.targets}) == 3


async def test_without_a_spare_worker_no_prefill_instance_is_taken(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2")
    await say(rig, "decode", 2, 1)
    await eventually(lambda: rig.refused("no_capacity") == 1)
    assert rig.plans() == []


async def test_a_load_that_is_faster_is_preferred(rig: Rig) -> None:
    small = model("m", max_instances=8, min_instances=0)
    rig.pool.models = (small,)
    records = [("w0", "prefill"), ("w1", "prefill"), ("w2", "decode")]
    rig.pool.workers = tuple(worker_record(w, small, "serving", role=role) for w, role in records) + spare("w9")  # type: ignore[arg-type]
    await say(rig, "decode", 2, 1)
    load = await one(rig, ScalePlan)
    assert load.role == "decode"
    await settled(rig)


async def test_a_profile_says_how_long_a_mutation_takes_until_one_has_been_seen(tmp_path: Path) -> None:
    # BIG takes 14 s to load.
    write_profile(tmp_path / "m.json", profile(M, mutation_s=60.0))
    async with running(Rig(profiles=tmp_path)) as rig:
        rig.pool.models, rig.pool.shows_leases = (M,), True
        rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w9")
        await say(rig, "decode", 2, 1)
        load = await one(rig, ScalePlan)
        assert load.role == "decode"
        await settled(rig)


async def test_a_profile_of_another_gpu_says_nothing(tmp_path: Path) -> None:
    h100, a100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    write_profile(tmp_path / "m.json", profile(M, mutation_s=60.0, device="cuda", gpu_name=h100))
    kinds: dict[str, type[ScalePlan | MutatePlan]] = {h100: ScalePlan, a100: MutatePlan}
    for own, expected in kinds.items():
        async with running(Rig(profiles=tmp_path)) as rig:
            rig.pool.models, rig.pool.shows_leases = (M,), True
            rig.pool.workers = tuple(
                msgspec.structs.replace(
                    w, worker=msgspec.structs.replace(w.worker, engine="torch", device="cuda", gpu_name=own)
                )
                for w in serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w9")
            )
            await say(rig, "decode", 2, 1)
            await one(rig, expected)
            await settled(rig)


async def test_without_the_lease_for_what_makes_up_for_it_nothing_mutates(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w9")
    rig.pool.errors["lease"] = [Unavailable("the registry recovers")]
    await say(rig, "decode", 2, 1)
    await eventually(lambda: rig.refused("unavailable") >= 1)
    assert rig.plans() == []
    rig.pool.errors["lease"] = [Conflict("w9 is leased")]
    await say(rig, "decode", 2, 1)
    await one(rig, MutatePlan)
    load = await one(rig, ScalePlan)
    assert load.role == "prefill"


# --- what does not go as planned -----------------------------------------------------------------


async def test_a_worker_that_does_not_mutate_is_left_alone_and_the_role_is_loaded(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w9")
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    plan = await one(rig, MutatePlan)
    await rig.report(plan.plan_id, "failed", "w1", "i-w1")
    assert (await rig.record(plan.plan_id, wait_s=5.0)).status == "failed"
    assert await rig.refusals() == (), "it may load"
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w9")
    await say(rig, "decode", 2, 1)
    second = (await plans(rig, MutatePlan, 2))[1]
    assert moved(second) == [("w0", "prefill", "decode")]


async def test_a_worker_that_says_nothing_fails_soon(rig: Rig) -> None:
    """One that does not take the order."""
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w9")
    rig.pool.floors = (Floor(model="m", instances=1, left_s=4e9, role="prefill"),)
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    plan = await one(rig, MutatePlan)
    record = await rig.record(plan.plan_id, wait_s=5.0)
    assert (record.status, record.targets[0].failure) == ("failed", "it did not take its new role in time")


def stall(rig: Rig, seconds: float) -> None:
    """The stream takes the record of a mutation only after a while."""
    publish = rig.bus.publish_event

    async def slow(subject: str, message: Message | EventMaker, *, message_id: str) -> None:
        if subject == subjects.mutate_plans():
            await asyncio.sleep(seconds)
        await publish(subject, message, message_id=message_id)

    rig.bus.publish_event = slow  # type: ignore[method-assign]


def mutations_told(rig: Rig, worker_id: str) -> list[MutatePlan | None]:
    subject = subjects.worker_plans(process(worker_id))
    return [decode(e.payload, WorkerOrder).mutate for e in rig.broker.events if e.subject == subject]


async def test_what_the_stream_keeps_waiting_is_valid_for_as_much_less(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2")
    stall(rig, 0.2)
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    await eventually(lambda: mutations_told(rig, "w1"))
    (order,) = mutations_told(rig, "w1")
    assert order is not None
    (plan,) = await plans(rig, MutatePlan)
    assert [order.valid_s, plan.valid_s] == pytest.approx([MUTATE_BY_S - 0.2] * 2)


async def test_what_holds_no_longer_is_not_told(rig: Rig) -> None:
    """The worker would count from when the stream takes its order, and mutate after the operation has failed."""
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2")
    stall(rig, MUTATE_BY_S + 0.1)
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    await eventually(lambda: rig.refused("deadline_exceeded") >= 1)
    record = next(r for r in await rig.records() if r.direction == "mutate")
    assert record.status == "failed"
    assert "could not be published" in record.reason
    assert f"was valid for {MUTATE_BY_S:.1f} s" in record.reason
    assert [record.targets[0].failure, mutations_told(rig, "w1")] == ["", []]


async def test_a_plan_that_cannot_be_published_is_decided_again(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2")
    publish = rig.bus.publish_event

    async def broken(*_: object, **__: object) -> None:
        raise Unavailable("the stream does not answer")

    rig.bus.publish_event = broken  # type: ignore[method-assign, assignment]
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    await eventually(lambda: rig.refused("unavailable") >= 1)
    rig.bus.publish_event = publish  # type: ignore[method-assign]
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    plan = await one(rig, MutatePlan)
    assert len(plan.targets) == 1


async def test_a_lost_report_is_replaced_by_the_registry(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2")
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    plan = await one(rig, MutatePlan)
    rig.pool.workers = serving("prefill", "w0") + serving("decode", "w1", "w2")
    assert (await rig.record(plan.plan_id, wait_s=5.0)).status == "done"


async def test_an_instance_that_is_gone_ends_it(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2")
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    plan = await one(rig, MutatePlan)
    rig.pool.workers = serving("prefill", "w0") + spare("w1") + serving("decode", "w2")
    record = await rig.record(plan.plan_id, wait_s=5.0)
    assert (record.status, record.targets[0].failure) == ("failed", "its instance is gone")


async def test_a_role_that_was_given_gives_none_for_as_long_as_a_change_costs(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2") + spare("w9")
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    plan = await one(rig, MutatePlan)
    rig.pool.workers = serving("prefill", "w0") + serving("decode", "w2", "w1") + spare("w9")
    await rig.report(plan.plan_id, "serving", "w1", "i-w1")
    await rig.record(plan.plan_id, wait_s=5.0)
    # Both are idle, and stay for now, the older one, too: the role is loaded beside them.
    await say(rig, "decode", 2, 2, idle=2)
    await say(rig, "prefill", 2, 1)
    load = await one(rig, ScalePlan)
    assert load.role == "prefill"
    # Those that would drain go.
    rig.pool.workers = serving("prefill", "w0") + serving("decode", "w2", "w1")
    await say(rig, "decode", 1, 2)
    await say(rig, "prefill", 3, 1)
    back = (await plans(rig, MutatePlan, 2))[1]
    assert moved(back) == [("w1", "decode", "prefill")]


async def test_an_instance_that_would_have_to_go_changes_back_at_once(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2")
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    plan = await one(rig, MutatePlan)
    rig.pool.workers = serving("prefill", "w0") + serving("decode", "w2", "w1")
    await rig.report(plan.plan_id, "serving", "w1", "i-w1")
    await say(rig, "decode", 0, 2)
    await say(rig, "prefill", 3, 1)
    back = (await plans(rig, MutatePlan, 2))[1]
    assert sorted(moved(back)) == [("w1", "decode", "prefill"), ("w2", "decode", "prefill")]
    assert not [p for p in rig.plans() if isinstance(p, DrainPlan)]


async def test_the_next_planner_learns_what_was_under_way_and_repeats_nothing(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2")
    await say(rig, "prefill", 1, 2)
    await say(rig, "decode", 2, 1)
    plan = await one(rig, MutatePlan)
    await rig.die()
    heir = Rig(broker=rig.broker, pool=rig.pool)
    rig.pool.leader = ""
    await heir.start()
    record = await heir.record(plan.plan_id)
    assert (record.direction, record.status, record.role) == ("mutate", "running", "decode")
    await say(heir, "prefill", 1, 2)
    await say(heir, "decode", 2, 1)
    await settled(heir)
    rig.pool.workers = serving("prefill", "w0") + serving("decode", "w1", "w2")
    assert (await heir.record(plan.plan_id, wait_s=5.0)).status == "done"
    await heir.stop()


async def test_what_loads_in_its_place_is_no_reason_either_for_a_role_that_was_just_given(rig: Rig) -> None:
    rig.pool.workers = serving("prefill", "w0", "w1") + serving("decode", "w2", "w3") + spare("w8", "w9")
    await say(rig, "decode", 1, 2)
    await say(rig, "prefill", 3, 2)
    plan = await one(rig, MutatePlan)
    assert moved(plan) == [("w3", "decode", "prefill")]
    await say(rig, "decode", 2, 1, urgent=2)
    load = await one(rig, ScalePlan)
    assert load.role == "decode"
    assert rig.planned("mutate") == 1
