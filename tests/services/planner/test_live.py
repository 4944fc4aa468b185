"""The planner's side of live scaling: pairs published with plans, splits on demand, reports in records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from services.planner.config import LIVE_CHOICES, LIVE_POLICIES, PlannerConfig
from services.planner.core.operations import pair_record
from services.planner.core.rounds.settings import LiveSettings
from shared import subjects
from shared.bus.base import EventMaker
from shared.errors import Unavailable
from shared.messages.codec import Message
from shared.messages.common import LiveChoice, LivePolicy, Role
from shared.messages.live import LayerRuns
from shared.messages.plans import DrainPlan, ScalePlan
from shared.messages.registry import WorkerRecord
from shared.profile import PrefillPoint, write_profile
from shared.settings import SettingsError
from tests.processes import process
from tests.records import profile
from tests.services.planner.core.live.some_pairs import report
from tests.services.planner.live_rig import LOADING_S, LiveRig, break_assignments
from tests.services.planner.rig import running
from tests.wait_until import WAIT_S, eventually


@pytest.fixture
async def rig() -> AsyncIterator[LiveRig]:
    async with running(LiveRig()) as made:
        assert isinstance(made, LiveRig)
        yield made


# --- who is paired ---------------------------------------------------------------------------------


async def test_an_overloaded_instance_gets_a_target_of_the_plan(rig: LiveRig) -> None:
    await rig.load("w0", 50_000)
    await rig.load("w1", 100)
    record = await rig.scale(3)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    (made,) = rig.assignments()
    (target,) = plan.targets
    assert (made.plan_id, made.pair_id) == (record.plan_id, f"{record.plan_id}-{target.worker_id}")
    assert made.target == target
    assert (made.source.worker_id, made.source.instance_id, made.source.transport_address) == ("w0", "i-w0", b"w0")
    assert (made.policy, made.revision, made.valid_s) == ("zigzag", 0, pytest.approx(plan.give_up_s, abs=1.0))
    assert made.layers_ready_s[0] > 0
    assert made.loaded_s == pytest.approx(LOADING_S, rel=0.05)
    assert [e.subject for e in rig.broker.events] == [
        subjects.scale_plans(),
        subjects.worker_plans(process(target.worker_id)),
        subjects.zigzag_assignments(),
        subjects.worker_plans(process("w0")),
        subjects.worker_plans(process(target.worker_id)),
    ]
    assert any(line.startswith("live: ") for line in plan.explain)
    assert any(line.startswith("not live: i-w1: not overloaded") for line in plan.explain)
    assert plan.explain == record.explain
    assert [(pair.pair_id, pair.outcome) for pair in record.live] == [(made.pair_id, "running")]


async def test_what_gateways_hold_overloads_too(rig: LiveRig) -> None:
    await rig.queue(50_000)
    await rig.scale(4)
    assert sorted(source for source, _ in rig.pairs()) == ["w0", "w1"]
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert len(plan.chains) == 2, "every pair has a tail of its own"


async def test_whether_an_instance_is_overloaded_follows_from_its_profile(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_bytes(b"{")
    rig = LiveRig(LiveSettings(report_ttl_s=60.0), profiles=tmp_path)
    point = PrefillPoint(prompt_tokens=100, seconds=1e-4, repetitions=1)
    write_profile(tmp_path / "m.json", profile(rig.model, prefill=(point,)))
    async with running(rig):
        await rig.load("w0", 50_000)  # 25 s at the speed that would be assumed, 0.05 s at this one
        await rig.scale(3)
    assert rig.assignments() == []


async def test_instances_without_load_are_not_paired(rig: LiveRig) -> None:
    await rig.load("w0", 100)
    record = await rig.scale(3)
    assert rig.assignments() == []
    assert record.live == ()
    assert len([line for line in record.explain if line.startswith("not live: ")]) == 2


async def test_a_demand_makes_pairs_as_well(rig: LiveRig) -> None:
    await rig.load("w1", 50_000)
    await rig.demand(3)
    await eventually(rig.assignments)
    assert [source for source, _ in rig.pairs()] == ["w1"]


async def test_loading_that_meets_the_objective_needs_no_pair(rig: LiveRig) -> None:
    rig.model = msgspec.structs.replace(rig.model, slo_ttft_s=2 * LOADING_S)
    rig.pool.models = (rig.model,)
    await rig.load("w0", 100_000)
    record = await rig.scale(3)
    assert rig.assignments() == []
    assert "stop-the-world meets the SLO" in " ".join(record.explain)
    # The same, had the earliest not waited for so long already.
    await rig.load("w0", 100_000, oldest_queued_s=1.5 * LOADING_S)
    await rig.scale(3)
    assert [source for source, _ in rig.pairs()] == ["w0"]


async def test_never_makes_no_pair(rig: LiveRig) -> None:
    await rig.load("w0", 50_000)
    record = await rig.scale(3, live="never")
    assert rig.assignments() == []
    assert [line for line in record.explain if "live" in line] == ["not live: asked for"]


async def test_always_pairs_instances_that_are_idle(rig: LiveRig) -> None:
    await rig.load("w1", 10)
    await rig.scale(3, live="always")
    assert [source for source, _ in rig.pairs()] == ["w1"], "the longest queue first"
    assert " helps i-w1 (asked for); " in rig.assignments()[0].why


@pytest.mark.parametrize(("default", "asked", "num_pairs"), [("always", "auto", 1), ("never", "always", 1)])
async def test_the_default_is_for_those_who_do_not_choose(
    default: LiveChoice, asked: LiveChoice, num_pairs: int
) -> None:
    async with running(LiveRig(LiveSettings(choice=default))) as rig:
        await rig.scale(3, live=asked)
        assert len(rig.assignments()) == num_pairs


async def test_a_default_of_never_goes_for_demands() -> None:
    async with running(LiveRig(LiveSettings(choice="never"))) as rig:
        assert isinstance(rig, LiveRig)
        await rig.load("w0", 50_000)
        await rig.demand(3)
        await eventually(lambda: rig.planned("out") == 1)
        assert rig.assignments() == []
        (record,) = await rig.records()
        assert "not live: the planner's default is never" in record.explain


def with_instance(record: WorkerRecord, **changes: object) -> WorkerRecord:
    assert record.instance is not None
    return msgspec.structs.replace(record, instance=msgspec.structs.replace(record.instance, **changes))


@pytest.mark.parametrize("role", ["colocated", "prefill", "decode"])
@pytest.mark.parametrize("wanted", ["colocated", "prefill", "decode"])
async def test_a_pair_is_of_one_role_that_runs_prompts(rig: LiveRig, role: Role, wanted: Role) -> None:
    rig.pool.workers = (rig.record_of("w0", "serving", role), rig.record_of("w5"))
    await rig.scale(1 + (role == wanted), live="always", role=wanted)
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert plan.role == wanted
    assert rig.pairs() == ([("w0", "w5")] if role == wanted != "decode" else [])


async def test_two_overloaded_prefill_instances_get_a_chain_and_a_tail_each(rig: LiveRig) -> None:
    """The paper's Figure 12: weights come from two that do not compute prompts, and both chains end in a live pair."""
    decoders = tuple(rig.record_of(f"w{i}", "serving", "decode") for i in (3, 4))
    prefills = tuple(rig.record_of(f"w{i}", "serving", "prefill") for i in (0, 1))
    rig.pool.workers = (*prefills, *decoders, *(rig.record_of(f"w{i}") for i in range(5, 9)))
    for worker_id in ("w0", "w1"):
        await rig.load(worker_id, 50_000)
    await rig.scale(6, role="prefill")
    (plan,) = rig.plans()
    assert isinstance(plan, ScalePlan)
    assert len(plan.chains) == 2
    assert {chain.hops[0].stripes[0].source for chain in plan.chains} == {"w3", "w4"}
    tails = {chain.hops[-1].targets[0] for chain in plan.chains}
    assert {target for _, target in rig.pairs()} == tails
    assert {source for source, _ in rig.pairs()} == {"w0", "w1"}


