"""A process that holds a model's weights on the same device, and a copy that is fetched from it: by the product's data
plane, with its pieces, windows and checksums, and without a bus."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bench.gpu.engines import EnginePlace, PlaceKind, place_of, random_arena
from services.worker.memory.arena import Arena
from services.worker.memory.pieces import Pieces, cut, wanted_bits, wanted_pieces
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.flow import Inflow, Outflow
from services.worker.weights.flow_completion import FlowCompletion, ends_soon
from shared.layout import ArenaLayout
from shared.model_spec import ModelSpec
from shared.transport.base import Channel
from shared.transport.ucx import UcxTransport
from shared.unit_digests import unit_digest

SILENCE_S = 20.0
"""What was asked for comes within it."""


@dataclass(frozen=True, slots=True)
class FeedOrder:
    """What a holder is to send."""

    epoch: int
    attempt: int
    chunk_bytes: int
    wanted: bytes
    """``wanted_bits``."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a holder says of itself."""

    address: bytes
    digests: str


def transport_on(place: EnginePlace, name: str) -> UcxTransport:
    """As a worker of that device has it. Raises ``TransportError`` where there is no UCX."""
    return UcxTransport(name=name, enter=place.device.enter if place.kind == "cuda" else None)


def whole_copy(layout: ArenaLayout, arena: Arena, checksums: list[tuple[int, ...]]) -> WeightCopy:
    """Of weights that lie in the arena, with the checksums that they have."""
    copy = WeightCopy(layout, arena, "".join(map(unit_digest, checksums)))
    for unit, declared in enumerate(checksums):
        copy.declare(unit, declared)
    for piece in cut(layout, 64 << 20):
        copy.arrived(piece)
    return copy


def hold(pipe: Connection, kind: PlaceKind, folder: Path, spec: ModelSpec, seed: int) -> None:
    """In a process of its own: answers with what it holds, is told the receiver's address, and follows orders."""
    try:
        asyncio.run(_hold(pipe, place_of(kind, folder), spec, seed))
    except (EOFError, ConnectionError):  # the row is over
        return
    except Exception as error:  # noqa: BLE001 - the receiver reports it
        pipe.send(error)


async def _hold(pipe: Connection, place: EnginePlace, spec: ModelSpec, seed: int) -> None:
    layout, arena = random_arena(spec, place, seed=seed)
    copy = whole_copy(layout, arena, [arena.unit_checksums(unit) for unit in layout.units])
    transport = transport_on(place, f"holder-{os.getpid()}")
    pipe.send(Held(transport.address, copy.digests))
    channel = await transport.connect(await asyncio.to_thread(pipe.recv), same_host=True)
    while True:
        order: FeedOrder = await asyncio.to_thread(pipe.recv)
        pieces = wanted_pieces(cut(layout, order.chunk_bytes), order.wanted)
        completion = FlowCompletion()
        flow = Outflow(channel, copy, pieces, order.epoch, order.attempt, completion.succeed, completion.fail)
        flow.start()
        await completion.done
        flow.stop_listening()
        pipe.send("sent")


class FetchedCopy:
    """A copy on its way here. Event loop only."""

    def __init__(self, layout: ArenaLayout, arena: Arena, digests: str, transport: UcxTransport) -> None:
        self.copy = WeightCopy(layout, arena, digests)
        self._transport = transport
        self.flow: Inflow | None = None
        self.num_bad = 0
        """Blocks that are not what they should be."""

    @property
    def num_bytes(self) -> int:
        """That have come, of the newest flow."""
        return 0 if self.flow is None else self.flow.moved_bytes

    def missing(self, chunk_bytes: int) -> Pieces:
        """That are not here yet."""
        return self.copy.missing(cut(self.copy.layout, chunk_bytes))

    async def fetch(
        self,
        source: Channel,
        pieces: Pieces,
        order: Callable[[FeedOrder], None],
        *,
        epoch: int,
        attempt: int = 0,
        on_first: Callable[[], None] = lambda: None,
    ) -> float:
        """Seconds until these pieces are here, and the units that they made whole were verified. ``order``: has the
        holder at the other end of ``source`` send them. ``on_first``: on the transport's thread, as the first one has
        come. Raises why they do not come."""
        loop, completion = asyncio.get_running_loop(), FlowCompletion()
        whole: asyncio.Queue[int | None] = asyncio.Queue()
        flow = self.flow = Inflow(
            self._transport,
            source,
            self.copy,
            pieces,
            epoch,
            attempt,
            on_first,
            lambda unit: _call(loop, whole.put_nowait, unit),
            completion.succeed,
            completion.fail,
        )
        begin_s = time.perf_counter()
        verifying = asyncio.create_task(self._verify(whole))
        flow.start()
        order(FeedOrder(epoch, attempt, pieces.chunk_bytes, wanted_bits(pieces)))
        try:
            if not await completion.within(SILENCE_S):
                raise TimeoutError(f"{flow.moved_bytes} bytes had come after {SILENCE_S:g} s")
        finally:
            whole.put_nowait(None)
            await verifying
        return time.perf_counter() - begin_s

    async def _verify(self, whole: asyncio.Queue[int | None]) -> None:
        while (unit := await whole.get()) is not None:
            self.num_bad += len(await asyncio.to_thread(self.copy.bad_ranges, unit))

    async def give_up(self) -> bool:
        """Of a flow that failed: whether nothing of it is in flight any more, soon."""
        flow = self.flow
        if flow is None:
            return True
        flow.abort()
        return await ends_soon(lambda: flow.quiet)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[int], None], unit: int) -> None:
    loop.call_soon_threadsafe(function, unit)
