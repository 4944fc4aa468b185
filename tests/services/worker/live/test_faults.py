"""What becomes of requests when a member of a pair dies, falls silent, or is told to stop."""

from __future__ import annotations

import asyncio
import functools

import msgspec
import pytest

from services.worker.core.live.target import Finish
from services.worker.engine.mock.settings import MockTiming
from services.worker.live.source import LiveSource
from services.worker.requests import inbox
from shared import subjects
from shared.errors import Unavailable
from shared.messages.codec import Message
from shared.messages.live import LiveReport, Taken, WorkerOrder
from tests.processes import process
from tests.services.cluster import Cluster
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.late_workers import also_late
from tests.services.worker.live.burst import NUM_TOKENS, PROMPTS, Burst, live_cluster
from tests.wait_until import eventually

SLOW = MockTiming(layer_per_token_s=0.012 / NUM_TOKENS)
slow_cluster = functools.partial(live_cluster, mock=SLOW)
"""Time enough for something to happen while the pair lasts."""


async def _resubmit(cluster: Cluster, burst: Burst, worker_id: str, instance_id: str) -> None:
    """What a gateway does when the source is lost: the next attempt continues behind the tokens that came."""
    gateway = cluster.gateway
    for request_id, prompt in burst.prompts.items():
        had = _had(cluster, request_id)
        if any(p.finish_reason == "length" for p in gateway.parts.get((request_id, 1), [])):
            continue
        await gateway.submit(
            worker_id, instance_id, request_id, attempt=2, prompt=prompt, output=had, max_tokens=burst.max_tokens
        )
        await gateway.end_of(request_id, attempt=2)
        tokens = had + gateway.tokens(request_id, attempt=2, start=len(had))
        assert tokens == expected_tokens(burst.max_tokens, prompt), request_id


def _had(cluster: Cluster, request_id: str) -> tuple[int, ...]:
    parts = cluster.gateway.parts.get((request_id, 1), [])
    return tuple(t for p in parts for t in p.token_ids)


async def _report(cluster: Cluster) -> LiveReport:
    await eventually(lambda: cluster.live_reports)
    return cluster.live_reports[0]


@also_late("drawn")
async def test_the_target_is_killed(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        killed = list[bool]()
        # No more weights before: what it finishes would be the gateway's to try again.
        await burst.start(delay_s=0.05, until_split=lambda: killed)
        await burst.live_source()
        await burst.target.kill()
        killed.append(True)
        await burst.ends()
        assert (await _report(cluster)).outcome == "failed"
        await burst.clean()


@also_late("copies_last")
async def test_the_source_is_killed(redis_url: str) -> None:
    async with slow_cluster(redis_url, max_queued_requests=64) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.05)
        await burst.live_source()
        await burst.source.kill()
        # The target drops what is not its own, and loads on from its disk.
        await eventually(lambda: burst.live_target_of(burst.target) is None)
        await eventually(lambda: burst.target.instance is not None and burst.target.instance.state == "serving")
        await _resubmit(cluster, burst, burst.target.worker_id, burst.target.serving.instance_id)
        await burst.clean()


