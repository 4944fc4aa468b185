from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from services.worker.data_plane.pieces import Header
from services.worker.data_plane.transfer import Downstream, load_from_chain, load_from_disk, send_copy, send_range
from services.worker.data_plane.weight_copy import WeightCopy
from services.worker.engine.arena import HostArena
from shared.checkpoint import inspect_checkpoint
from shared.errors import Conflict, DeadlineExceeded, PeerLost, TransportError
from shared.layout import CHECK_BYTES, ArenaLayout, layout_of
from shared.transport.base import TensorTransport
from shared.transport.memory import MemoryFabric
from tests.checkpoints import tiny_checkpoint
from tests.records import spec

LAYOUT = layout_of(spec(hidden_size=256, intermediate_size=1024, vocab_size=2000))
HEADER = Header(plan_id="p", model_hash="m", layout_hash=LAYOUT.hash, chunk_bytes=CHECK_BYTES)


@dataclass
class Member:
    """One worker's end of a transfer."""

    transport: TensorTransport
    copy: WeightCopy
    epoch: int
    ready: list[int] = field(default_factory=list)
    first_bytes: int = 0
    completed: int = 0
    fetched: list[tuple[int, int]] = field(default_factory=list)

    async def on_ready(self, unit: int) -> None:
        self.ready.append(unit)

    async def on_complete(self) -> None:
        self.completed += 1

    async def on_first_byte(self) -> None:
        self.first_bytes += 1


def random_copy(layout: ArenaLayout = LAYOUT) -> WeightCopy:
    copy = WeightCopy(layout, HostArena.allocate(layout.num_bytes))
    copy.arena.memory(0, layout.num_bytes)[:] = np.random.default_rng(7).integers(0, 256, layout.num_bytes)
    for unit in range(len(layout.units)):
        copy.seal(unit)
        copy.mark_ready(unit)
    return copy


@contextlib.asynccontextmanager
async def members(count: int, source: WeightCopy | None = None) -> AsyncIterator[tuple[MemoryFabric, list[Member]]]:
    """A source (if given a copy) or an empty first member, and empty ones after it."""
    fabric = MemoryFabric()
    made = [
        Member(fabric.start(name=f"t{i}"), WeightCopy(LAYOUT, HostArena.allocate(LAYOUT.num_bytes)), epoch=100 + i)
        for i in range(count)
    ]
    if source is not None:
        made[0].copy = source
    try:
        yield fabric, made
    finally:
        for member in made:
            await member.transport.close()


async def downstream(of: Member, to: Member, *, same_host: bool = True) -> Downstream:
    return Downstream(await of.transport.connect(to.transport.address, same_host=same_host), to.epoch)


async def receive(member: Member, to: Downstream | None, upstream: Member, **fields: Any) -> int:
    before_fetch = fields.pop("before_fetch", lambda: None)

    async def fetch_again(index: int, unit: int, offset: int, num_bytes: int) -> None:
        before_fetch()
        member.fetched.append((unit, offset))
        await send_range(upstream.copy, unit, offset, num_bytes, await downstream(upstream, member), index)

    fields = {"stall_s": 5.0} | fields
    source = await member.transport.connect(upstream.transport.address, same_host=fields.pop("same_host", True))
    header = fields.pop("header", HEADER)
    return await load_from_chain(
        member.copy,
        member.transport,
        header,
        member.epoch,
        source,
        to,
        member.on_first_byte,
        member.on_ready,
        member.on_complete,
        fetch_again,
        **fields,
    )


async def test_a_chain_of_three_gives_everyone_identical_weights() -> None:
    async with members(4, random_copy()) as (_, (source, *targets)):
        links = [await downstream(a, b) for a, b in zip([source, *targets], targets, strict=False)]
        receives = [
            asyncio.create_task(receive(t, links[i + 1] if i + 1 < len(links) else None, [source, *targets][i]))
            for i, t in enumerate(targets)
        ]
        await send_copy(source.copy, HEADER, links[0], stall_s=5.0)
        await asyncio.gather(*receives)
        for target in targets:
            assert target.copy.complete
            assert sorted(target.ready) == list(range(len(LAYOUT.units)))
            assert target.first_bytes == 1
            assert target.copy.digest() == source.copy.digest()
            assert bytes(target.copy.arena.memory(0, LAYOUT.num_bytes)) == bytes(
                source.copy.arena.memory(0, LAYOUT.num_bytes)
            )


async def test_a_disk_chain_forwards_what_the_first_member_reads() -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint("qwen2"), with_hash=False)
    layout = checkpoint.layout
    header = Header(plan_id="p", model_hash="m", layout_hash=layout.hash, chunk_bytes=CHECK_BYTES)
    async with members(2) as (_, (first, second)):
        for member in (first, second):
            member.copy = WeightCopy(layout, HostArena.allocate(layout.num_bytes))
        receiving = asyncio.create_task(receive(second, None, first, header=header))
        link = await downstream(first, second)
        await load_from_disk(first.copy, checkpoint, header, link, first.on_ready, first.on_complete, stall_s=5.0)
        await receiving
        assert first.completed == 1
        assert first.copy.complete
        assert second.copy.digest() == first.copy.digest()


