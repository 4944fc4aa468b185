"""A pair of prefill instances and the instance that decodes: each member of the pair sends the layers that it ran, and
any of the three may be lost at any time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest

from services.worker.engine.mock.settings import MockTiming
from services.worker.kv_transfer import decode_client, receiver
from services.worker.kv_transfer.receiver import KvReceiver
from services.worker.kv_transfer.transfer import KvTransfer
from services.worker.live.links import LinkToTarget
from services.worker.live.source import LiveSource
from shared.errors import Conflict
from shared.messages.codec import Message
from shared.messages.disaggregated import DecodeReserved, ReserveDecode
from shared.messages.live import Pulled
from shared.transport.base import Buffer
from shared.transport.tags import Carries, tag_of
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.fakes import outcomes_at
from tests.services.worker.late_workers import also_late
from tests.services.worker.live.burst import LAYER_S, NUM_TOKENS, Burst, live_cluster
from tests.services.workers import RunningWorker
from tests.wait_until import eventually

SLOW = MockTiming(layer_per_token_s=5 * LAYER_S / NUM_TOKENS)
"""There is time to do something to a batch."""
DELAY_S = 0.05


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "ASK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(decode_client, "GONE_S", 0.5)
    monkeypatch.setattr(decode_client, "LEASE_S", 2.0)
    monkeypatch.setattr(decode_client, "RENEW_S", 0.4)
    monkeypatch.setattr(receiver, "MAX_WAIT_S", 0.05)


@contextlib.asynccontextmanager
async def pair_and_decoder(redis_url: str, **worker: object) -> AsyncIterator[Burst]:
    """A burst at a pair of prefill instances. Afterwards nothing is left at those that live."""
    fields: dict[str, object] = {"mock": SLOW, "stall_s": 8.0}
    async with live_cluster(redis_url, num_workers=3, **(fields | worker)) as cluster:
        burst = Burst(cluster)
        yield burst
        for one in cluster.workers.values():
            if not one.task.done() and one.instance is not None:
                parts = one.service.parts
                await eventually(lambda parts=parts: not parts.kv_sender.transfers)
                await eventually(lambda parts=parts: not parts.kv_receiver.reservations)
                await eventually(lambda one=one: one.serving.num_pins == 0)
        await burst.clean()


def transfers_of(worker: RunningWorker) -> Iterable[KvTransfer]:
    return worker.service.parts.kv_sender.transfers.values()


def is_reserved(burst: Burst) -> bool:
    """The target runs layers, and has room for their KV where it is to go."""
    return any(t.is_reserved for t in transfers_of(burst.target))


def is_shared(burst: Burst) -> bool:
    """The source runs the rest of a batch, whose first layers went straight from the target."""
    return any(t.first_layer and t.is_reserved for t in transfers_of(burst.source))


def has_moved(burst: Burst) -> bool:
    """A batch that both ran is decoded."""
    return outcomes_at(burst.source).get("moved", 0) > 0


PHASES = pytest.mark.parametrize("when", [is_reserved, is_shared, has_moved], ids=lambda when: when.__name__)
When = Callable[[Burst], bool]


async def no_wrong_token(burst: Burst) -> None:
    for (request_id, attempt), parts in burst.cluster.gateway.parts.items():
        assert attempt == 1
        tokens = expected_tokens(burst.max_tokens, burst.prompts[request_id])
        for part in parts:
            assert part.token_ids == tokens[part.offset : part.offset + len(part.token_ids)], part


def ended(burst: Burst, *reasons: str) -> int:
    parts = burst.cluster.gateway.parts.values()
    return sum(any(p.finish_reason in reasons for p in stream) for stream in parts)


def left(burst: Burst, outcome: str) -> int:
    return int(sum(outcomes_at(w).get(outcome, 0) for w in (burst.source, burst.target)))


@PHASES
async def test_the_decode_instance_is_killed(redis_url: str, when: When) -> None:
    async with pair_and_decoder(redis_url) as burst:
        killed = list[bool]()
        # No more weights before.
        await burst.start(delay_s=DELAY_S, role="prefill", max_tokens=8, until_split=lambda: killed)
        await eventually(lambda: when(burst))
        await burst.decoder.kill()
        killed.append(True)
        # What it had taken over, or may have, is the gateway's to try again; the pair decodes the others.
        every = len(burst.prompts)
        await eventually(lambda: left(burst, "moved") + left(burst, "unknown") + left(burst, "kept") == every)
        moved, unknown, kept = (left(burst, outcome) for outcome in ("moved", "unknown", "kept"))
        assert kept > 0
        await eventually(lambda: ended(burst, "length") >= kept)
        assert ended(burst, "length") <= kept + moved
        assert ended(burst, "error") == unknown
        await no_wrong_token(burst)


@also_late("drawn")
@PHASES
async def test_the_target_is_killed(redis_url: str, when: When) -> None:
    async with pair_and_decoder(redis_url) as burst:
        killed = list[bool]()
        # No more weights before.
        await burst.start(delay_s=DELAY_S, role="prefill", max_tokens=8, until_split=lambda: killed)
        await eventually(lambda: when(burst))
        live = burst.live_target_of(burst.target)
        assert live is not None
        assert not live.machine.loaded, "a premise: what it finishes would be the gateway's to try again"
        await burst.target.kill()
        killed.append(True)
        await burst.ends()
        await no_wrong_token(burst)
        assert left(burst, "unknown") == 0


@PHASES
async def test_the_source_is_killed(redis_url: str, when: When) -> None:
    async with pair_and_decoder(redis_url, max_queued_requests=64) as burst:
        killed = list[bool]()
        # No more weights before.
        await burst.start(delay_s=DELAY_S, role="prefill", max_tokens=8, until_split=lambda: killed)
        await eventually(lambda: when(burst))
        await burst.source.kill()
        killed.append(True)
        await eventually(lambda: burst.live_target_of(burst.target) is None)
        rooms = burst.decoder.service.parts.kv_receiver.reservations
        await eventually(lambda: not rooms)
        await eventually(lambda: burst.decoder.serving.engine.loop.num_requests == 0)
        await no_wrong_token(burst)


async def test_layers_of_the_target_that_do_not_arrive_are_fetched_from_it(redis_url: str) -> None:
    """The way from the target to the decode instance stalls, that to the source does not."""
    mask = (1 << 61) | (1 << 62)

    def stall(buffer: Buffer, tag: int) -> tuple[Buffer, int]:
        to_decode = tag & mask == tag_of(0, 0, Carries.KV_TO_DECODE) & mask
        return buffer, tag ^ 1 << 59 if to_decode else tag

    async with pair_and_decoder(redis_url, stall_s=5.0) as burst:

        async def before() -> None:
            burst.target.transport.tamper = stall

        await burst.start(delay_s=DELAY_S, role="prefill", max_tokens=8, before=before, until_split=True)
        await burst.ends()
        await eventually(lambda: burst.cluster.live_reports)
        (report,) = burst.cluster.live_reports
        assert report.outcome == "dissolved"
        split = sum(b.num_requests for b in report.batches if b.source_layers and b.target_layers)
        assert split > 0
        await eventually(lambda: outcomes_at(burst.source).get("kept", 0) >= split)


async def test_a_split_that_cannot_be_joined_is_decoded_by_the_source(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_reserve = KvReceiver.on_reserve

    async def refuse(self: KvReceiver, message: ReserveDecode) -> DecodeReserved:
        if message.first_layer:
            raise Conflict("no")
        return await on_reserve(self, message)

    monkeypatch.setattr(KvReceiver, "on_reserve", refuse)
    async with pair_and_decoder(redis_url) as burst:
        await burst.start(delay_s=DELAY_S, role="prefill", max_tokens=8, until_split=True)
        await burst.ends()
        await eventually(lambda: burst.cluster.live_reports)
        (report,) = burst.cluster.live_reports
        assert report.outcome == "dissolved"
        await eventually(lambda: outcomes_at(burst.source).get("kept", 0) > 0)


@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_a_split_that_is_over_before_the_source_has_room_for_it_is_settled(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    on_reserve, ask_pair = KvReceiver.on_reserve, LinkToTarget.ask_pair
    gone: list[str] = []
    until_over: list[asyncio.Task[None]] = []

    async def refuse(self: KvReceiver, message: ReserveDecode) -> DecodeReserved:
        if message.first_layer and how == "refused":
            raise Conflict("no")
        return await on_reserve(self, message)

    monkeypatch.setattr(KvReceiver, "on_reserve", refuse)
    async with pair_and_decoder(redis_url) as burst:

        async def over(full: pytest.MonkeyPatch) -> None:
            try:
                if how == "refused":
                    await eventually(lambda: left(burst, "kept") >= len(gone))
                else:
                    await eventually(lambda: is_shared(burst))
                    for request_id in gone:
                        await burst.cluster.gateway.cancel(burst.source.worker_id, request_id)
                rests = burst.source.service.parts.kv_sender.transfers
                await eventually(lambda: not any((request_id, 1) in rests for request_id in gone))
            finally:
                full.undo()

        async def pull(self: LinkToTarget, *question: Any, **how: Any) -> Message:
            answer: Message = await ask_pair(self, *question, **how)
            source = burst.source.service.parts.pair_roles.source
            if isinstance(answer, Pulled) and answer.kv_direct and not gone and source is not None:
                gone.extend(s.request_id for s in source.batch(answer.batch_id).sequences)
                full = pytest.MonkeyPatch()
                full.setattr(source.instance.engine.loop.scheduler.reservations, "reserve", lambda _: False)
                until_over.append(asyncio.create_task(over(full)))
            return answer

        monkeypatch.setattr(LinkToTarget, "ask_pair", pull)
        await burst.start(delay_s=DELAY_S, role="prefill", max_tokens=8, until_split=lambda: gone)
        await eventually(lambda: until_over)
        await until_over[0]
        await burst.ends(without=tuple(gone) if how == "cancelled" else ())
        await eventually(lambda: burst.cluster.live_reports)
        (report,) = burst.cluster.live_reports
        assert report.outcome == "dissolved"


async def test_without_room_at_the_decode_instance_batches_go_by_the_source(redis_url: str) -> None:
    full = {"max_running_requests": 1}
    async with live_cluster(
        redis_url, num_workers=3, mock=SLOW, stall_s=2.0, each=lambda name: full if name == "w0" else {}
    ) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=DELAY_S, role="prefill", max_tokens=8)
        await burst.ends()
        await burst.clean()


@also_late()
async def test_clients_leave_while_batches_are_split(redis_url: str) -> None:
    async with pair_and_decoder(redis_url) as burst:
        shared: list[bool] = []

        def was_shared() -> list[bool]:
            if not shared and is_shared(burst):
                shared.append(True)
            return shared

        await burst.start(delay_s=DELAY_S, role="prefill", max_tokens=8, until_split=was_shared)
        await eventually(was_shared)
        gone = tuple(list(burst.prompts)[::2])
        for request_id in gone:
            for worker in (burst.source, burst.decoder):
                await burst.cluster.gateway.cancel(worker.worker_id, request_id)
        await burst.ends(without=gone)


async def test_a_batch_that_is_done_before_the_event_loop_hears_of_its_beginning_does_not_hold_the_pair_up(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_on_loop = LiveSource.act_on_loop

    def heard_late(source: LiveSource) -> None:
        asyncio.get_running_loop().call_later(0.1, act_on_loop, source)

    async with pair_and_decoder(redis_url, mock=MockTiming(layer_per_token_s=LAYER_S / NUM_TOKENS)) as burst:
        monkeypatch.setattr(LiveSource, "act_on_loop", heard_late)
        await burst.start(delay_s=DELAY_S, role="prefill")
        for name in burst.prompts:
            end = await burst.cluster.gateway.end_of(name)
            assert end.finish_reason == "length", end
        await eventually(lambda: burst.cluster.live_reports)
        (report,) = burst.cluster.live_reports
        assert report.outcome == "dissolved"
