"""KV from blocks into blocks: never more on its way than there is memory for, and nothing written after the end."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from services.worker.core.kv_admission import staging
from services.worker.device.completion import Completion, Landed, Pending
from services.worker.device.device import Way
from services.worker.device.host import HOST, HostDevice
from services.worker.engine.base import Engine
from services.worker.engine.handoff import slots_of
from services.worker.kv_transfer.connector import KvConnector, KvInflow, KvOutflow, KvRange
from shared.errors import DeadlineExceeded, TransferAborted, TransportError, Unavailable
from shared.transport.base import Buffer
from tests.shared.transport.memory import MemoryFabric, MemoryTransport
from tests.wait_until import eventually

LAYERS, BLOCKS, BLOCK_SIZE, TOKEN_BYTES = 6, 16, 4, 8
THERE, HERE = (3, 1, 7), (9, 2, 4)
"""Blocks of the same ten tokens at the sender and at the receiver."""
NUM_TOKENS = 10
LAYER_BYTES = NUM_TOKENS * TOKEN_BYTES


class Pages:
    """An engine's KV, and nothing else of it."""

    num_layers, kv_bytes_per_token_layer = LAYERS, TOKEN_BYTES

    def __init__(self, first: int = 0) -> None:
        values = np.arange(LAYERS * BLOCKS * BLOCK_SIZE * TOKEN_BYTES, dtype=np.int64) % 251
        self.kv = (values * bool(first)).astype(np.uint8).reshape(LAYERS, BLOCKS * BLOCK_SIZE, TOKEN_BYTES)
        self.gate = threading.Event()
        self.gate.set()
        self.fails: Exception | None = None
        self.num_imported = 0

    def _slots(self, tables: Any, ends: Any, first_tokens: Any) -> np.ndarray[Any, Any]:
        return slots_of(tables, ends, first_tokens, block_size=BLOCK_SIZE, num_blocks=BLOCKS)

    def export_kv(
        self, tables: Any, ends: Any, last: int, *, first_layer: int = 0, first_tokens: Sequence[int] = ()
    ) -> Completion[Buffer]:
        self.gate.wait(10)
        if self.fails is not None:
            return Landed(error=self.fails)
        slots = self._slots(tables, ends, first_tokens)
        return Landed(self.kv[first_layer:last, slots].reshape(-1).copy())

    def import_kv(
        self, tables: Any, ends: Any, last: int, kv: Any, *, first_layer: int = 0, first_tokens: Sequence[int] = ()
    ) -> Completion[None]:
        self.gate.wait(10)
        if self.fails is not None:
            return Landed(error=self.fails)
        slots = self._slots(tables, ends, first_tokens)
        self.kv[first_layer:last, slots] = kv.reshape(last - first_layer, len(slots), TOKEN_BYTES)
        self.num_imported += last - first_layer
        return Landed()

    def of(self, table: Sequence[int], layer: int) -> bytes:
        return bytes(self.kv[layer, self._slots([table], [NUM_TOKENS], ())].reshape(-1))


class Wire:
    def __init__(self) -> None:
        self.sender, self.receiver = Pages(1), Pages()
        self.transports: list[MemoryTransport] = []

    async def start(self) -> None:
        fabric = MemoryFabric()
        self.transports = [fabric.start(name=name) for name in ("sender", "receiver")]
        there, here = self.transports
        self.connector = KvConnector(here, HOST)
        self.to = await there.connect(here.address, same_host=False)
        self.back = await here.connect(there.address, same_host=False)

    def outflow(self) -> KvOutflow:
        return KvConnector.outflow(cast(Engine, self.sender), self.to)

    def inflow(self, num_pieces: int = LAYERS, *, receives: int = LAYERS, **how: Any) -> KvInflow:
        window = self.connector.reserve(LAYER_BYTES, num_pieces)
        assert window is not None
        inflow = self.connector.inflow(cast(Engine, self.receiver), self.back, window, **how)
        for tag, layer in enumerate(kv(HERE).pieces(1)):
            if tag < receives:
                inflow.receive(layer, tag)
        return inflow

    async def send(self, outflow: KvOutflow, first: int, last: int) -> None:
        if first == last:
            return
        layers = kv(THERE)._replace(first_layer=first, last_layer=last)
        for sent in await outflow.send(layers, range(first, last), lies_there=lambda: True):
            await sent.wait(5)

    def same(self, num_layers: int = LAYERS) -> list[bool]:
        return [self.sender.of(THERE, layer) == self.receiver.of(HERE, layer) for layer in range(num_layers)]