@pytest.mark.parametrize("role", ["colocated", "prefill"])
async def test_a_tail_that_nobody_needs_helps_a_prefill_instance_within_its_slack(rig: LiveRig, role: Role) -> None:
    rig.pool.workers = (
        rig.record_of("w0", "serving", role),
        rig.record_of("w1", "serving", "decode"),
        rig.record_of("w2"),
    )
    await rig.load("w0", 100)
    record = await rig.scale(2, role=role)
    assert rig.pairs() == ([("w0", "w2")] if role == "prefill" else [])
    assert any("not overloaded" in line for line in record.explain) == (role == "colocated")


@pytest.mark.parametrize("asked", ["auto", "always", "never"])
async def test_a_decode_plan_says_why_it_is_not_live(asked: LiveChoice) -> None:
    async with running(LiveRig(LiveSettings(choice="always"))) as rig:
        assert isinstance(rig, LiveRig)
        await rig.load("w0", 50_000)
        record = await rig.scale(1, live=asked, role="decode")
        assert rig.assignments() == []
        assert [line for line in record.explain if "live: " in line] == [
            "not live: decode instances have no prompts to share, and KV comes in beside the weights"
        ]


async def test_what_gateways_hold_is_shared_by_all_who_take_new_requests(rig: LiveRig) -> None:
    rig.pool.workers = (
        rig.record_of("w0", "serving"),
        rig.record_of("w1", "serving", "prefill"),
        rig.record_of("w2", "serving", "decode"),
        rig.record_of("w5"),
    )
    await rig.queue(50_000)
    await rig.scale(2, role="prefill")
    (made,) = rig.assignments()
    # Half of the tokens, at the assumed speed.
    assert made.source.worker_id == "w1"
    assert f"i-w1 has {25_000 / LiveSettings().assumed_tokens_per_s:.3f} s of queue" in made.why


