"""The other side of one worker: a prefill worker that computes KV by hand, a decode worker that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.mock.tokens import next_token
from services.worker.kv_transfer.incoming import kv_tag
from shared import subjects
from shared.messages.common import Ack
from shared.messages.disaggregated import (
    BeginDecode,
    DecodeReserved,
    DecodeRoom,
    ReleaseDecode,
    RenewDecode,
    ReserveDecode,
)
from shared.messages.generation import DecodePlace, SamplingParams, Submit, TokenLogprobs
from shared.transport.base import Transfer
from tests.processes import INCARNATION, process
from tests.services.worker.engine.batches import forward, slice_of
from tests.services.worker.lone_worker import LoneWorker
from tests.services.workers import RunningWorker
from tests.wait_until import eventually

PROMPT = tuple(32 + (5 * j) % 90 for j in range(100))
"""Two chunks of a worker's usual 64 tokens."""
ASK_S = 60.0
ROOM_WAIT_S = 0.1


class FakePrefill:
    """Asks a real worker (``alone``) to decode."""

    def __init__(self, alone: LoneWorker, instance_id: str, *, name: str = "prefill") -> None:
        self.bus = alone.broker.bus(name)
        self.transport = alone.fabric.start(name=name)
        self._instance_id = instance_id
        self._alone = alone

    def request(
        self,
        request_id: str = "r",
        *,
        attempt: int = 1,
        prompt: tuple[int, ...] = PROMPT,
        output: tuple[int, ...] = (),
        max_tokens: int = 8,
        **changes: object,
    ) -> Submit:
        request = Submit(
            request_id=request_id,
            attempt=attempt,
            gateway_id=self._alone.gateway.gateway_id,
            instance_id=self._instance_id,
            model="m",
            model_hash=self._alone.model.model_hash,
            prompt_token_ids=prompt,
            output_token_ids=output,
            sampling=SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0),
            gateway_incarnation="1",
        )
        return msgspec.structs.replace(request, **changes)

    async def reserve(
        self, request: Submit, *, lease_s: float = 600.0, chunk_tokens: int = 0, first_layer: int = 0
    ) -> DecodeReserved:
        message = ReserveDecode(
            request=request,
            worker_id=self.bus.name,
            host=f"host-of-{self.bus.name}",
            transport_address=self.transport.address,
            lease_s=lease_s,
            chunk_tokens=chunk_tokens,
            first_layer=first_layer,
        )
        return await self.bus.request(self._subject("reserve"), message, DecodeReserved, timeout_s=ASK_S)

    def kv(self, request: Submit, *, start: int = 0) -> list[np.ndarray]:
        """Of every layer, from a token on."""
        there = self._alone.worker.serving.engine.loop.engine
        tokens = (*request.prompt_token_ids, *request.output_token_ids)
        engine = MockEngine(
            num_layers=there.num_layers,
            num_blocks=64,
            block_size=16,
            kv_bytes_per_token_layer=there.kv_bytes_per_token_layer,
        )
        blocks = tuple(range(-(-len(tokens) // 16)))
        activation = engine.embed(forward(slice_of(0, tokens, 0, blocks, True)))
        engine.run_layers(activation, 0, there.num_layers).result()
        kv = engine.export_kv([blocks], [len(tokens)], there.num_layers, first_tokens=[start]).result()
        return np.split(np.frombuffer(kv, dtype=np.uint8).copy(), there.num_layers)

    async def send(self, reserved: DecodeReserved, layers: dict[int, np.ndarray]) -> list[Transfer]:
        channel = await self.transport.connect(reserved.transport_address, same_host=False, lane=1)
        return [channel.send(kv, kv_tag(reserved.ticket, layer)) for layer, kv in layers.items()]

    async def send_all(self, reserved: DecodeReserved, request: Submit) -> None:
        """Every layer of what is not held there; when this returns, all have arrived."""
        layers = dict(enumerate(self.kv(request, start=reserved.held_tokens)))
        await self.send(reserved, layers)
        while await self.renew(request, reserved, wait_layers=len(layers)) < len(layers):
            pass

    async def renew(self, request: Submit, reserved: DecodeReserved, *, wait_layers: int = 0) -> int:
        """How many layers are there."""
        message = RenewDecode(
            request_id=request.request_id, attempt=request.attempt, ticket=reserved.ticket, wait_layers=wait_layers
        )
        room = await self.bus.request(self._subject("renew"), message, DecodeRoom, timeout_s=ASK_S)
        return room.layers_here

    async def announce(
        self, request: Submit, reserved: DecodeReserved, start: int, end: int, *, more: tuple[int, ...] = ()
    ) -> None:
        """A chunk is next. ``more``: the context has grown by these."""
        message = RenewDecode(
            request_id=request.request_id,
            attempt=request.attempt,
            ticket=reserved.ticket,
            chunk_start=start,
            chunk_end=end,
            more_token_ids=more,
        )
        await self.bus.request(self._subject("renew"), message, DecodeRoom, timeout_s=ASK_S)

    async def arrive(self, request: Submit) -> DecodeReserved:
        """Reserve room for a request and send its KV: it can begin."""
        reserved = await self.reserve(request)
        await self.send_all(reserved, request)
        return reserved

    async def begin(
        self, request: Submit, *, token_id: int | None = None, logprobs: TokenLogprobs | None = None
    ) -> Ack:
        if token_id is None:
            token_id = next_token((*request.prompt_token_ids, *request.output_token_ids))
        message = BeginDecode(
            request_id=request.request_id, attempt=request.attempt, token_id=token_id, logprobs=logprobs
        )
        return await self.bus.request(self._subject("begin"), message, Ack, timeout_s=ASK_S)

    async def release(self, request: Submit) -> Ack:
        message = ReleaseDecode(request_id=request.request_id, attempt=request.attempt, worker_id=self.bus.name)
        return await self.bus.request(self._subject("release"), message, Ack, timeout_s=ASK_S)

    async def close(self) -> None:
        await self.bus.close()
        await self.transport.close()

    def _subject(self, operation: str) -> str:
        return subjects.worker_decode(process(self._alone.worker.worker_id), operation)


async def clean(alone: LoneWorker) -> None:
    """Nothing is left at the worker: no request, no block, no reservation, no transfer."""
    worker = alone.worker
    engine = worker.serving.engine
    await eventually(
        lambda: not worker.service.parts.kv_receiver.reservations and not worker.service.parts.kv_sender.transfers
    )

    async def empty() -> bool:
        def state(loop) -> tuple[int, int, int, int]:  # type: ignore[no-untyped-def]
            loop.scheduler.check()
            scheduler, held = loop.scheduler, loop.scheduler.reservations
            return loop.num_requests, scheduler.pool.num_used, len(held.for_prefill), len(held.for_decode)

        return await asyncio.wrap_future(engine.call(state)) == (0, 0, 0, 0)

    await eventually(empty)
    assert worker.serving.num_pins == 0, "an instance that drains would wait for ever"


class FakeDecode:
    """A decode worker for a real one (``alone``) that computes prompts. Replace a handler, and it answers otherwise."""

    def __init__(self, alone: LoneWorker, worker_id: str = "w1") -> None:
        self.worker_id = worker_id
        self.bus = alone.broker.bus(worker_id)
        self.transport = alone.fabric.start(name=worker_id)
        self.place = DecodePlace(worker_id=worker_id, incarnation=INCARNATION, instance_id=f"instance-of-{worker_id}")
        self.said: list[str] = []
        """What it was asked: reserve, begin, release. Not how often it was asked to keep room."""
        self.window_layers = 8
        self.held_tokens = 0
        self.reserves: list[ReserveDecode] = []
        self.renews: list[RenewDecode] = []
        self.begins: list[BeginDecode] = []
        self.releases: list[ReleaseDecode] = []
        self.on_reserve: Callable[[ReserveDecode], Awaitable[DecodeReserved]] = self.reserved
        self.on_renew: Callable[[RenewDecode], Awaitable[DecodeRoom]] = self.room
        self.on_begin: Callable[[BeginDecode], Awaitable[Ack]] = self.ack
        self._alone = alone
        self._tickets: dict[tuple[str, int], int] = {}
        self.chunks: dict[int, list[tuple[int, int]]] = {}
        """By ticket: first and last token."""
        self.layers: dict[int, list[np.ndarray]] = {}
        """What was sent under a ticket, by chunks and their layers."""
        self.transfers: dict[int, list[Transfer]] = {}
        """By ticket, a receive for every layer."""

    async def start(self) -> None:
        name = self.worker_id
        await self.bus.respond(subjects.worker_decode(process(name), "reserve"), ReserveDecode, self._reserve)
        await self.bus.respond(subjects.worker_decode(process(name), "renew"), RenewDecode, self._renew)
        await self.bus.respond(subjects.worker_decode(process(name), "begin"), BeginDecode, self._begin)
        await self.bus.respond(subjects.worker_decode(process(name), "release"), ReleaseDecode, self._release)

    async def close(self) -> None:
        """Whoever waits for an answer gets none."""
        for responder in self.bus.broker.responders:
            if responder.bus is self.bus:
                responder.cancel_answers()
        await self.bus.close()
        await self.transport.close()

    async def _reserve(self, message: ReserveDecode) -> DecodeReserved:
        self.said.append("reserve")
        self.reserves.append(message)
        return await self.on_reserve(message)

    async def _renew(self, message: RenewDecode) -> DecodeRoom:
        self.renews.append(message)
        return await self.on_renew(message)

    async def _begin(self, message: BeginDecode) -> Ack:
        self.said.append("begin")
        self.begins.append(message)
        return await self.on_begin(message)

    async def _release(self, message: ReleaseDecode) -> Ack:
        self.said.append("release")
        self.releases.append(message)
        return Ack()

    async def reserved(self, message: ReserveDecode) -> DecodeReserved:
        """There is room, and a receive for every layer is posted."""
        request = message.request
        key = request.request_id, request.attempt
        if key not in self._tickets:
            ticket = self._tickets[key] = len(self._tickets)
            self.chunks[ticket], self.layers[ticket], self.transfers[ticket] = [], [], []
            if not message.chunk_tokens:
                self.expect(ticket, self.held_tokens, len(request.prompt_token_ids) + len(request.output_token_ids))
        return self.answer(self._tickets[key])

    def expect(self, ticket: int, start: int, end: int) -> None:
        """Post receives for a chunk, unless it is known."""
        if (start, end) in self.chunks[ticket]:
            return
        self.chunks[ticket].append((start, end))
        engine, layers = self._alone.worker.serving.engine.loop.engine, self.layers[ticket]
        for _ in range(engine.num_layers):
            kv = np.zeros((end - start) * engine.kv_bytes_per_token_layer, dtype=np.uint8)
            self.transfers[ticket].append(self.transport.recv(kv, kv_tag(ticket, len(layers))))
            layers.append(kv)

    def kv(self, ticket: int) -> list[np.ndarray]:
        """What was sent under a ticket, by layers: that of the chunks put together."""
        num_layers = self._alone.worker.serving.engine.loop.engine.num_layers
        rows = [self.layers[ticket][layer::num_layers] for layer in range(num_layers)]
        halves = [[kv.reshape(2, -1) for kv in row] for row in rows]
        return [np.concatenate(row, axis=1).reshape(-1) for row in halves]

    def answer(self, ticket: int = 0, *, transport_address: bytes | None = None) -> DecodeReserved:
        """Room under this ticket, whether or not anything is received under it."""
        address = self.transport.address if transport_address is None else transport_address
        return DecodeReserved(
            ticket=ticket,
            host=f"host-of-{self.worker_id}",
            transport_address=address,
            window_layers=self.window_layers,
            held_tokens=self.held_tokens,
        )

    async def no_receives(self, _: ReserveDecode) -> DecodeReserved:
        """There is room, and nothing that is sent arrives."""
        return self.answer()

    def layers_here(self, ticket: int) -> int:
        """Of a ticket, those from the first one on that are there."""
        transfers = self.transfers.get(ticket, [])
        return next((i for i, transfer in enumerate(transfers) if not transfer.done), len(transfers))

    async def room(self, message: RenewDecode) -> DecodeRoom:
        """It is kept."""
        if message.chunk_end and message.ticket in self.chunks:
            self.expect(message.ticket, message.chunk_start, message.chunk_end)
        with contextlib.suppress(AssertionError):  # not yet: it asks again
            await eventually(lambda: self.layers_here(message.ticket) >= message.wait_layers, ROOM_WAIT_S)
        return DecodeRoom(layers_here=self.layers_here(message.ticket))

    async def ack(self, _: BeginDecode) -> Ack:
        return Ack()


def outcomes_at(worker: RunningWorker) -> dict[str, float]:
    """What became of the requests that were to leave, as this worker counts it."""
    samples = [s for metric in worker.metrics.collect() for s in metric.samples]
    return {s.labels["outcome"]: s.value for s in samples if s.name == "blitz_worker_departures_total"}


def outcomes(alone: LoneWorker) -> dict[str, float]:
    return outcomes_at(alone.worker)
