"""Row ``loads``: how fast a model comes to a GPU, verified: from pinned memory of the host, and from another process.

The copy from the host is beside what the link gives a plain copy; the other process is on the same GPU, and is killed
amid a transfer, after which another one has to be able to send the rest.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median

import msgspec

from bench.gpu.engines import LLAMA_8B, EnginePlace, place_of, random_arena
from bench.gpu.figures import Report, one_line
from bench.gpu.holders import FetchedCopy, Held, hold, transport_on, whole_copy
from bench.gpu.processes import SecondProcess, second_process
from services.worker.device.completion import waited
from services.worker.memory.arena import Arena
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.receiving import NUM_COPYING
from shared.errors import BlitzError, Internal
from shared.layout import ArenaLayout, layout_of
from shared.model_spec import ModelSpec
from shared.transport.base import Channel
from shared.transport.ucx import UcxTransport

HOST = "services/worker/device/cuda/memory.py (copy and hash in turn on one stream), pinning; rows host and checksum"
PEER = "row ipc (UCX alone), windows in services/worker/weights/flow.py, checksums after each unit"
DEAD = "quarantine and forget() in shared/transport/ucx*.py; row ipc has the same without the product's transport"
SEED = 3
DEATH_S = 30.0
"""A process that was killed is gone by then."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What is loaded."""

    spec: ModelSpec = LLAMA_8B
    rounds: int = 3
    peer_spec: ModelSpec = field(default_factory=lambda: msgspec.structs.replace(LLAMA_8B, num_layers=16))
    """There are three copies of it on the device."""
    chunks: tuple[int, ...] = (8 << 20, 16 << 20, 32 << 20, 64 << 20)


def measure(report: Report) -> None:
    measure_on(report, place_of("cuda", report.folder), LoadSettings())


def measure_on(report: Report, place: EnginePlace, settings: LoadSettings) -> None:
    """On any device, of any size."""
    with report.part("from host memory"):
        _measure_host(report, place, _fitting(report, settings.spec), settings.rounds)
    with report.part("from another process"):
        asyncio.run(_measure_peer(report, place, settings))


