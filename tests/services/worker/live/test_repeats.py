"""What is said twice, late or out of turn: messages are repeated when their answers are lost."""

from __future__ import annotations

import asyncio
import functools
import time

import msgspec
import pytest

from services.worker.engine.mock.settings import MockTiming
from services.worker.live.target import LiveTarget
from shared import subjects
from shared.errors import BadRequest
from shared.messages.common import Ack
from shared.messages.generation import SamplingParams, Submit
from shared.messages.live import Dissolve, Dissolved, HandOver, LiveOffer, ZigzagAssignment
from tests.checkpoints import VOCAB_SIZE
from tests.processes import process
from tests.services.worker.live.burst import NUM_TOKENS, PROMPTS, Burst, live_cluster
from tests.wait_until import eventually

slow_cluster = functools.partial(live_cluster, mock=MockTiming(layer_per_token_s=0.012 / NUM_TOKENS))
RPC_S = 60.0


async def _target(burst: Burst) -> LiveTarget:
    await burst.live_source()
    target = burst.live_target_of(burst.target)
    assert target is not None
    return target


async def test_an_offer_that_is_repeated_while_it_is_accepted_does_no_harm(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.05, prompts={})
        # The source's own offer is somewhere in between these.
        await eventually(lambda: burst.target.instance is not None)
        assignment = next(
            msgspec.msgpack.decode(e.payload, type=ZigzagAssignment)
            for e in cluster.broker.events
            if e.subject == subjects.zigzag_assignments()
        )
        subject = subjects.worker_live(process(burst.target.worker_id), "offer")
        offer = LiveOffer(assignment=assignment)
        await asyncio.gather(*(cluster.client.request(subject, offer, Ack, timeout_s=RPC_S) for _ in range(4)))
        (pair,) = (await cluster.record(burst.plan_id)).live
        assert pair.outcome == "dissolved", pair
        await burst.clean()


async def test_a_hand_over_that_is_repeated_is_one_batch(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.05)
        target = await _target(burst)
        message = HandOver(
            pair_id=target.assignment.pair_id, batch_id="b", serial=99, layer_s=0.1, requests=_one_request(burst)
        )
        subject = subjects.worker_live(process(burst.target.worker_id), "hand_over")
        await asyncio.gather(*(cluster.client.request(subject, message, Ack, timeout_s=RPC_S) for _ in range(3)))
        unknown = tuple(msgspec.structs.replace(r, prompt_token_ids=(VOCAB_SIZE,)) for r in _one_request(burst))
        for changes in ({"layer_s": 0.0}, {"requests": ()}, {"serial": -1}, {"requests": unknown}):
            bad = msgspec.structs.replace(message, batch_id="c", **changes)
            with pytest.raises(BadRequest):
                await cluster.client.request(subject, bad, Ack, timeout_s=RPC_S)
        assert not target.machine.holds("c")
        # Nobody pulls it back by name: the pair's end gives it to whoever has it, which is nobody. It is cancelled.
        await cluster.gateway.cancel(burst.target.worker_id, "extra")
        await burst.ends()
        await burst.clean()


def _one_request(burst: Burst) -> tuple[Submit, ...]:
    return (
        Submit(
            request_id="extra",
            attempt=1,
            gateway_id="gw",
            instance_id=burst.source_instance_id,
            model="m",
            model_hash=burst.cluster.gateway.model_hash,
            prompt_token_ids=PROMPTS["r0"],
            sampling=SamplingParams(max_tokens=2, seed=1),
            gateway_incarnation="1",
        ),
    )


async def _parted(burst: Burst) -> LiveTarget:
    """The target of a pair that is dissolved, with batches of its own that are not finished. Nothing was begun before,
    so about half of what waited is kept."""
    await eventually(lambda: burst.live_target_of(burst.target) is not None)
    target = burst.live_target_of(burst.target)
    assert target is not None
    await eventually(lambda: target.shares is not None)
    assert target.shares is not None
    assert len(target.shares.kept) > 1
    return target


async def test_the_answer_to_a_dissolution_can_be_had_again(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.02)
        target = await _target(burst)
        pair_id = target.assignment.pair_id
        await burst.ends()
        await burst.clean()
        assert target.shares is not None
        again = Dissolve(pair_id=pair_id, claim_id=f"{pair_id}-end", first_serial=0, source_busy_s=0.0)
        subject = subjects.worker_live(process(burst.target.worker_id), "dissolve")
        assert await cluster.client.request(subject, again, Dissolved, timeout_s=RPC_S) == target.shares


async def test_an_instance_that_still_finishes_kept_batches_is_no_source(redis_url: str) -> None:
    async with slow_cluster(redis_url, "stop_the_world") as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.005)
        target = await _parted(burst)
        pairing = burst.target.service.parts.pair_roles
        old = target.assignment
        other = msgspec.structs.replace(
            old,
            pair_id="other",
            source=msgspec.structs.replace(old.target, epoch=0),
            target=msgspec.structs.replace(old.source, epoch=1),
            valid_s=60.0,
        )
        assert pairing.target is target
        await pairing.on_assignment(other, time.monotonic())
        assert pairing.source is None
        await eventually(lambda: any(r.pair_id == "other" and r.outcome == "failed" for r in cluster.live_reports))
        await burst.ends()
        await burst.clean()


async def test_an_engine_that_fails_on_a_kept_batch_ends_its_requests(redis_url: str) -> None:
    async with slow_cluster(redis_url, "stop_the_world") as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.005)
        await eventually(lambda: burst.target.instance is not None)

        def broken(*_: object) -> None:
            raise RuntimeError("the device is gone")

        # This target runs nothing before the pair has parted.
        engine = burst.target.serving.engine.loop.engine
        engine.run_layers = engine.run_part = broken  # type: ignore[method-assign]
        target = await _parted(burst)
        ends = [await cluster.gateway.end_of(request_id) for request_id in burst.prompts]
        failed = [end for end in ends if end.finish_reason == "error"]
        assert target.shares is not None
        assert len(failed) == len(target.shares.kept)
        assert all(end.error is not None and "the device is gone" in end.error.message for end in failed)
        await eventually(lambda: burst.live_target_of(burst.target) is None)


async def test_a_cancel_that_comes_as_the_last_layer_ends_leaves_nothing(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.02, max_tokens=40)
        await _target(burst)
        gateway = cluster.gateway
        for request_id in burst.prompts:
            await asyncio.sleep(0.03)
            await gateway.cancel(burst.source.worker_id, request_id)
            await gateway.cancel(burst.target.worker_id, request_id)
        await cluster.record(burst.plan_id)
        await burst.clean()