async def test_neither_what_drains_nor_what_was_told_to_is_a_source(rig: LiveRig) -> None:
    await rig.scale(1)
    (drain,) = rig.plans()
    assert isinstance(drain, DrainPlan)
    (leaving,) = drain.targets
    await rig.scale(3, live="always")
    assert {source for source, _ in rig.pairs()} == {"w0", "w1"} - {leaving.worker_id}


async def test_an_instance_that_is_revived_is_no_source_yet(rig: LiveRig) -> None:
    rig.pool.workers = (rig.serving[0], rig.record_of("w1", "draining"), rig.record_of("w5"), rig.record_of("w6"))
    await rig.load("w1", 10)
    await rig.scale(4, live="always")
    assert [source for source, _ in rig.pairs()] == ["w0"]


async def test_an_instance_of_other_weights_is_no_source(rig: LiveRig) -> None:
    rig.pool.workers = (with_instance(rig.serving[0], model_hash="older"), rig.record_of("w5"))
    await rig.scale(1, live="always")
    assert rig.assignments() == []


async def test_an_instance_is_in_one_pair_until_that_has_ended(rig: LiveRig) -> None:
    rig.pool.workers = (rig.serving[0], rig.record_of("w5"))
    await rig.scale(2, live="always")
    (first,) = rig.assignments()
    loading = with_instance(rig.record_of("w5", "live"), instance_id=first.target.instance_id)
    rig.pool.workers = (rig.serving[0], loading, rig.record_of("w6"))
    record = await rig.scale(3, live="always")
    assert len(rig.assignments()) == 1
    assert "in a pair already" in " ".join(record.explain)
    # The target serves, but the pair has not parted: neither of them is a source.
    serving = msgspec.structs.replace(with_instance(loading, state="serving"), state="serving")
    rig.pool.workers = (rig.serving[0], serving, rig.record_of("w7"))
    await rig.scale(3, live="always")
    assert len(rig.assignments()) == 1
    await rig.client.publish(subjects.live_reports(), report(first))
    rig.pool.workers = (rig.serving[0], rig.record_of("w4"))
    await rig.scale(2, live="always")
    assert rig.pairs()[1:] == [("w0", "w4")]


async def test_a_pair_is_drained_last(rig: LiveRig) -> None:
    await rig.load("w1", 10)
    made = await rig.paired()
    assert made.source.worker_id == "w1"
    # As the newest it would go first otherwise.
    rig.pool.workers = (rig.serving[0], with_instance(rig.serving[1], epoch=9))
    await rig.scale(1)
    drain = rig.plans()[-1]
    assert isinstance(drain, DrainPlan)
    assert [t.worker_id for t in drain.targets] == ["w0"]


@pytest.mark.parametrize("policy", LIVE_POLICIES)
async def test_the_policy_and_objectives_are_told(policy: LivePolicy) -> None:
    async with running(LiveRig(LiveSettings(policy=policy, slo_tbt_s=0.03))) as rig:
        assert isinstance(rig, LiveRig)
        made = await rig.paired()
        assert (made.policy, made.slo_tbt_s) == (policy, 0.03)


async def test_a_plan_goes_on_without_a_pair_that_cannot_be_told(
    rig: LiveRig, caplog: pytest.LogCaptureFixture
) -> None:
    break_assignments(rig)
    record = await rig.scale(3, live="always")
    assert [(pair.outcome, "the plan stream is full" in pair.reason) for pair in record.live] == [("failed", True)]
    assert any(r.levelno == logging.WARNING and "loads without it" in r.getMessage() for r in caplog.records)
    await rig.end(record)
    assert (await rig.record(record.plan_id, wait_s=WAIT_S)).status == "done"