def _fitting(report: Report, spec: ModelSpec) -> ModelSpec:
    """With fewer layers, where the host's memory is too small."""
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fitting = spec
    while layout_of(fitting).num_bytes * 1.3 > free_bytes and fitting.num_layers > 1:
        fitting = msgspec.structs.replace(fitting, num_layers=fitting.num_layers // 2)
    if fitting is not spec:
        report.text("fewer layers", f"{fitting.num_layers}: {free_bytes / 2**30:.1f} GiB of host memory are free")
    return fitting


def _measure_host(report: Report, place: EnginePlace, spec: ModelSpec, rounds: int) -> None:
    layout, arena = random_arena(spec, place)
    host = Arena(place.device.host_memory(layout.num_bytes))
    begin_s = time.perf_counter()
    host.pin()
    report.number("to pin the host's copy", time.perf_counter() - begin_s, "s", f"{layout.num_bytes / 1e9:.1f} GB")
    begin_s = time.perf_counter()
    checksums = [waited(host.copy_unit(unit, arena)) for unit in layout.units]
    rate = layout.num_bytes / (time.perf_counter() - begin_s) / 1e9
    report.number("device to host, verified", rate, "GB/s", "checksums by one thread of the host")
    source = whole_copy(layout, host, checksums)
    link_bytes_per_s = median(_plain_rates(layout, arena, host))
    report.number("host to device, plain", link_bytes_per_s / 1e9, "GB/s", "unit by unit, by the device's clock")
    taken_s = median([_load_s(layout, arena, source) for _ in range(rounds)])
    note = f"{taken_s:.3f} s, {layout.num_bytes / taken_s / 1e9:.1f} GB/s"
    share = taken_s * link_bytes_per_s / layout.num_bytes
    report.at_most("host to device, verified: of the time of plain copies", share, "", 1.2, HOST, note)


def _plain_rates(layout: ArenaLayout, arena: Arena, host: Arena) -> Iterator[float]:
    for unit in layout.units[: layout.num_layers]:
        written = arena.write(unit.offset, host.memory(unit.offset, unit.num_bytes))
        waited(written)
        yield unit.num_bytes / max(written.device_s, 1e-9)


def _load_s(layout: ArenaLayout, arena: Arena, source: WeightCopy) -> float:
    """As a worker does. Raises ``Internal`` if a unit is not what it was."""
    arena.release()
    copy = WeightCopy(layout, arena, source.digests)
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(NUM_COPYING) as threads:
        verified = list(threads.map(lambda unit: copy.copy_unit(unit, source), range(len(layout.units))))
    taken_s = time.perf_counter() - begin_s
    if not all(verified):
        raise Internal(f"{verified.count(False)} of {len(verified)} units differ from the host's")
    return taken_s


async def _measure_peer(report: Report, place: EnginePlace, settings: LoadSettings) -> None:
    transport = transport_on(place, "receiver")
    try:
        layout = layout_of(settings.peer_spec)
        peers = _Peers(report, place, settings, transport, layout, Arena(place.device.allocate(layout.num_bytes)))
        await peers.measure()
    finally:
        await transport.close()


@dataclass(slots=True)
class _Peers:
    """What is fetched from second processes."""

    report: Report
    place: EnginePlace
    settings: LoadSettings
    transport: UcxTransport
    layout: ArenaLayout
    arena: Arena
    epoch: int = 0

    async def measure(self) -> None:
        with self._holder() as holder:
            held, channel = await self._meet(holder)
            for chunk in self.settings.chunks:
                with self.report.part(f"from another process, pieces of {_size(chunk)}"):
                    await self._measure_chunk(holder, held, channel, chunk)
            with self.report.part("a sender that is killed"):
                await self._measure_killed(holder, held, channel)

    def _holder(self) -> AbstractContextManager[SecondProcess]:
        return second_process(hold, self.place.kind, self.report.folder, self.settings.peer_spec, SEED)

    async def _meet(self, holder: SecondProcess) -> tuple[Held, Channel]:
        held: Held = await asyncio.to_thread(holder.answer)
        holder.order(self.transport.address)
        return held, await self.transport.connect(held.address, same_host=True)

    def _copy(self, held: Held) -> FetchedCopy:
        self.arena.release()
        self.epoch += 1
        return FetchedCopy(self.layout, self.arena, held.digests, self.transport)

    async def _measure_chunk(self, holder: SecondProcess, held: Held, channel: Channel, chunk: int) -> None:
        rates, num_bad = list[float](), 0
        for _ in range(self.settings.rounds):
            fetched = self._copy(held)
            taken_s = await fetched.fetch(channel, fetched.missing(chunk), holder.order, epoch=self.epoch)
            await asyncio.to_thread(holder.answer)
            rates.append(self.layout.num_bytes / taken_s / 1e9)
            num_bad += fetched.num_bad + len(fetched.missing(chunk))
        name = f"from another process, pieces of {_size(chunk)}"
        self.report.at_least(name, median(rates), "GB/s", 100, PEER, f"verified; {_spread(rates)}")
        self.report.at_most(f"{name}: blocks that differ", num_bad, "", 0, PEER)

    async def _measure_killed(self, holder: SecondProcess, held: Held, channel: Channel) -> None:
        """With its first piece here, and others on their way."""
        chunk = self.settings.chunks[-1]
        fetched = self._copy(held)
        fetching = asyncio.create_task(
            fetched.fetch(channel, fetched.missing(chunk), holder.order, epoch=self.epoch, on_first=holder.kill)
        )
        dying = asyncio.create_task(asyncio.to_thread(holder.process.join, DEATH_S))
        await asyncio.wait({fetching, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not fetched.num_bytes:
            await fetching  # raises why nothing came
        await dying
        self.transport.forget(held.address)
        try:
            await fetching
            how = "all had come"
        except (BlitzError, TimeoutError) as error:
            how = one_line(error)
        is_quiet = await fetched.give_up()
        left = fetched.missing(chunk)
        self.report.text("a sender that is killed", f"{how}; {len(left)} of {left.num_all} pieces are missing")
        note = "1: some; they keep their memory, and a worker would restart"
        self.report.number("receives that hang", int(not is_quiet), "", note)
        with self._holder() as second:
            held_again, channel = await self._meet(second)
            if held_again.digests != held.digests:
                raise Internal("the second sender has other weights")
            if left:
                await fetched.fetch(channel, left, second.order, epoch=self.epoch, attempt=1)
                await asyncio.to_thread(second.answer)
            bad = [await asyncio.to_thread(fetched.copy.bad_ranges, unit) for unit in range(len(self.layout.units))]
            num_wrong = sum(map(len, bad)) + len(fetched.missing(chunk))
            note = "of all units, with the rest from a second sender"
            self.report.at_most("blocks that differ after a killed sender", num_wrong, "", 0, DEAD, note)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _spread(rates: list[float]) -> str:
    return f"{min(rates):.0f} to {max(rates):.0f}"
