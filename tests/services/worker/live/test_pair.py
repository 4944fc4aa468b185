"""Two workers that scale live: what clients get, and what is left behind."""

from __future__ import annotations

import time

import pytest

from services.worker.device.completion import Completion
from services.worker.engine.torch_engine import Activation, TorchEngine
from services.worker.live import source
from shared.messages.common import LivePolicy
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.late_workers import also_late
from tests.services.worker.live.burst import LAYER_S, NUM_TOKENS, PROMPTS, Burst, live_cluster
from tests.wait_until import eventually

MAX_CASES = 3
"""In which the burst waits until there is a pair once, also on a busy machine."""


@also_late("drawn")
@pytest.mark.parametrize("policy", ["zigzag", "best_effort", "overlap", "stop_the_world"])
async def test_a_burst_gets_its_tokens_while_the_second_instance_loads(
    redis_url: str, policy: LivePolicy, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(MAX_CASES):
        async with live_cluster(redis_url, policy) as cluster:
            burst = Burst(cluster)
            await burst.start(delay_s=0.03, until_split=policy in {"zigzag", "best_effort"})
            await burst.ends()
            record = await cluster.record(burst.plan_id)
            (pair,) = record.live
            assert (pair.outcome, pair.policy) == ("dissolved", policy), pair
            await cluster.serving(2)
            await burst.clean()
        if pair.batches:
            break
    split = [b for b in pair.batches if b.target_layers and b.source_layers]
    assert bool(split) == (policy in {"zigzag", "best_effort"}), pair
    assert (pair.first_cooperative_token_ms is not None) == bool(split)
    assert all(b.target_layers + b.source_layers == 4 for b in pair.batches)
    assert policy != "overlap" or any(b.source_layers == 0 for b in pair.batches), pair
    ours = [r.message for r in caplog.records if r.name.startswith("services.worker.live") and r.levelname == "ERROR"]
    assert ours == [], "a batch that fails is computed again"


async def test_requests_that_arrive_during_the_pair_queue_behind_the_others(redis_url: str) -> None:
    async with live_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.06)
        await burst.live_source()
        late = {f"late{i}": tuple(40 + (3 * i + j) % 80 for j in range(NUM_TOKENS)) for i in range(4)}
        for request_id, prompt in late.items():
            await burst.submit(request_id, prompt)
        await burst.ends()
        (pair,) = (await cluster.record(burst.plan_id)).live
        assert pair.outcome == "dissolved"
        await burst.clean()


@also_late("copies_last")
@pytest.mark.parametrize("num_seats", [8, 128])
async def test_short_prompts_share_batches(redis_url: str, num_seats: int) -> None:
    prompts = {f"s{i}": tuple(40 + (5 * i + j) % 80 for j in range(9 + i % 7)) for i in range(100)}
    async with live_cluster(redis_url, max_running_requests=num_seats, max_queued_requests=128) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.02, prompts=prompts)
        await burst.ends()
        (pair,) = (await cluster.record(burst.plan_id)).live
        assert any(b.num_requests > 1 for b in pair.batches), pair
        await burst.clean()


async def test_a_pair_parts_before_its_report_is_larger_than_a_message(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_BATCHES", 3)
    async with live_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        has_parted = list[bool]()
        await burst.start(delay_s=0.05, until_split=lambda: has_parted)
        roles = burst.source.service.parts.pair_roles
        await eventually(lambda: roles.source is not None)
        await eventually(lambda: roles.source is None)
        assert not burst.target.serving.copy.complete
        has_parted.append(True)
        await burst.ends()
        (pair,) = (await cluster.record(burst.plan_id)).live
        assert pair.outcome == "dissolved"
        await cluster.serving(2)
        await burst.clean()


@also_late("drawn")
async def test_cancelled_requests_leave_both_members(redis_url: str) -> None:
    async with live_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.06)
        await burst.live_source()
        gone = ("r5", "r8", "r11")
        for request_id in gone:
            await cluster.gateway.cancel(burst.source.worker_id, request_id)
        await burst.ends(without=gone)
        await cluster.record(burst.plan_id)
        await burst.clean()


async def test_no_request_waits_and_the_pair_dissolves_by_itself(redis_url: str) -> None:
    async with live_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.02, prompts={})
        (pair,) = (await cluster.record(burst.plan_id)).live
        assert (pair.outcome, pair.batches) == ("dissolved", ())
        await burst.clean()
        await cluster.gateway.submit(
            burst.target.worker_id, burst.target.serving.instance_id, "after", prompt=PROMPTS["r1"], max_tokens=4
        )
        await cluster.gateway.end_of("after")
        assert cluster.gateway.tokens("after") == expected_tokens(4, PROMPTS["r1"])


async def test_a_target_without_room_takes_what_fits(redis_url: str) -> None:

    async with live_cluster(redis_url, max_running_requests=4) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.03)
        await burst.ends()
        (pair,) = (await cluster.record(burst.plan_id)).live
        assert pair.outcome == "dissolved"
        await burst.clean()


@also_late()
async def test_a_real_model_gives_the_same_tokens_as_alone(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_layers = TorchEngine.run_layers

    def slowly(engine: TorchEngine, activation: Activation, first: int, last: int) -> Completion[None]:
        time.sleep(LAYER_S * (last - first))
        return run_layers(engine, activation, first, last)

    monkeypatch.setattr(TorchEngine, "run_layers", slowly)
    async with live_cluster(redis_url, engine="torch", kv_bytes=32 << 20) as cluster:
        burst = Burst(cluster)
        gateway = cluster.gateway
        alone: dict[str, tuple[int, ...]] = {}

        async def ask_alone() -> None:
            for request_id, prompt in PROMPTS.items():
                name, worker = f"alone-{request_id}", burst.source
                await gateway.submit(worker.worker_id, burst.source_instance_id, name, prompt=prompt, max_tokens=3)
                await gateway.end_of(name)
                alone[request_id] = gateway.tokens(name)

        await burst.start(delay_s=0.06, max_tokens=3, before=ask_alone, until_split=True)
        for request_id in PROMPTS:
            await gateway.end_of(request_id)
        assert {r: gateway.tokens(r) for r in PROMPTS} == alone
        (pair,) = (await cluster.record(burst.plan_id)).live
        assert any(b.target_layers and b.source_layers for b in pair.batches), pair
        await burst.clean()


async def test_the_source_learns_nothing_new_from_a_pair_that_came_too_late(redis_url: str) -> None:
    """The target serves before the source asks: no pair, and everything goes on."""
    async with live_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.0)
        await burst.ends()
        (pair,) = (await cluster.record(burst.plan_id)).live
        assert pair.outcome in ("dissolved", "failed")
        await burst.clean()
        await eventually(lambda: burst.source.serving.queue_factor == 1)
