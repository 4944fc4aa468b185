"""An instance gets another role: what the worker tells, what it refuses, and what becomes of its requests."""

from __future__ import annotations

import asyncio
import time
from typing import get_args

import pytest

from services.worker.weights.mover import WeightMover
from shared import subjects
from shared.messages.common import Role
from shared.messages.load import LoadReport
from shared.messages.plans import MutatePlan, MutateTarget
from tests.processes import INCARNATION
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.rig import PROMPT, Disaggregated, disaggregated
from tests.services.worker.late_workers import also_late
from tests.services.worker.live.burst import Burst, live_cluster
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.services.workers import RunningWorker
from tests.wait_until import eventually


def why(alone: LoneWorker, plan_id: str) -> str:
    return next(p.detail for p in alone.progress if p.plan_id == plan_id and p.event == "failed")


def known_role(alone: LoneWorker) -> Role | None:
    """As the pool has it."""
    instance = alone.pool.heartbeats[-1].instance
    return instance.role if instance is not None else None


@pytest.mark.parametrize("role", get_args(Role))
async def test_the_pool_knows_the_role_before_the_planner_hears_of_it(alone: LoneWorker, role: Role) -> None:
    instance_id = await alone.serve()
    known: list[Role | None] = []
    await alone.planner.subscribe(
        subjects.progress(),
        type(alone.progress[0]),
        lambda p: known.append(known_role(alone)) if p.event == "serving" else None,
    )
    await alone.mutate(instance_id, role)
    await alone.reported("mutate-1", "serving")
    assert known == [role]
    assert alone.worker.serving.role == role
    assert alone.worker.serving.state == "serving"


async def test_load_is_reported_in_the_new_role_at_once() -> None:
    async with lone_worker(report_interval_s=3600.0) as alone:
        reports: list[LoadReport] = []
        await alone.planner.subscribe(subjects.load(), LoadReport, reports.append)
        instance_id = await alone.serve()
        await alone.mutate(instance_id, "decode")
        await eventually(lambda: [r.role for r in reports] == ["decode"])