def kv(table: Sequence[int], num_layers: int = LAYERS) -> KvRange:
    return KvRange.of([table], [NUM_TOKENS], range(num_layers))


def running(inflow: KvInflow, num: int = LAYERS) -> asyncio.Task[None]:
    return asyncio.create_task(inflow.run(lambda: inflow.num_here >= num))


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    await wire.start()
    yield wire
    assert wire.connector.used_bytes == 0
    for transport in wire.transports:
        await transport.close()


def test_a_range_is_cut_into_pieces_and_keeps_its_tables() -> None:
    table = [1, 2, 3]
    whole = KvRange.of([table, [4]], [9, 2], range(1, 6), starts=[3, 0])
    table.append(5)
    pieces = list(whole.pieces(2))
    assert [(p.first_layer, p.last_layer) for p in pieces] == [(1, 3), (3, 5), (5, 6)]
    assert {p.tables for p in pieces} == {((1, 2, 3), (4,))}
    assert whole.num_tokens == 8
    assert [p.num_bytes(cast(Engine, Pages())) for p in pieces] == [128, 128, 64]


@pytest.mark.parametrize("each", [1, 2, 6])
async def test_what_is_sent_lies_in_the_receivers_blocks(wire: Wire, each: int) -> None:
    inflow, outflow = wire.inflow(), wire.outflow()
    task = running(inflow)
    for first in range(0, LAYERS, each):
        await wire.send(outflow, first, first + each)
    await task
    assert all(wire.same())
    assert inflow.is_over
    assert 0 < outflow.busy_s < 10


async def test_no_more_is_received_at_once_than_the_window_holds(wire: Wire) -> None:
    asked: list[int] = []

    async def ask(layer: KvRange) -> None:
        asked.append(layer.first_layer)

    inflow, outflow = wire.inflow(2, ask=ask), wire.outflow()
    task = running(inflow)
    for layer in range(LAYERS):
        await eventually(lambda layer=layer: len(asked) == min(layer + 2, LAYERS))  # type: ignore[misc]
        await wire.send(outflow, layer, layer + 1)
    await task
    assert asked == list(range(LAYERS))
    assert all(wire.same())