async def test_a_plan_that_is_not_published_makes_no_pair(rig: LiveRig) -> None:
    async def unavailable(subject: str, message: Message | EventMaker, *, message_id: str) -> None:
        raise Unavailable("the plan stream is away")

    rig.bus.publish_event = unavailable  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await rig.scale(3, live="always")
    (record,) = await rig.records()
    assert [pair.outcome for pair in record.live] == ["failed"]


# --- records ---------------------------------------------------------------------------------------


async def test_a_report_lands_in_the_record_and_ends_the_operation(rig: LiveRig) -> None:
    first = await rig.paired()
    record = await rig.record(first.plan_id)
    await rig.end(record)
    waiting = asyncio.create_task(rig.record(first.plan_id, wait_s=WAIT_S))
    await eventually_serving(rig, first.plan_id)
    assert (await rig.record(first.plan_id)).status == "running"
    runs = LayerRuns(started_ago_s=1.0, bucket_s=0.05, counts=(3, 4))
    await rig.client.publish(subjects.live_reports(), report(first, started_ago_s=1.0, source_runs=runs))
    async with asyncio.timeout(WAIT_S / 4):
        ended = await waiting
    assert ended.status == "done"
    (pair,) = ended.live
    assert pair.outcome == "dissolved"
    assert pair.started_ms is not None
    assert pair.ended_ms == pytest.approx(pair.started_ms + 1000.0)
    assert pair.source_layers == (3, 4)
    assert (await rig.records())[0].live[0].source_layers == (), "lists are short"


async def eventually_serving(rig: LiveRig, plan_id: str) -> None:
    async def serving() -> bool:
        return (await rig.record(plan_id)).trigger_to_serving_ms is not None

    await eventually(serving)


async def test_a_pair_that_does_not_report_becomes_unknown(rig: LiveRig) -> None:
    first = await rig.paired()
    record = await rig.record(first.plan_id)
    assert record.live[0].outcome == "running"
    await rig.end(record)
    await asyncio.sleep(pair_record.LIVE_REPORT_WAIT_S - 1.0)
    assert (await rig.record(first.plan_id)).status == "running"
    ended = await rig.record(first.plan_id, wait_s=WAIT_S)
    assert (ended.status, ended.live[0].outcome) == ("done", "unknown")


async def test_a_pair_whose_target_died_becomes_unknown(rig: LiveRig) -> None:
    first = await rig.paired()
    rig.pool.workers = rig.serving
    await asyncio.sleep(pair_record.LIVE_REPORT_WAIT_S)
    ended = await rig.record(first.plan_id, wait_s=WAIT_S)
    assert (ended.status, ended.live[0].outcome) == ("failed", "unknown")


async def test_a_pair_whose_source_is_gone_becomes_unknown_and_its_target_may_be_a_source(
    rig: LiveRig,
) -> None:
    rig.pool.workers = (rig.serving[0], rig.record_of("w5"))
    record = await rig.scale(2, live="always")
    (first,) = rig.assignments()
    serving = with_instance(rig.record_of("w5", "serving"), instance_id=first.target.instance_id)
    rig.pool.workers = (serving, rig.record_of("w6"))
    await rig.end(record)
    ended = await rig.record(first.plan_id, wait_s=WAIT_S)
    assert (ended.status, ended.live[0].outcome) == ("done", "unknown")
    await rig.scale(2, live="always")
    assert rig.pairs()[1:] == [("w5", "w6")]


async def test_reports_on_unknown_plans_are_ignored(rig: LiveRig) -> None:
    first = await rig.paired()
    await rig.client.publish(subjects.live_reports(), report(first, plan_id="plan-nobody"))
    await rig.client.publish(subjects.live_reports(), report(first, pair_id="nobody"))
    assert (await rig.record(first.plan_id)).live[0].outcome == "running"


# --- settings --------------------------------------------------------------------------------------


def test_settings_come_from_the_environment() -> None:
    assert PlannerConfig.from_env({}).plans.live == LiveSettings()
    environ = {
        "BLITZ_PLANNER_LIVE": "always",
        "BLITZ_PLANNER_LIVE_POLICY": "best_effort",
        "BLITZ_PLANNER_SLO_TTFT_MS": "250",
        "BLITZ_PLANNER_SLO_TBT_MS": "50",
        "BLITZ_PLANNER_ASSUMED_TOKENS_PER_S": "10",
    }
    assert PlannerConfig.from_env(environ).plans.live == LiveSettings("always", "best_effort", 0.25, 0.05, 10.0)
    assert set(LIVE_CHOICES) == {"auto", "always", "never"}
    with pytest.raises(SettingsError, match="BLITZ_PLANNER_LIVE='sometimes'"):
        PlannerConfig.from_env({"BLITZ_PLANNER_LIVE": "sometimes"})
