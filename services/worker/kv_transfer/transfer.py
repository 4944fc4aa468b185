"""One request on its way from the instance that computes its prompt to the one that decodes it: what is known of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence, submit_of
from services.worker.instance.instance import Instance
from shared.aio import Wakeup
from shared.messages.generation import DecodePlace, Submit

LOOK_S = 0.25
"""The engine's word that a request has ended is seen at the latest by then."""

T = TypeVar("T")


class Chunk(NamedTuple):
    """Tokens ``start <= i < end`` of a context, computed together."""

    start: int
    end: int


class RequestEnded(Exception):
    """The request has ended, or no client waits for it any more."""


class DecodeRefused(Exception):
    """The decode instance does not take this request, or is gone: it can be decoded here."""


class StaysHere(DecodeRefused):
    """It can be decoded here for a reason of this side's: the decode instance has refused nothing."""


class KvTransfer:
    """Event loop only."""

    def __init__(
        self,
        sequence: ActiveSequence,
        num_tokens: int,
        place: DecodePlace,
        instance: Instance,
        *,
        chunk_tokens: int = 0,
        first_layer: int = 0,
    ) -> None:
        """``num_tokens``: of its context; the sequence may have its first token already. ``chunk_tokens``: its KV
        leaves in chunks of at most so many tokens, as they are computed; 0: in one."""
        self.sequence = sequence
        self.place = place
        self.instance = instance
        request = submit_of(sequence, place.instance_id, instance.record.name, instance.record.model_hash)
        output = request.output_token_ids[: num_tokens - len(sequence.prompt)]
        self.request: Submit = msgspec.structs.replace(request, output_token_ids=output, decode_at=None)
        self.num_tokens = num_tokens
        self.chunk_tokens = chunk_tokens
        self.context_tokens = 0
        """As in ``ReserveDecode``."""
        self.first_layer = first_layer
        self.last_layer = instance.layout.num_layers
        """Its KV leaves from here of layers ``first_layer <= i < last_layer``: the other member of a pair sends the
        rest."""
        self.block_table: Sequence[int] = ()
        self.chunk = Chunk(0, 0)
        """The one that was computed last."""
        self._layers_done = 0
        """Of this chunk; what is before it has all."""
        self.more_token_ids: tuple[int, ...] = ()
        """What the context has grown by since the decode instance was asked to reserve it."""
        self.token: Sampled | None = None
        self.computed_at_s = 0.0
        """In monotonic time, once there is a token."""
        self.is_reserved = False
        """The decode instance has room for it, and it has not been given up."""
        self.is_forgotten = False
        """What becomes of it is decided elsewhere."""
        self._wanted = True
        self._lost = ""
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done as soon as there is a reason to stop that the event loop knows."""
        self._changed = Wakeup()

    def ran_layers(self, block_table: Sequence[int], chunk: Chunk, num_layers: int) -> None:
        """The KV of so many layers of a chunk lies in these blocks. A context that was preempted begins anew, in
        others."""
        if chunk == self.chunk and block_table is self.block_table and num_layers <= self._layers_done:
            return  # a step that failed is run again
        self.block_table, self.chunk, self._layers_done = block_table, chunk, num_layers
        self._changed.fire()

    def computed(self, block_table: Sequence[int], token: Sampled) -> None:
        """The prompt is computed; the request is held, or has ended."""
        self.token, self.computed_at_s = token, time.monotonic()
        self.ran_layers(block_table, Chunk(0, self.num_tokens), self.last_layer)
        self._changed.fire()

    def grew(self, token_ids: tuple[int, ...], token: Sampled) -> None:
        """A request that moves while it is decoded is held: its context is longer by so much, all computed, and
        ``token`` is behind it."""
        start, self.more_token_ids = self.num_tokens, token_ids
        self.num_tokens += len(token_ids)
        self.token, self.computed_at_s = token, time.monotonic()
        if token_ids:
            self.ran_layers(self.block_table, Chunk(start, self.num_tokens), self.last_layer)

    def lies_in(self, block_table: Sequence[int]) -> bool:
        """These blocks are the request's still: it was not preempted. To be asked after reading from them."""
        return self.sequence.block_table is block_table

    def layers_of(self, num_tokens: int) -> int:
        """How many layers have KV here of so many tokens of the context."""
        if not self.lies_in(self.block_table) or num_tokens > self.chunk.end:
            return 0
        return self.last_layer if num_tokens <= self.chunk.start else min(self._layers_done, self.last_layer)

    def leave_to_other(self, layer: int) -> None:
        """The other member of a pair computes the layers from this one on, and sends them."""
        self.last_layer = layer
        self._changed.fire()

    @property
    def is_shared(self) -> bool:
        """The other member computes the rest, and says when it begins."""
        return self.last_layer < self.instance.layout.num_layers

    def unwanted(self) -> None:
        """Its client has left, or it is the other member's alone."""
        self._wanted = False
        self._halt()

    def lose(self, reason: str) -> None:
        """The decode instance has no reservation for it any more."""
        self._lost = reason
        self._halt()

    def _halt(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)
        self._changed.fire()

    @property
    def is_over(self) -> bool:
        return self.sequence.finished or not self._wanted

    def check(self) -> None:
        """Raises ``RequestEnded`` or ``DecodeRefused``."""
        if self.is_over:
            raise RequestEnded
        if self._lost:
            raise DecodeRefused(self._lost)

    async def unless_over(self, work: Awaitable[T]) -> T:
        """The result of ``work``. Raises ``RequestEnded`` or ``DecodeRefused`` as soon as that is known, and cancels
        ``work``."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._stop}
        try:
            while True:
                await asyncio.wait(either, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                self.check()
                if task.done():
                    return task.result()
        finally:
            task.cancel()

    async def pause(self, seconds: float) -> None:
        """Raises ``RequestEnded`` or ``DecodeRefused``."""
        await self.unless_over(asyncio.sleep(seconds))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Raises ``RequestEnded`` or ``DecodeRefused``."""
        self.check()
        while not condition():
            await self._changed.wait(LOOK_S)
            self.check()

    async def until_computed(self) -> Sampled:
        """The first token. Raises ``RequestEnded``, whatever the decode instance does."""
        while self.token is None and not self.is_over:
            await self._changed.wait(LOOK_S)
        if self.token is None or self.is_over:
            raise RequestEnded
        return self.token
