"""The prefill side's client to the worker that is to decode a request: asked until it answers, or is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

import msgspec

from services.worker.core.kv_admission import room
from services.worker.core.scheduling.schedule import Sampled
from services.worker.kv_transfer.transfer import Chunk, DecodeRefused, KvTransfer
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, DeadlineExceeded, NoResponder, Overloaded, Unavailable
from shared.messages.codec import Message
from shared.messages.common import Ack
from shared.messages.disaggregated import (
    BeginDecode,
    DecodeReserved,
    DecodeRoom,
    ReleaseDecode,
    RenewDecode,
    ReserveDecode,
)
from shared.messages.registry import WorkerInfo

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 1.5
GONE_S = 1.0
"""No process answers to the decode worker's name, and a reconnection would have come by now."""
LEASE_S = 10.0
RENEW_S = 3.0

M = TypeVar("M", bound=Message)


class DecodeClient:
    """For one request. Event loop only. All but ``release`` raise ``RequestEnded`` and ``DecodeRefused``."""

    def __init__(self, bus: Bus, me: WorkerInfo, transfer: KvTransfer, *, silence_s: float) -> None:
        """``silence_s``: a worker that answers nothing, or takes no KV, for so long is gone."""
        self._bus = bus
        self._me = me
        self._transfer = transfer
        self._worker = transfer.place.worker
        self._key = (transfer.request.request_id, transfer.request.attempt)
        self._silence_s = silence_s
        self._may_be_heard = False
        """A question was not answered that may have arrived."""

    async def reserve(self, *, waits: bool = True) -> DecodeReserved:
        """Ask until the decode instance has the capacity. ``waits``: otherwise one that has none now is refused."""
        transfer = self._transfer
        message = ReserveDecode(
            request=transfer.request,
            worker_id=self._me.worker_id,
            host=self._me.host,
            transport_address=self._me.transport_address,
            lease_s=LEASE_S,
            context_tokens=transfer.context_tokens,
            chunk_tokens=transfer.chunk_tokens,
            first_layer=transfer.first_layer,
        )
        pauses = room.pauses(random.uniform)
        while True:
            try:
                return await self._ask("reserve", message, DecodeReserved, time.monotonic(), pauses)
            except DecodeRefused as why:
                computed_at_s = None if transfer.token is None else transfer.computed_at_s
                goes_on = waits and room.is_asked_again(computed_at_s, time.monotonic())
                if not isinstance(why.__cause__, Overloaded) or not goes_on:
                    raise
            await transfer.pause(next(pauses))

    @contextlib.asynccontextmanager
    async def kept(self, reserved: DecodeReserved) -> AsyncIterator[None]:
        """Renew the reservation in the meantime."""
        renewing = asyncio.create_task(self._renew(reserved.ticket))
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})

    async def _renew(self, ticket: int) -> None:
        message = self._renewal(ticket)
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._bus.request(self._subject("renew"), message, DecodeRoom, timeout_s=ASK_TIMEOUT_S)
            except (Unavailable, DeadlineExceeded) as error:
                log.debug("the reservation at %s was not renewed: %s", self._worker, error)
            except BlitzError as error:
                self._transfer.lose(str(error))
                return

    async def announce(self, ticket: int, chunk: Chunk) -> None:
        """The chunk's KV is next: receives for it are posted as far as the window goes when this returns."""
        message = msgspec.structs.replace(
            self._renewal(ticket),
            chunk_start=chunk.start,
            chunk_end=chunk.end,
            more_token_ids=self._transfer.more_token_ids,
        )
        await self._ask("renew", message, DecodeRoom, time.monotonic())

    async def until_here(self, ticket: int, num_layers: int) -> int:
        """Ask until so many layers of KV are there, counted over the chunks; how many there are."""
        here, moved_at_s = -1, time.monotonic()
        message = self._renewal(ticket, num_layers)
        while True:
            arrived = await self._ask("renew", message, DecodeRoom, moved_at_s)
            if arrived.layers_here >= num_layers:
                return arrived.layers_here
            if arrived.layers_here > here:
                here, moved_at_s = arrived.layers_here, time.monotonic()
            if time.monotonic() - moved_at_s > self._silence_s:
                raise DecodeRefused(f"its KV does not arrive: {here} layers in {self._silence_s:g} s")

    def _renewal(self, ticket: int, num_layers: int = 0) -> RenewDecode:
        return RenewDecode(request_id=self._key[0], attempt=self._key[1], ticket=ticket, wait_layers=num_layers)

    async def begin(self, token: Sampled) -> None:
        """The decode instance, which has all KV, takes the request over. Raises ``Unavailable`` if it may have done so,
        and cannot be asked."""
        self._transfer.check()  # nothing is asked for that is not wanted
        message = BeginDecode(
            request_id=self._key[0], attempt=self._key[1], token_id=token.token_id, logprobs=token.logprobs
        )
        self._may_be_heard = False
        try:
            await self._ask("begin", message, Ack, time.monotonic())
        except DecodeRefused as why:
            if self._may_be_heard and isinstance(why.__cause__, (Unavailable, DeadlineExceeded)):
                raise Unavailable(f"the decode instance does not answer: {why}") from why
            raise

    async def release(self) -> None:
        """The request will not come, or has ended after all."""
        # The source of a pair also gives up what the target reserved for it.
        whose = "" if self._transfer.first_layer else self._me.worker_id
        message = ReleaseDecode(request_id=self._key[0], attempt=self._key[1], worker_id=whose)
        with contextlib.suppress(BlitzError):  # the reservation lapses by itself
            await self._bus.request(self._subject("release"), message, Ack, timeout_s=ASK_TIMEOUT_S)

    def _subject(self, operation: str) -> str:
        return subjects.worker_decode(self._worker, operation)

    async def _ask(
        self, operation: str, message: Message, answer: type[M], since_s: float, pauses: Iterator[float] | None = None
    ) -> M:
        """Ask until there is an answer. ``since_s``: as of when silence counts."""
        while True:
            asking = self._bus.request(self._subject(operation), message, answer, timeout_s=ASK_TIMEOUT_S)
            try:
                return await self._transfer.unless_over(asking)
            except (Unavailable, DeadlineExceeded) as error:
                self._may_be_heard = self._may_be_heard or not isinstance(error, NoResponder)
                self._judge(error, since_s)
            except BlitzError as error:
                raise DecodeRefused(str(error)) from error
            await self._transfer.pause(room.RETRY_S if pauses is None else next(pauses))

    def _judge(self, error: BlitzError, asked_since_s: float) -> None:
        """Raises ``DecodeRefused`` if the decode worker is gone by all that is known."""
        connected_since_s = self._bus.connected_since_s
        if connected_since_s is None:
            return  # it is our own bus that is away
        asked_s = time.monotonic() - max(asked_since_s, connected_since_s)
        if asked_s > (GONE_S if isinstance(error, NoResponder) else self._silence_s):
            raise DecodeRefused(f"nobody answers for {asked_s:.1f} s: {error}") from error