@also_late("drawn")
async def test_the_targets_engine_fails(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        failing = list[bool]()
        # No more weights before: it has layers to run.
        await burst.start(delay_s=0.05, until_split=lambda: failing)
        await burst.live_source()
        engine = burst.target.serving.engine.loop.engine

        def broken(activation: object, layer: int, begin: int, end: int) -> None:
            raise RuntimeError("the device is gone")

        engine.run_part = broken  # type: ignore[method-assign]
        failing.append(True)
        await burst.ends()
        report = await _report(cluster)
        assert report.outcome == "failed"
        assert "the device is gone" in report.reason
        await burst.clean()


async def test_the_model_is_removed(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.05)
        await burst.live_source()
        await cluster.remove_model()
        # What was accepted is finished; the target's load is cancelled.
        await burst.ends()
        await eventually(lambda: burst.target.instance is None)
        await eventually(lambda: burst.source.instance is None)


async def test_the_plan_is_superseded(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        published = list[bool]()
        # No more weights before: the target has not loaded.
        await burst.start(delay_s=0.05, until_split=lambda: published)
        await burst.live_source()
        old = cluster.plans()[-1]
        (target,) = old.targets
        member = msgspec.structs.replace(target, instance_id="newer", epoch=target.epoch + 100)
        others = tuple(m for m in old.members if m.worker_id != target.worker_id)
        newer = msgspec.structs.replace(old, plan_id="plan-newer", members=(*others, member))
        subject, order = subjects.worker_plans(process(target.worker_id)), WorkerOrder(scale=newer)
        await cluster.client.publish_event(subject, order, message_id=newer.plan_id)
        published.append(True)
        await burst.ends()
        report = await _report(cluster)
        assert report.outcome == "failed"
        assert "superseded by plan-newer" in report.reason
        await eventually(lambda: burst.target.instance is not None and burst.target.instance.state == "serving")
        assert burst.target.serving.instance_id == "newer"
        await burst.clean()


async def test_the_bus_of_the_target_is_away_for_a_moment(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        is_back = list[bool]()
        # No more weights before: should the pair be lost, the target has finished nothing.
        await burst.start(delay_s=0.05, until_split=lambda: is_back)
        await burst.live_source()
        burst.target.bus.go_down()
        await asyncio.sleep(0.6)
        burst.target.bus.go_up()
        is_back.append(True)
        await burst.ends()
        await burst.clean()


async def test_a_pull_whose_tensors_are_lost_is_computed_again(redis_url: str) -> None:
    async with slow_cluster(redis_url, stall_s=3.0) as cluster:
        burst = Burst(cluster)
        lost: list[int] = []
        await burst.start(delay_s=0.05, until_split=lambda: lost)
        await burst.live_source()
        # Hidden states and KV both: they come under tags that nobody waits for.
        burst.target.transport.tamper = lambda buffer, tag: (lost.append(tag), (buffer, tag ^ 1 << 60))[1]
        await eventually(lambda: lost)
        burst.target.transport.tamper = None
        await burst.ends()
        await burst.clean()


async def test_the_source_is_stopped(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.05)
        await burst.live_source()
        stop = asyncio.create_task(burst.source.stop())
        await burst.ends()
        await stop
        await burst.clean()


@also_late("copies_last")
async def test_the_target_is_stopped(redis_url: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.05)
        await burst.live_source()
        await burst.target.stop()
        await burst.ends()
        await burst.clean()


@pytest.mark.parametrize("next_process", ["", "2"])
async def test_a_dead_gateways_requests_are_freed_at_both(redis_url: str, next_process: str) -> None:
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        cluster.gateway.incarnation = "1"
        await burst.start(delay_s=0.05)
        await burst.live_source()
        if next_process:
            cluster.gateway.incarnation = next_process
            await cluster.gateway.beat(60.0)
        else:
            await cluster.gateway.beat(0.2)
        await eventually(lambda: burst.source.serving.engine.loop.scheduler.num_requests == 0)
        await cluster.record(burst.plan_id)
        await burst.clean()


async def test_a_question_about_a_request_that_moved_is_answered_by_its_owner(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "OWNER_TIMEOUT_S", 60.0)
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.02, max_tokens=60)
        gateway = cluster.gateway
        owner_of, attempt = burst.source.service.parts.inbox.new_owners.owner_of, 1
        await eventually(lambda: any(owner_of((r, attempt)) for r in burst.prompts))
        request_id = next(r for r in burst.prompts if owner_of((r, attempt)))
        await eventually(lambda: len(_had(cluster, request_id)) > 3)
        before = len(gateway.batches)
        await gateway.resend(burst.source.worker_id, request_id, attempt=attempt, offset=0)
        await eventually(
            lambda: any(
                p.request_id == request_id and p.offset == 0 and len(p.token_ids) > 1
                for b in gateway.batches[before:]
                for p in b.parts
            )
        )
        sent_by = {b.worker_id for b in gateway.batches for p in b.parts if p.request_id == request_id and p.token_ids}
        assert sent_by == {burst.target.worker_id}
        await gateway.cancel(burst.source.worker_id, request_id)
        for other in PROMPTS:
            await gateway.cancel(burst.source.worker_id, other)
        await burst.clean()


async def test_a_loaded_target_that_is_cut_off_leaves_no_attempt_with_two_owners(redis_url: str) -> None:
    async with live_cluster(redis_url, mock=MockTiming(layer_per_token_s=0.05 / NUM_TOKENS)) as cluster:
        burst, gateway = Burst(cluster), cluster.gateway
        await burst.start(delay_s=0.01, max_tokens=3)
        source = await burst.live_source()
        await eventually(lambda: source.machine.target_loaded)
        assert len(source.machine.handed) > 2
        burst.target.bus.go_down()  # it computes on, and nobody can ask it what
        assert (await _report(cluster)).outcome == "failed"
        burst.target.bus.go_up()
        ends = {request_id: await gateway.end_of(request_id) for request_id in burst.prompts}
        lost = [request_id for request_id, end in ends.items() if end.finish_reason == "error"]
        assert lost
        assert {ends[r].error.code for r in lost if ends[r].error is not None} == {"unavailable"}
        for request_id in lost:
            # As a gateway does: the next attempt goes on behind the tokens that came.
            had = _had(cluster, request_id)
            await gateway.submit(
                *(burst.source.worker_id, burst.source_instance_id, request_id),
                attempt=2,
                prompt=burst.prompts[request_id],
                output=had,
                max_tokens=burst.max_tokens,
            )
            await gateway.end_of(request_id, attempt=2)
            tokens = had + gateway.tokens(request_id, attempt=2, start=len(had))
            assert tokens == expected_tokens(burst.max_tokens, burst.prompts[request_id])
        await burst.clean()
        senders: dict[tuple[str, int], set[str]] = {}
        for batch in gateway.batches:
            for part in batch.parts:
                if part.token_ids:
                    senders.setdefault((part.request_id, part.attempt), set()).add(batch.worker_id)
        assert {key: workers for key, workers in senders.items() if len(workers) > 1} == {}


async def test_a_target_finishes_nothing_before_the_source_knows_that_it_can(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, asked, deaf = LiveSource.on_taken, asyncio.Event(), True

    async def on_taken(source: LiveSource, message: Taken) -> Message:
        asked.set()
        if deaf:
            raise Unavailable("not now")
        return await taken(source, message)

    monkeypatch.setattr(LiveSource, "on_taken", on_taken)
    async with slow_cluster(redis_url) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.01)
        await eventually(asked.is_set)
        target = burst.live_target_of(burst.target)
        assert target is not None
        assert target.machine.loaded
        await eventually(lambda: not target.ready)  # all that may be run was
        assert not any(isinstance(getattr(event, "action", None), Finish) for _, event in list(target.machine.log))
        deaf = False
        await burst.ends()
        await burst.clean()
