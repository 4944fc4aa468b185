"""How fast the tensor transport moves bytes between two processes of one host, beside a plain memory copy.

The windows are those of the worker's data plane: so many bytes, and at least 4 chunks, of sends and of receives are
posted ahead, each from the done-callback of an earlier one. Kinds of receive buffers tell the transport from the
kernel, which must find and clear every page that is written for the first time, and look up every page that another
process copies into: ``huge`` pages are what a weight arena has, ``small`` ones are 4 KiB; ``touched`` were written
before, ``fresh`` never.

Every round measures everything once, in turn, so that a noisy machine disturbs all alike; medians are reported.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from services.worker.weights.flow import MIN_WINDOW, RECEIVE_WINDOW_BYTES, SEND_WINDOW_BYTES
from shared.transport.base import Channel, TensorTransport, Transfer
from shared.transport.tags import tag_of
from shared.transport.ucx import UcxTransport

CHUNK_BYTES = (512 << 10, 1 << 20, 8 << 20)
"""The data plane's own are between the first and the last."""
PAGES = ("huge_touched", "huge_fresh", "small_touched", "small_fresh")
_PAIR_TIMEOUT_S = 60.0
_HUGE_PAGE_BYTES = 2 << 20

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Rate:
    """One line of the result: medians over the rounds, in 1e9 bytes per second."""

    pages: str
    chunk_bytes: int
    transport_gbytes_per_s: float
    copy_gbytes_per_s: float
    """``memcpy`` by one thread of one process, chunk by chunk, into pages of the same kind."""
    ratio: float
    """Median of transport over copy, round by round."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What the receiver is to do: tags of ``transfer_id``, ``total_bytes`` in chunks."""

    transfer_id: int
    chunk_bytes: int
    total_bytes: int
    pages: str
    receive_window: int


def measure(
    *,
    chunk_bytes: tuple[int, ...] = CHUNK_BYTES,
    total_bytes: int = 256 << 20,
    num_rounds: int = 5,
    window: int | None = None,
) -> tuple[Rate, ...]:
    """Measure all sizes and kinds of pages. Raises ``ValueError`` for a size that is no whole number of chunks.

    ``window``: chunks in flight on either side, instead of the data plane's own number."""
    for size in chunk_bytes:
        if size <= 0 or total_bytes % size:
            raise ValueError(f"{total_bytes} bytes are no whole number of chunks of {size} bytes")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receiver, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        return asyncio.run(_measure(ours, chunk_bytes, total_bytes, num_rounds, window))
    finally:
        ours.close()  # the receiver ends at the end of the pipe
        process.join(10)
        if process.is_alive():
            process.kill()


async def _measure(
    pipe: Connection, chunk_bytes: tuple[int, ...], total_bytes: int, num_rounds: int, window: int | None
) -> tuple[Rate, ...]:
    transport = UcxTransport(name="bench-sender")
    channel = await transport.connect(await asyncio.to_thread(pipe.recv), same_host=True)
    data = np.ones(total_bytes, np.uint8)
    moved: dict[tuple[str, int], list[tuple[float, float]]] = {}
    transfer_id = 0
    for round_index in range(num_rounds + 1):
        for pages in PAGES:
            for size in chunk_bytes:
                transfer_id += 1
                copy_s = _copy_s(data, size, pages)
                sends = window or window_of(SEND_WINDOW_BYTES, size)
                receives = window or window_of(RECEIVE_WINDOW_BYTES, size)
                pipe.send(_Job(transfer_id, size, total_bytes, pages, receives))
                await asyncio.to_thread(pipe.recv)
                begin_s = time.perf_counter()
                chunks = data.reshape(-1, size)
                await windowed(partial(_send, channel, chunks, transfer_id), len(chunks), sends)
                await asyncio.to_thread(pipe.recv)
                if round_index:  # the first round warms up
                    pair = (total_bytes / (time.perf_counter() - begin_s), total_bytes / copy_s)
                    moved.setdefault((pages, size), []).append(pair)
    await transport.close()
    return tuple(
        Rate(
            pages=pages,
            chunk_bytes=size,
            transport_gbytes_per_s=median(t for t, _ in rates) / 1e9,
            copy_gbytes_per_s=median(c for _, c in rates) / 1e9,
            ratio=median(t / c for t, c in rates),
        )
        for (pages, size), rates in moved.items()
    )