async def test_a_corrupted_chunk_is_fetched_again_before_its_unit_is_ready() -> None:
    async with members(2, random_copy()) as (_, (source, target)):
        good = source.copy.digest()
        at = LAYOUT.units[1].offset + CHECK_BYTES + 5
        source.copy.arena.memory(at, 1)[0] ^= 0xFF
        link = await downstream(source, target)

        def heal() -> None:
            source.copy.arena.memory(at, 1)[0] ^= 0xFF

        # What is sent is bad; what is fetched again is not.
        receiving = asyncio.create_task(receive(target, None, source, before_fetch=heal))
        await send_copy(source.copy, HEADER, link, stall_s=5.0)
        await receiving
        assert target.fetched[0] == (1, LAYOUT.units[1].offset + CHECK_BYTES)
        assert target.copy.digest() == good
        assert target.copy.bad_ranges(1) == ()


async def test_data_that_stays_bad_fails_the_transfer() -> None:
    async with members(2, random_copy()) as (_, (source, target)):
        source.copy.arena.memory(LAYOUT.units[0].offset, 1)[0] ^= 0xFF
        link = await downstream(source, target)
        receiving = asyncio.create_task(receive(target, None, source))
        await send_copy(source.copy, HEADER, link, stall_s=5.0)
        with pytest.raises(TransportError, match="checksums"):
            await receiving
        assert not target.copy.is_ready(0)


@pytest.mark.parametrize("field_name", ["plan_id", "model_hash", "layout_hash"])
async def test_weights_of_another_model_or_plan_are_refused(field_name: str) -> None:
    async with members(2, random_copy()) as (_, (source, target)):
        link = await downstream(source, target)
        fields = {"plan_id": "p", "model_hash": "m", "layout_hash": LAYOUT.hash} | {field_name: "other"}
        receiving = asyncio.create_task(receive(target, None, source))
        with contextlib.suppress(TransportError, DeadlineExceeded):
            await send_copy(source.copy, Header(chunk_bytes=CHECK_BYTES, **fields), link, stall_s=0.5)
        with pytest.raises(TransportError, match=field_name):
            await receiving
        assert not any(target.copy.is_ready(u) for u in range(len(LAYOUT.units)))


async def test_a_silent_source_ends_in_a_deadline_and_frees_the_buffers() -> None:
    async with members(2, random_copy()) as (_, (source, target)):
        with pytest.raises(DeadlineExceeded):
            await receive(target, None, source, stall_s=0.3)
        # The same arena takes the next transfer at once.
        target.epoch += 1
        link = await downstream(source, target)
        receiving = asyncio.create_task(receive(target, None, source))
        await send_copy(source.copy, HEADER, link, stall_s=5.0)
        await receiving
        assert target.copy.complete


async def test_a_dead_receiver_ends_the_send() -> None:
    async with members(2, random_copy()) as (fabric, (source, target)):
        link = await downstream(source, target, same_host=False)
        fabric.set_rate(1_000_000)
        sending = asyncio.create_task(send_copy(source.copy, HEADER, link, stall_s=2.0))
        await asyncio.sleep(0.1)
        fabric.kill(target.transport.address)
        with pytest.raises((TransportError, DeadlineExceeded)):
            await sending


async def test_a_lost_successor_does_not_stop_the_copy_before_it() -> None:
    async with members(3, random_copy()) as (fabric, (source, target, lost)):
        first = await downstream(source, target)
        second = await downstream(target, lost, same_host=False)
        fabric.kill(lost.transport.address)
        receiving = asyncio.create_task(receive(target, second, source, stall_s=1.0))
        await send_copy(source.copy, HEADER, first, stall_s=5.0)
        await receiving
        assert target.copy.complete


async def test_a_copy_is_complete_before_a_slow_successor_has_it_all() -> None:
    async with members(3, random_copy()) as (_, (source, target, slow)):
        first, second = await downstream(source, target), await downstream(target, slow)
        receiving = asyncio.create_task(receive(target, second, source, stall_s=3.0))
        await send_copy(source.copy, HEADER, first, stall_s=5.0)
        async with asyncio.timeout(2.0):
            while not target.completed:
                await asyncio.sleep(0.01)
        assert not receiving.done()
        await receive(slow, None, target)
        await receiving


async def test_only_verified_ranges_of_the_unit_are_sent_again() -> None:
    async with members(2) as (_, (holder, other)):
        link = await downstream(holder, other)
        with pytest.raises(Conflict, match="not verified"):
            await send_range(holder.copy, 0, 0, 10, link, 1 << 23)
        holder.copy.mark_ready(0)
        with pytest.raises(Conflict, match="outside"):
            await send_range(holder.copy, 0, LAYOUT.units[1].offset, 10, link, 1 << 23)


def test_a_model_larger_than_the_arena_is_refused() -> None:
    with pytest.raises(TransportError, match="ARENA"):
        WeightCopy(LAYOUT, HostArena.allocate(4096))


async def test_a_lost_source_on_another_host_ends_the_receive_at_once() -> None:
    async with members(2, random_copy()) as (fabric, (source, target)):
        receiving = asyncio.create_task(receive(target, None, source, stall_s=30.0, same_host=False))
        await asyncio.sleep(0.1)
        fabric.kill(source.transport.address)
        with pytest.raises(PeerLost):
            await asyncio.wait_for(receiving, timeout=5.0)