async def test_memory_for_what_is_on_its_way_is_bounded_over_all(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", 3 * LAYER_BYTES)
    first = wire.inflow(2)
    second = wire.inflow(2)
    assert wire.connector.used_bytes == 3 * LAYER_BYTES
    assert wire.connector.reserve(LAYER_BYTES, 1) is None
    promised = wire.connector.reserve(LAYER_BYTES, 5, is_promised=True)
    assert promised is not None
    assert promised.num_pieces == 1
    promised.release()
    await first.release()
    await second.release()


async def test_a_question_that_is_refused_ends_it_and_a_message_that_does_not_come(wire: Wire) -> None:
    async def refuse(_: KvRange) -> None:
        raise Unavailable("no")

    with pytest.raises(Unavailable, match="no"):
        await running(wire.inflow(ask=refuse))
    with pytest.raises(DeadlineExceeded):
        await running(wire.inflow(timeout_s=0.05))


@pytest.mark.parametrize("num_come", [0, 2])
async def test_what_comes_another_way_is_not_waited_for(wire: Wire, num_come: int) -> None:
    inflow, outflow = wire.inflow(4), wire.outflow()
    task = running(inflow, 3)
    await wire.send(outflow, 0, num_come)
    await eventually(lambda: inflow.num_here == num_come)
    inflow.cut(3)
    await wire.send(outflow, num_come, 3)
    await task
    assert wire.same(3) == [True] * 3
    assert not any(wire.same()[3:])


async def test_a_cut_before_what_is_waited_for_ends_it(wire: Wire) -> None:
    inflow, outflow = wire.inflow(), wire.outflow()
    num = LAYERS

    async def run() -> None:
        await inflow.run(lambda: inflow.num_here == num)

    task = asyncio.create_task(run())
    await wire.send(outflow, 0, 2)
    await eventually(lambda: inflow.num_here == 2)
    num = 2
    inflow.cut(2)
    await task


async def test_more_can_follow_once_all_is_here(wire: Wire) -> None:
    window = wire.connector.reserve(LAYER_BYTES, 2)
    assert window is not None
    inflow = wire.connector.inflow(cast(Engine, wire.receiver), wire.back, window)
    pieces, outflow = list(kv(HERE).pieces(1)), wire.outflow()
    for first in (0, 3):
        for layer in range(first, first + 3):
            inflow.receive(pieces[layer], layer)
        task = running(inflow, first + 3)
        await wire.send(outflow, first, first + 3)
        await task
        assert wire.connector.used_bytes == 0
        assert window.reopen(LAYER_BYTES)
    await inflow.release()
    assert all(wire.same())


async def test_each_waits_for_what_must_be_before_it(wire: Wire) -> None:
    may = asyncio.Event()

    async def before() -> None:
        await may.wait()

    inflow = wire.inflow(before_each=before)
    task = running(inflow)
    await wire.send(wire.outflow(), 0, LAYERS)
    await asyncio.sleep(0.05)
    assert (inflow.num_come, inflow.num_here, wire.receiver.num_imported) == (1, 0, 0)
    may.set()
    await task


async def test_nothing_is_written_once_it_is_released(wire: Wire) -> None:
    inflow = wire.inflow()
    task = running(inflow)
    wire.receiver.gate.clear()
    await wire.send(wire.outflow(), 0, LAYERS)
    await eventually(lambda: inflow.num_come == 1)
    releasing = asyncio.create_task(inflow.release())
    await asyncio.sleep(0.05)
    assert not releasing.done(), "a layer is being written"
    wire.receiver.gate.set()
    await releasing
    written = wire.receiver.num_imported
    assert written == 1
    assert task.cancelled()
    await inflow.release()
    await asyncio.sleep(0.05)
    assert wire.receiver.num_imported == written


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("end", [KvInflow.release, None])
async def test_who_waits_for_it_may_be_cancelled(wire: Wire, end: Callable[[KvInflow], Awaitable[None]] | None) -> None:
    inflow = wire.inflow()
    task = running(inflow)
    await asyncio.sleep(0)
    await (_cancelled(task) if end is None else end(inflow))
    assert inflow.is_over
    assert wire.connector.used_bytes == 0


async def test_who_is_cancelled_while_the_engine_is_called_waits_for_what_it_was_given(wire: Wire) -> None:
    """As a device that computes later: the call returns, and the blocks are still to be written."""
    given, written = threading.Event(), Pending[None]()
    wire.receiver.gate.clear()
    import_kv = wire.receiver.import_kv

    def later(*kv: Any, **layers: Any) -> Completion[None]:
        given.set()
        import_kv(*kv, **layers)
        return written

    wire.receiver.import_kv = later  # type: ignore[method-assign]
    inflow, outflow = wire.inflow(), wire.outflow()
    running(inflow)
    await wire.send(outflow, 0, 1)
    await eventually(given.is_set)
    release = asyncio.create_task(inflow.release())
    await asyncio.sleep(0.01)
    wire.receiver.gate.set()  # the call returns now
    await asyncio.sleep(0.05)
    assert not release.done(), "its blocks would be freed, and are written"
    written.settle(Landed())
    await release


async def test_what_the_engine_has_yet_to_write_is_not_here(wire: Wire) -> None:
    """As a device that computes later."""
    given: list[Pending[None]] = []
    import_kv = wire.receiver.import_kv

    def later(*kv: Any, **layers: Any) -> Completion[None]:
        import_kv(*kv, **layers)
        given.append(Pending())
        return given[-1]

    wire.receiver.import_kv = later  # type: ignore[method-assign]
    inflow, outflow = wire.inflow(1), wire.outflow()
    task = running(inflow)
    sending = asyncio.create_task(wire.send(outflow, 0, LAYERS))
    for layer in range(LAYERS):
        await eventually(lambda layer=layer: len(given) == layer + 1)
        await asyncio.sleep(0.01)
        assert (inflow.num_here, len(given)) == (layer, layer + 1)
        assert not task.done()
        given[layer].settle(Landed())
    await task
    await sending
    assert all(wire.same())


async def test_what_the_engine_has_yet_to_read_is_not_sent(wire: Wire) -> None:
    """As a device that computes later."""
    given: list[Pending[Buffer]] = []
    export_kv = wire.sender.export_kv

    def later(*kv: Any, **layers: Any) -> Completion[Buffer]:
        given.append(Pending())
        return given[-1]

    wire.sender.export_kv = later  # type: ignore[method-assign]
    inflow, outflow = wire.inflow(), wire.outflow()
    task = running(inflow)
    sending = asyncio.create_task(wire.send(outflow, 0, LAYERS))
    await eventually(lambda: bool(given))
    await asyncio.sleep(0.01)
    assert not sending.done()
    assert inflow.num_come == 0
    layers = kv(THERE)
    given[0].settle(export_kv(layers.tables, layers.ends, LAYERS))
    await sending
    await task
    assert all(wire.same())


async def test_what_the_engine_cannot_write_is_said(wire: Wire) -> None:
    wire.receiver.fails = ValueError("broken")
    inflow = wire.inflow()
    task = running(inflow)
    await wire.send(wire.outflow(), 0, 1)
    with pytest.raises(ValueError, match="broken"):
        await task


async def test_what_no_longer_lies_there_is_not_sent(wire: Wire) -> None:
    lies, outflow = True, wire.outflow()
    wire.sender.gate.clear()
    sending = asyncio.create_task(outflow.send(kv(THERE, 1), [0], lies_there=lambda: lies))
    await asyncio.sleep(0.02)
    lies = False
    wire.sender.gate.set()
    assert await sending == ()


@pytest.mark.parametrize("lies", [True, False])
async def test_an_error_of_what_does_not_lie_there_does_not_matter(wire: Wire, lies: bool) -> None:
    wire.sender.fails = ValueError("garbage")
    send = functools.partial(wire.outflow().send, kv(THERE, 1), [0], lies_there=lambda: lies)
    if not lies:
        assert await send() == ()
        return
    with pytest.raises(ValueError, match="garbage"):
        await send()


@pytest.mark.parametrize("lies", [True, False])
async def test_nothing_is_read_that_was_not_written(wire: Wire, lies: bool) -> None:
    failed: Completion[None] = Landed(error=TransportError("the step failed"))
    wire.sender.gate.clear()
    send = functools.partial(wire.outflow().send, kv(THERE, 1), [0], after=failed, lies_there=lambda: lies)
    if lies:
        with pytest.raises(TransportError, match="the step failed"):
            await send()
    else:
        assert await send() == ()


async def test_what_was_not_sent_is_dropped(wire: Wire) -> None:
    outflow = wire.outflow()
    (sent,) = await outflow.send(kv(THERE, 1), [0], lies_there=lambda: True)
    outflow.release()
    with pytest.raises(TransferAborted):
        await sent.wait(5)
    outflow.release()


class Full(HostDevice):
    """A device that has memory for so many messages."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def staging(self, num_bytes: int, way: Way) -> Buffer:
        self.num_left -= 1
        if self.num_left < 0:
            raise TransportError(f"CUDA pins no {num_bytes} bytes")
        return super().staging(num_bytes, way)


async def test_where_there_is_no_memory_for_a_message_its_run_fails(wire: Wire) -> None:
    """Not who says that it comes: he would have to undo what he has said before."""
    wire.connector = KvConnector(wire.connector.transport, Full(2))
    inflow = wire.inflow()
    outflow = wire.outflow()
    await wire.send(outflow, 0, 2)
    with pytest.raises(TransportError, match="pins no"):
        await inflow.run(lambda: inflow.num_here == LAYERS)
    assert inflow.num_here == 2
    assert wire.same() == [True, True, False, False, False, False]
    assert wire.connector.used_bytes == 0