def window_of(window_bytes: int, chunk_bytes: int) -> int:
    """Chunks in flight, as the data plane reckons."""
    return max(MIN_WINDOW, window_bytes // chunk_bytes)


def _copy_s(data: Bytes, chunk_bytes: int, pages: str) -> float:
    """Seconds that one thread takes to copy ``data``."""
    target = _memory(len(data), pages)
    begin_s = time.perf_counter()
    for offset in range(0, len(data), chunk_bytes):
        target[offset : offset + chunk_bytes] = data[offset : offset + chunk_bytes]
    return time.perf_counter() - begin_s


def _memory(num_bytes: int, pages: str) -> Bytes:
    """Memory of its own mapping, so that fresh pages are fresh."""
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -np.frombuffer(mapping, np.uint8).ctypes.data % _HUGE_PAGE_BYTES
    mapping.madvise(mmap.MADV_HUGEPAGE if pages.startswith("huge") else mmap.MADV_NOHUGEPAGE)
    memory: Bytes = np.frombuffer(mapping, np.uint8)[begin : begin + num_bytes]
    if pages.endswith("touched"):
        memory[:] = 1
    return memory


def _receiver(pipe: Connection) -> None:
    asyncio.run(_receive(pipe))


async def _receive(pipe: Connection) -> None:
    transport = UcxTransport(name="bench-receiver")
    pipe.send(transport.address)
    while True:
        try:
            job: _Job = await asyncio.to_thread(pipe.recv)
        except EOFError:
            break
        chunks = _memory(job.total_bytes, job.pages).reshape(-1, job.chunk_bytes)
        pipe.send("ready")
        await windowed(partial(_recv, transport, chunks, job.transfer_id), len(chunks), job.receive_window)
        pipe.send("done")
    await transport.close()


def _send(channel: Channel, chunks: Bytes, transfer_id: int, index: int) -> Transfer:
    return channel.send(chunks[index], tag_of(transfer_id, index))


def _recv(transport: TensorTransport, chunks: Bytes, transfer_id: int, index: int) -> Transfer:
    return transport.recv(chunks[index], tag_of(transfer_id, index))


async def windowed(post: Callable[[int], Transfer], num_chunks: int, window: int) -> None:
    """Post ``num_chunks`` transfers, ``window`` at a time, the later ones from done-callbacks.

    Returns when all have ended. Raises the first transfer's error, or ``TimeoutError``.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_end(error: Exception | None) -> None:
        loop.call_soon_threadsafe(_settle, ended, error)

    _Window(post, num_chunks, window, on_end).pump()
    async with asyncio.timeout(_PAIR_TIMEOUT_S):
        await ended


def _settle(ended: asyncio.Future[None], error: Exception | None) -> None:
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)


class _Window:
    """Transfers in flight, as the data plane keeps them."""

    def __init__(
        self, post: Callable[[int], Transfer], num_chunks: int, window: int, on_end: Callable[[Exception | None], None]
    ) -> None:
        self._post = post
        self._num_chunks = num_chunks
        self._window = window
        self._on_end = on_end
        self._lock = threading.Lock()
        self._next = 0
        self._ended = 0
        self._pumping = False

    def pump(self) -> None:
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._lock:
                if self._next == self._num_chunks or self._next - self._ended == self._window:
                    self._pumping = False
                    return
                index = self._next
                self._next += 1
            self._post(index).add_done_callback(self._done)

    def _done(self, transfer: Transfer) -> None:
        with self._lock:
            self._ended += 1
            last = self._ended == self._num_chunks
        if transfer.error is not None or last:
            self._on_end(transfer.error)
        else:
            self.pump()


def command(
    chunk_kib: Annotated[
        list[int] | None, typer.Option(help="Chunk size in KiB, by default 512, 1024 and 8192; repeatable.")
    ] = None,
    total_mib: Annotated[int, typer.Option(min=1, help="Bytes per measurement, in MiB.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each kind; medians are reported.")] = 5,
    window: Annotated[int | None, typer.Option(min=1, help="Chunks in flight. [default: as the data plane]")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
) -> None:
    """GB/s of the tensor transport between two processes over shared memory, beside a plain memory copy."""
    sizes = tuple(kib << 10 for kib in chunk_kib) if chunk_kib else CHUNK_BYTES
    try:
        rates = measure(chunk_bytes=sizes, total_bytes=total_mib << 20, num_rounds=rounds, window=window)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(rate) for rate in rates], indent=2) + "\n")
    table = Table("receive pages", "chunk KiB", "transport GB/s", "copy GB/s", "ratio")
    for rate in rates:
        table.add_row(
            rate.pages,
            str(rate.chunk_bytes >> 10),
            f"{rate.transport_gbytes_per_s:.2f}",
            f"{rate.copy_gbytes_per_s:.2f}",
            f"{rate.ratio:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(command)