async def test_its_first_request_in_the_new_role_is_told_once(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.submit(instance_id, "before")
    await alone.mutate(instance_id, "prefill")
    await alone.reported("mutate-1", "serving")
    assert "working" not in alone.events("mutate-1")
    for request_id in ("first", "second"):
        await alone.submit(instance_id, request_id)
        await alone.gateway.end_of(request_id)
    assert alone.events("mutate-1") == ["serving", "working"]


async def test_a_prompt_is_no_work_of_a_decode_instance_and_is_computed_all_the_same(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.mutate(instance_id, "decode")
    await alone.reported("mutate-1", "serving")
    # From a gateway that has not heard of it yet.
    await alone.submit(instance_id, "late")
    await alone.gateway.end_of("late")
    assert alone.gateway.tokens("late") == expected_tokens(8)
    assert alone.events("mutate-1") == ["serving"]


async def test_a_plan_that_comes_again_is_answered_and_changes_nothing(alone: LoneWorker) -> None:
    instance_id, at_s = await alone.serve(), time.monotonic()
    await alone.mutate(instance_id, "decode", planned_s=at_s)
    await alone.reported("mutate-1", "serving")
    await alone.mutate(instance_id, "decode", "again", planned_s=at_s, valid_s=0.0)
    await alone.reported("again", "serving")
    assert known_role(alone) == "decode"


async def test_of_two_plans_the_later_one_holds_in_whatever_order_they_come(alone: LoneWorker) -> None:
    instance_id, at_s = await alone.serve(), time.monotonic()
    await alone.mutate(instance_id, "prefill", "later", planned_s=at_s)
    await alone.mutate(instance_id, "decode", "earlier", planned_s=at_s - 1.0)
    await alone.reported("earlier", "failed")
    assert "later plan" in why(alone, "earlier")
    await alone.mutate(instance_id, "decode", "of a later term", planned_s=at_s - 2.0, term=2)
    await alone.reported("of a later term", "serving")
    await alone.mutate(instance_id, "colocated", "of the term before", planned_s=at_s + 1.0)
    await alone.mutate(instance_id, "colocated", "earlier again", planned_s=at_s - 3.0, term=2)
    await alone.reported("earlier again", "failed")
    assert known_role(alone) == "decode"


async def test_a_plan_that_comes_too_late_changes_nothing(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.mutate(instance_id, "decode", valid_s=0.0)
    await alone.reported("mutate-1", "failed")
    assert "was valid for 0.0 s" in why(alone, "mutate-1")
    assert alone.worker.serving.role == "colocated"


@pytest.mark.parametrize("shift_s", [-30.0, 30.0])
async def test_a_role_is_taken_whatever_the_time_of_day_is_here(
    alone: LoneWorker, shift_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance_id, real = await alone.serve(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    await alone.mutate(instance_id, "decode", valid_s=25.0)
    await alone.reported("mutate-1", "serving")
    monkeypatch.setattr(time, "time", lambda: real() - shift_s)
    await alone.mutate(instance_id, "prefill", "later", valid_s=25.0)
    await alone.reported("later", "serving")


async def test_an_instance_that_is_gone_is_told(alone: LoneWorker) -> None:
    await alone.mutate("older", "decode")
    await alone.reported("mutate-1", "failed")
    await alone.serve()
    await alone.mutate("older", "decode", "mutate-2")
    await alone.reported("mutate-2", "failed")
    assert "not here" in why(alone, "mutate-2")
    assert alone.worker.serving.role == "colocated"


async def test_what_drains_does_not_mutate_and_is_not_revived(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    with alone.worker.serving.pinned():
        await alone.drain(instance_id)
        await alone.mutate(instance_id, "decode")
        await alone.reported("mutate-1", "failed")
        assert "draining" in why(alone, "mutate-1")
        assert (alone.worker.serving.state, alone.worker.serving.role) == ("draining", "colocated")
    await alone.reported("drain-1", "spare")


async def test_what_loads_does_not_mutate(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.sleep(3600)

    async with lone_worker() as alone:
        monkeypatch.setattr(WeightMover, "fill", never)
        plan = alone.plan(epoch=10)
        await alone.publish(plan)
        await alone.reported(plan.plan_id, "accepted")
        await alone.mutate(plan.members[0].instance_id, "decode")
        await alone.reported("mutate-1", "failed")
        assert "loading" in why(alone, "mutate-1")


async def test_without_the_pool_it_has_the_role_and_the_planner_is_told_that_nobody_knows(
    alone: LoneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.mutation.CONFIRM_S", 0.05)
    instance_id = await alone.serve()
    alone.broker.disconnect("pool")
    await alone.mutate(instance_id, "decode")
    await alone.reported("mutate-1", "serving")
    assert "not confirmed" in next(p.detail for p in alone.progress if p.plan_id == "mutate-1")
    assert alone.worker.serving.role == "decode"
    alone.broker.reconnect("pool")  # or the worker would ask it for as long as it may drain whether it may leave


async def give_role(worker: RunningWorker, role: Role) -> None:
    target = MutateTarget(
        worker_id=worker.worker_id,
        incarnation=INCARNATION,
        instance_id=worker.serving.instance_id,
        was=worker.serving.role,
    )
    now_s = time.monotonic()
    await worker.service.parts.mutation.on_mutate_plan(
        MutatePlan(
            plan_id="p",
            model="m",
            targets=(target,),
            role=role,
            planned_s=now_s,
            valid_s=60.0,
            term=9**9,
        ),
        now_s,
    )
    assert worker.serving.role == role


async def phases(pair: Disaggregated) -> None:
    """Requests that wait, are computed, are held for their decode instance, and are decoded there."""
    await pair.submit("decoded", max_tokens=60)
    await pair.gateway.tokens_arrived("decoded", 3)
    for number in range(6):
        await pair.submit(f"r{number}", prompt=PROMPT[: 20 + 10 * number], max_tokens=20)


@also_late()
@pytest.mark.parametrize("swapped", [False, True])
async def test_requests_in_every_phase_finish_where_they_were_to(redis_url: str, *, swapped: bool) -> None:
    async with disaggregated(redis_url) as pair:
        await give_role(pair.prefill, "prefill")
        await give_role(pair.decode, "decode")
        await phases(pair)
        await give_role(pair.prefill, "decode" if swapped else "colocated")
        await give_role(pair.decode, "prefill" if swapped else "colocated")
        # Named by a gateway that has not heard of the change.
        await pair.submit("late")
        for number in range(6):
            await pair.ends(f"r{number}", max_tokens=20)
        await pair.ends("decoded", max_tokens=60)
        await pair.ends("late")
        assert pair.decoded_by("late") == ["w0", "w1"]
        await pair.clean()


@also_late("drawn")
async def test_the_source_of_a_pair_that_becomes_a_decode_instance_parts_with_it(redis_url: str) -> None:
    async with live_cluster(redis_url) as cluster:
        burst, has_parted = Burst(cluster), list[bool]()
        await burst.start(delay_s=0.15, until_split=lambda: has_parted)
        await burst.live_source()
        roles = burst.source.service.parts.pair_roles
        await give_role(burst.source, "decode")
        # No more weights before: it does not go on until the target has everything.
        await eventually(lambda: roles.source is None)
        has_parted.append(True)
        await burst.ends()
        record = await cluster.record(burst.plan_id)
        ((pair,), (target,)) = record.live, record.targets
        assert pair.outcome == "dissolved", pair
        assert pair.ended_ms is not None
        assert target.loaded_ms is not None
        assert pair.ended_ms < target.loaded_ms, "it did not go on until the target had everything"
        await burst.clean()
