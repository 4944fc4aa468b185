"""Fills and senders together: chains, stripes, and what happens when parts of them die."""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
import time
from pathlib import Path

import msgspec
import pytest

from services.worker.core.upstreams import StripeSources, Upstream
from services.worker.device.host import HOST
from services.worker.memory.arena import Arena
from services.worker.memory.pieces import cut
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights import checkpoint_reader, flow_completion
from services.worker.weights.flow import Inflow
from services.worker.weights.pace import Pace, Paces
from shared.checkpoint import inspect_checkpoint
from shared.errors import BadRequest, BlitzError, Conflict, NotFound, TransportError
from shared.layout import CHECK_BYTES
from shared.messages.feeds import Feed, GetFeedState
from shared.transport.base import Buffer, Channel, Transfer
from shared.transport.transfer import PostedTransfer
from tests.checkpoints import tiny_checkpoint
from tests.services.worker.weights.feeding_peers import (
    DISK,
    LAYOUT,
    Client,
    Peer,
    empty_copy,
    peers,
    random_copy,
    same_bytes,
)
from tests.wait_until import WAIT_S, eventually

PIECES = cut(LAYOUT, CHECK_BYTES)
SLOW_BYTES_PER_S = 2_000_000
"""Seconds for all of it: time to interrupt it also where this process stands still meanwhile."""
FAST_BYTES_PER_S = 1e12
"""From then on, for what is left. No rate at all would be another for the threads that are just sending."""


def num_wanted(feed: Feed) -> int:
    return int.from_bytes(feed.pieces, "little").bit_count()


async def progressed(peer: Peer, pieces: int = 3) -> None:
    """Wait until some pieces are there and others are not."""
    async with asyncio.timeout(WAIT_S):
        while sum(peer.copy.has(p) for p in PIECES) < pieces:
            await asyncio.sleep(0.002)
    assert not all(peer.copy.has(p) for p in PIECES), "too fast to be interrupted"


async def test_a_chain_of_three_gives_everyone_identical_weights() -> None:
    async with peers(4, random_copy()) as (_, chain):
        await asyncio.gather(*(b.receive([[a.upstream()]]) for a, b in itertools.pairwise(chain)))
        for target in chain[1:]:
            assert same_bytes(target.copy, chain[0].copy)
            assert sorted(target.ready) == list(range(len(LAYOUT.units)))
            assert target.first_bytes == 1


async def test_a_sender_that_loads_from_disk_forwards_what_it_reads() -> None:
    path = tiny_checkpoint("qwen2")
    checkpoint = inspect_checkpoint(path)
    async with peers(2, checkpoint=checkpoint) as (_, (first, second)):
        receiving = second.receive([[first.upstream()]])
        await first.receive([[DISK]], path=str(path))
        await receiving
        assert first.first_bytes == 1
        assert same_bytes(second.copy, first.copy)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.75, 0.25)])
async def test_stripes_and_an_all_gather_give_both_members_everything(shares: tuple[float, float]) -> None:
    async with peers(4, random_copy()) as (_, (one, two, left, right)):
        two.copy = random_copy()
        two.offer("gpu", two.copy)
        gathering = [
            left.receive(
                [
                    StripeSources(shares[0], (one.upstream(),)),
                    StripeSources(shares[1], (right.upstream(), two.upstream())),
                ]
            ),
            right.receive(
                [
                    StripeSources(shares[0], (left.upstream(), one.upstream())),
                    StripeSources(shares[1], (two.upstream(),)),
                ]
            ),
        ]
        await asyncio.gather(*gathering)
        assert same_bytes(left.copy, one.copy)
        assert same_bytes(right.copy, one.copy)
        sent = {name: num_wanted(feed) for name, feed in left.asked}
        assert sent["p0"] + sent["p3"] == len(PIECES), "every piece was asked for once"
        assert sent["p0"] / len(PIECES) == pytest.approx(shares[0], abs=0.1)


async def test_a_corrupted_chunk_is_fetched_again_before_its_unit_is_ready() -> None:
    async with peers(3, random_copy()) as (_, (bad, good, target)):
        good.copy = random_copy()
        good.offer("gpu", good.copy)
        at = LAYOUT.units[1].offset + CHECK_BYTES + 5
        bad.copy.arena.memory(at, 1)[0] ^= 0xFF
        await target.receive([[bad.upstream(), good.upstream()]])
        assert same_bytes(target.copy, good.copy)
        block = (1, LAYOUT.units[1].offset + CHECK_BYTES)
        assert target.fetched == [("p0", *block), ("p1", *block)], "from the next upstream, if this one stays bad"


async def test_a_corrupted_checksum_is_asked_for_again() -> None:
    async with peers(2, random_copy()) as (_, (source, target)):
        table = next(p for p in PIECES if p.unit == 1 and p.is_checksums)

        verify = target.copy.bad_ranges
        spoiled: list[int] = []

        def spoil_once(unit: int) -> tuple[tuple[int, int], ...]:
            if unit == 1 and not spoiled:
                spoiled.append(unit)
                target.copy.buffer(table)[3] ^= 0xFF
            return verify(unit)

        target.copy.bad_ranges = spoil_once  # type: ignore[method-assign]
        await target.receive([[source.upstream()]])
        assert spoiled
        assert same_bytes(target.copy, source.copy)
        assert target.fetched == [], "the blocks were good"


async def test_data_that_stays_bad_fails_the_transfer() -> None:
    async with peers(2, random_copy()) as (_, (source, target)):
        source.copy.arena.memory(LAYOUT.units[0].offset, 1)[0] ^= 0xFF
        with pytest.raises(TransportError, match="not what was registered"):
            await target.receive([[source.upstream()]])
        assert not target.copy.is_ready(0)


async def test_weights_of_another_model_are_refused() -> None:
    async with peers(2, random_copy()) as (_, (source, target)):
        with pytest.raises(TransportError, match="holds no gpu copy"):
            await target.receive([[source.upstream()]], layout_hash="other")
        assert not any(target.copy.has(p) for p in PIECES)


@pytest.mark.parametrize("between_hosts", [False, True])
async def test_a_target_whose_predecessor_dies_keeps_what_it_has(between_hosts: bool) -> None:
    async with peers(4, random_copy()) as (fabric, (source, first, lost, last)):
        fabric.set_rate(SLOW_BYTES_PER_S)
        host = "elsewhere" if between_hosts else "h"
        receiving = [
            first.receive([[source.upstream()]]),
            lost.receive([[first.upstream()]]),
            last.receive([[lost.upstream(host=host), first.upstream(), source.upstream()]]),
        ]
        await progressed(last)
        lost.die(fabric)
        fabric.set_rate(FAST_BYTES_PER_S)
        receiving[1].cancel()
        await asyncio.wait_for(asyncio.gather(receiving[0], receiving[2]), timeout=WAIT_S)
        assert same_bytes(last.copy, source.copy)
        assert [name for name, _ in last.asked] == ["p2", "p1"], "the nearest upstream holder"
        assert num_wanted(last.asked[1][1]) < num_wanted(last.asked[0][1]), "from the first missing piece"
        assert last.asked[1][1].attempt != last.asked[0][1].attempt, "tags are never used again"


async def test_a_target_whose_source_dies_continues_from_a_fallback() -> None:
    async with peers(4, random_copy()) as (fabric, (source, spare_copy, first, second)):
        spare_copy.copy = random_copy()
        spare_copy.offer("host", spare_copy.copy)
        fabric.set_rate(SLOW_BYTES_PER_S)
        receiving = [
            first.receive([[source.upstream(), spare_copy.upstream("host")]]),
            second.receive([[first.upstream(), source.upstream(), spare_copy.upstream("host")]]),
        ]
        await progressed(second)
        source.die(fabric)
        fabric.set_rate(FAST_BYTES_PER_S)
        await asyncio.wait_for(asyncio.gather(*receiving), timeout=WAIT_S)
        assert same_bytes(first.copy, spare_copy.copy)
        assert same_bytes(second.copy, spare_copy.copy)
        assert [name for name, _ in second.asked] == ["p2"], "whoever is fed by a living member stays with it"


async def test_the_copy_of_a_later_instance_is_not_what_was_planned_with() -> None:
    async with peers(3, random_copy()) as (_, (whole, first, second)):
        # Each was to read from the other's instance: one of them gave its worker to a new one in the meantime.
        first.offer("gpu", first.copy, "new")
        second.offer("gpu", second.copy, "second")
        receiving = [
            first.receive([[second.upstream(instance_id="second"), whole.upstream()]]),
            second.receive([[first.upstream(instance_id="old"), whole.upstream()]]),
        ]
        await asyncio.wait_for(asyncio.gather(*receiving), timeout=60)
        assert [name for name, _ in second.asked] == ["p1", "p0"]
        assert [name for name, _ in first.asked] == ["p2"]
        assert same_bytes(first.copy, whole.copy)


async def test_a_target_without_any_upstream_left_reads_its_disk() -> None:
    path = tiny_checkpoint("llama")
    checkpoint = inspect_checkpoint(path)
    async with peers(2, checkpoint=checkpoint) as (_, (source, target)):
        await source.receive([[DISK]], path=str(path))
        source.dead = True
        await target.receive([[source.upstream(), DISK]], path=str(path))
        assert same_bytes(target.copy, source.copy)


@pytest.mark.parametrize("path", ["/" + "a" * 300, "/nowhere"])
async def test_a_disk_that_cannot_be_read_is_an_upstream_lost(path: str) -> None:
    async with peers(2, random_copy()) as (_, (source, target)):
        await target.receive([[DISK, source.upstream()]], path=path)
        assert same_bytes(target.copy, source.copy)


async def test_what_the_system_refuses_while_an_upstream_is_read_loses_that_upstream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_checkpoint("llama")
    checkpoint = inspect_checkpoint(path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory to read into")

    async with peers(2, checkpoint=checkpoint) as (_, (source, target)):
        await source.receive([[DISK]], path=str(path))
        monkeypatch.setattr(checkpoint_reader, "load_unit", refuse)
        await target.receive([[DISK, source.upstream()]], path=str(path))
        assert same_bytes(target.copy, source.copy)


async def test_a_fill_without_any_upstream_says_what_failed(tmp_path: Path) -> None:
    async with peers(2, random_copy()) as (_, (source, target)):
        source.dead = True
        with pytest.raises(TransportError, match=r"no upstream is left: gpu p0: nobody answers.*; disk: "):
            await target.receive([[source.upstream(), DISK]], path=str(tmp_path / "none"))


async def test_a_host_copy_of_the_same_process_is_copied_in_memory() -> None:
    async with peers(1) as (_, (target,)):
        held = random_copy()
        target.offer("host", held)
        await target.receive([[target.upstream("local")]])
        assert same_bytes(target.copy, held)
        assert target.asked == []


class Clock:
    """Its time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now_s += max(0.0, seconds)
        await asyncio.sleep(0)

    def pace(self) -> Pace:
        """A byte takes a second."""
        return Pace(8e-9, clock=lambda: self.now_s, sleep=self.sleep)


async def test_what_is_read_from_disk_or_from_the_own_hosts_memory_keeps_to_its_pace() -> None:
    path, disk, host = tiny_checkpoint("qwen2"), Clock(), Clock()
    checkpoint = inspect_checkpoint(path)
    layout = checkpoint.layout
    async with peers(1, checkpoint=checkpoint) as (_, (alone,)):
        await alone.receive([[DISK]], path=str(path), paces=Paces(disk.pace(), host.pace()))
        assert (disk.now_s, host.now_s) == (pytest.approx(sum(u.num_bytes for u in layout.units)), 0.0)
    disk = Clock()
    async with peers(1) as (_, (alone,)):
        held = random_copy()
        alone.offer("host", held)
        await alone.receive([[Upstream("local", "p0")]], paces=Paces(disk.pace(), host.pace()))
        assert same_bytes(alone.copy, held)
        assert (disk.now_s, host.now_s) == (0.0, pytest.approx(sum(u.num_bytes for u in LAYOUT.units)))


@pytest.mark.parametrize(("kind", "where", "cap_gbps"), [("host", "h", 0.5), ("host", "other", 0.0), ("gpu", "h", 0.0)])
async def test_what_another_process_of_the_own_host_sends_from_its_memory_is_capped(
    kind: str, where: str, cap_gbps: float
) -> None:
    async with peers(2, random_copy()) as (_, (source, target)):
        source.offer("host", source.copy)
        await target.receive([[source.upstream(kind, where)]], paces=Paces(host=Pace(0.5)))
        assert [feed.cap_gbps for _, feed in target.asked] == [cap_gbps]


async def test_a_block_that_went_bad_in_a_host_copy_is_noticed_as_it_is_copied() -> None:
    path = tiny_checkpoint("llama")
    checkpoint = inspect_checkpoint(path)
    layout = checkpoint.layout
    async with peers(2, checkpoint=checkpoint) as (_, (whole, target)):
        await whole.receive([[DISK]], path=str(path))
        held = empty_copy(checkpoint)
        verified = [held.copy_unit(unit, whole.copy) for unit in range(len(layout.units))]
        assert all(verified)
        held.arena.memory(layout.units[1].offset, 1)[0] ^= 1
        assert [target.copy.copy_unit(unit, held) for unit in range(len(layout.units))].count(False) == 1
    async with peers(1, checkpoint=checkpoint) as (_, (target,)):
        target.offer("host", held)
        await target.receive([[target.upstream("local")]], path=str(path))
        assert same_bytes(target.copy, whole.copy), "the unit was read from disk"


async def test_of_a_unit_that_is_here_in_part_only_the_rest_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peers(1) as (_, (target,)):
        held = random_copy()
        target.offer("host", held)
        first = cut(held.layout, CHECK_BYTES)[0]
        target.copy.copy_piece(first, held)
        target.copy.arrived(first)
        copied: list[int] = []
        copy_unit = WeightCopy.copy_unit

        def watched(copy: WeightCopy, unit: int, source: WeightCopy) -> bool:
            copied.append(unit)
            return copy_unit(copy, unit, source)

        monkeypatch.setattr(WeightCopy, "copy_unit", watched)
        await target.receive([[target.upstream("local")]])
        assert sorted(copied) == list(range(1, len(held.layout.units)))
        assert same_bytes(target.copy, held)


async def test_a_fill_that_fails_sends_its_readers_elsewhere_at_once() -> None:
    async with peers(3, random_copy(), stall_s=30.0) as (fabric, (source, failing, last)):
        fabric.set_rate(SLOW_BYTES_PER_S)
        upstream = failing.receive([[source.upstream()]])
        receiving = last.receive([[failing.upstream(), source.upstream()]])
        await progressed(last)
        upstream.cancel()
        await failing.sender.end_feeds_of(failing.copy)
        fabric.set_rate(FAST_BYTES_PER_S)
        await asyncio.wait_for(receiving, timeout=WAIT_S)
        assert same_bytes(last.copy, source.copy)


async def test_a_cancelled_fill_gives_its_buffers_up_before_it_tells_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with peers(2, random_copy(), stall_s=30.0) as (fabric, (source, target)):
        fabric.set_rate(SLOW_BYTES_PER_S)
        order: list[str] = []
        abort, stop = Inflow.abort, Client.stop

        def watched_abort(flow: Inflow) -> None:
            order.append("abort")
            abort(flow)

        async def watched_stop(client: Client, upstream: Upstream, attempt: int) -> None:
            order.append("stop")
            await stop(client, upstream, attempt)
            raise asyncio.CancelledError  # the word to the sender is cancelled in its turn

        monkeypatch.setattr(Inflow, "abort", watched_abort)
        monkeypatch.setattr(Client, "stop", watched_stop)
        receiving = target.receive([[source.upstream()]])
        await progressed(target)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert order == ["abort", "stop"]


async def test_a_lost_notice_only_costs_a_look_at_the_feed() -> None:
    async with peers(3, random_copy(), stall_s=30.0) as (fabric, (source, failing, last)):
        last.deaf = True
        fabric.set_rate(SLOW_BYTES_PER_S)
        upstream = failing.receive([[source.upstream()]])
        receiving = last.receive([[failing.upstream(), source.upstream()]])
        await progressed(last)
        upstream.cancel()
        await failing.sender.end_feeds_of(failing.copy)
        fabric.set_rate(FAST_BYTES_PER_S)
        await asyncio.wait_for(receiving, timeout=WAIT_S)
        assert same_bytes(last.copy, source.copy)


async def test_a_sender_that_starves_is_waited_for_beyond_the_stall_time() -> None:
    async with peers(3, random_copy(), stall_s=5.0) as (_, (source, first, second)):
        receiving = second.receive([[first.upstream()]])
        await asyncio.sleep(6.0)
        assert not receiving.done(), "its upstream lives and has nothing yet"
        await first.receive([[source.upstream()]])
        await receiving
        assert same_bytes(second.copy, source.copy)


async def test_a_living_sender_whose_link_is_stuck_is_given_up() -> None:
    async with peers(3, random_copy(), stall_s=5.0) as (fabric, (stuck, other, target)):
        other.copy = random_copy()
        other.offer("gpu", other.copy)
        fabric.kill(stuck.transport.address)  # answers RPCs, moves no byte
        receiving = target.receive([[stuck.upstream(), other.upstream()]])
        await asyncio.wait_for(receiving, timeout=WAIT_S)
        assert same_bytes(target.copy, other.copy)


class BufferingChannel:
    """Into a network that takes every message at once, and delivers it late or never."""

    def __init__(self, channel: Channel, delay_s: float) -> None:
        self._channel = channel
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()

    @property
    def alive(self) -> bool:
        return self._channel.alive

    def send(self, buffer: Buffer, tag: int) -> Transfer:
        data = bytearray(buffer)
        self._loop.call_soon_threadsafe(self._loop.call_later, self._delay_s, self._channel.send, data, tag)
        taken = PostedTransfer(data, tag, lambda _: None)
        taken.finish(None)
        return taken

    async def close(self, timeout_s: float = 0.0) -> None:
        await self._channel.close(timeout_s)

    def abort(self) -> None:
        self._channel.abort()


@pytest.mark.parametrize(("delay_s", "asked"), [(0.8, ["p0"]), (60.0, ["p0", "p1"])])
async def test_what_was_sent_is_waited_for_until_the_link_counts_as_stuck(
    monkeypatch: pytest.MonkeyPatch, delay_s: float, asked: list[str]
) -> None:
    async with peers(3, random_copy(), stall_s=8.0) as (_, (source, other, target)):
        other.copy = random_copy()
        other.offer("gpu", other.copy)
        connect = source.transport.connect

        async def connect_buffered(address: bytes, *, same_host: bool, timeout_s: float = 10.0) -> Channel:
            return BufferingChannel(await connect(address, same_host=same_host, timeout_s=timeout_s), delay_s)

        monkeypatch.setattr(source.transport, "connect", connect_buffered)
        await asyncio.wait_for(target.receive([[source.upstream(), other.upstream()]]), timeout=WAIT_S)
        assert [name for name, _ in target.asked] == asked
        assert same_bytes(target.copy, other.copy)


async def test_a_receiver_that_dies_ends_the_feed_and_frees_the_copy() -> None:
    async with peers(2, random_copy()) as (fabric, (source, target)):
        fabric.set_rate(SLOW_BYTES_PER_S)
        receiving = target.receive([[source.upstream()]])
        await progressed(target)
        assert source.pins == 1
        target.die(fabric)
        receiving.cancel()
        async with asyncio.timeout(WAIT_S):
            while source.pins:
                await asyncio.sleep(0.01)


async def test_a_feed_that_begins_after_its_copy_failed_is_refused() -> None:
    async with peers(3, random_copy()) as (_, (source, failing, last)):
        connecting = asyncio.Event()
        go_on = asyncio.Event()
        connect = failing.dial

        async def slowly(address: bytes, host: str) -> Channel:
            connecting.set()
            await go_on.wait()
            return await connect(address, host)

        failing.dial = slowly
        receiving = last.receive([[failing.upstream(), source.upstream()]])
        await connecting.wait()
        failing.copies.withdraw("gpu", failing.copy)
        await failing.sender.end_feeds_of(failing.copy)
        go_on.set()
        await asyncio.wait_for(receiving, timeout=WAIT_S)
        assert same_bytes(last.copy, source.copy)


async def test_a_receiver_that_gives_up_stops_its_sender() -> None:
    async with peers(3, random_copy(), stall_s=30.0) as (fabric, (source, other, target)):
        other.copy = random_copy()
        other.offer("gpu", other.copy)
        fabric.set_rate(SLOW_BYTES_PER_S)
        receiving = target.receive([[source.upstream()]])
        await progressed(target)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert target.stopped == [("p0", 0)]
        async with asyncio.timeout(WAIT_S):
            while source.pins:
                await asyncio.sleep(0.01)
        with pytest.raises(Conflict):
            await source.sender.on_feed(target.asked[0][1])


async def test_nobody_is_dead_for_not_answering_right_after_a_bus_outage() -> None:
    async with peers(2, random_copy()) as (fabric, (source, target)):
        fabric.set_rate(4_000_000)
        receiving = target.receive([[source.upstream()]], chunk_bytes=8 * CHECK_BYTES)
        await eventually(lambda: target.first_bytes)
        source.dead, target.bus_up_s = True, 0.5  # it sends, and nobody hears its answers yet
        await asyncio.sleep(1.5)
        source.dead, target.bus_up_s = False, 3600.0
        await receiving
        assert len(target.asked) == 1
        assert same_bytes(target.copy, source.copy)


async def test_a_unit_that_stays_bad_is_read_from_disk() -> None:
    path = tiny_checkpoint("llama")
    checkpoint = inspect_checkpoint(path)
    layout = checkpoint.layout
    async with peers(2, checkpoint=checkpoint) as (_, (source, target)):
        await source.receive([[DISK]], path=str(path))
        good = source.copy.digest()
        source.copy.arena.memory(layout.units[1].offset, 1)[0] ^= 0xFF
        await target.receive([[source.upstream()]], path=str(path))
        assert target.copy.digest() == good
        assert target.copy.bad_ranges(1) == ()


async def test_a_stripe_from_disk_leaves_the_other_stripes_pieces_alone() -> None:
    path = tiny_checkpoint("llama")
    checkpoint = inspect_checkpoint(path)
    async with peers(3, checkpoint=checkpoint) as (fabric, (source, gone, target)):
        await source.receive([[DISK]], path=str(path))
        gone.dead = True
        fabric.set_rate(3_000_000)
        await target.receive([[source.upstream()], [gone.upstream(), DISK]], path=str(path))
        assert same_bytes(target.copy, source.copy)
        assert len(target.asked) == 2


async def test_a_thread_that_writes_is_waited_for_by_a_fill_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint("llama")
    checkpoint = inspect_checkpoint(path)
    begun, go_on, ended = threading.Event(), threading.Event(), list[float]()

    def slow_load(*_: object) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        ended.append(time.monotonic())

    monkeypatch.setattr(checkpoint_reader, "load_unit", slow_load)
    async with peers(1, checkpoint=checkpoint) as (_, (target,)):
        filling = target.receive([[DISK]], path=str(path))
        try:
            await eventually(begun.is_set)
            filling.cancel()
            await asyncio.sleep(0.2)
            assert not filling.done(), "the thread still writes"
        finally:
            go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await filling
        assert len(ended) == 1
        await asyncio.sleep(0.2)
        assert len(ended) == 1


async def test_a_cancellation_does_not_hide_that_buffers_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_completion, "SETTLE_S", 0.3)

    async def receive_and_quarantine() -> bool:
        return await flow_completion.ends_soon(lambda: False)

    waiting = asyncio.create_task(receive_and_quarantine())
    await asyncio.sleep(0.05)
    waiting.cancel()
    assert await waiting is False
    monkeypatch.setattr(flow_completion, "SETTLE_S", 60.0)
    is_quiet = False
    waiting = asyncio.create_task(flow_completion.ends_soon(lambda: is_quiet))
    await asyncio.sleep(0.05)
    waiting.cancel()
    is_quiet = True
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_capped_stripe_keeps_to_its_rate() -> None:
    async with peers(2, random_copy()) as (_, (source, target)):
        gbps = LAYOUT.num_bytes * 8 / 1e9 / 0.5
        began = asyncio.get_running_loop().time()
        await target.receive([StripeSources(1.0, (source.upstream(),), cap_gbps=gbps)])
        assert asyncio.get_running_loop().time() - began >= 0.4
        assert same_bytes(target.copy, source.copy)


async def test_a_sender_refuses_what_it_cannot_send() -> None:
    async with peers(2, random_copy()) as (_, (source, target)):
        await target.receive([[source.upstream()]])
        (_, feed), *_ = target.asked
        await eventually(lambda: source.pins == 0)  # it may end after what it sent has arrived

        def changed(**fields: object) -> Feed:
            return msgspec.structs.replace(feed, **fields)

        refusals: list[tuple[Feed, type[BlitzError]]] = [
            (changed(attempt=1, model_hash="other"), NotFound),
            (changed(attempt=1, kind="host"), NotFound),
            (changed(attempt=1, pieces=b""), BadRequest),
            (changed(attempt=1, pieces=b"\0" * len(feed.pieces)), BadRequest),
            (changed(attempt=1, chunk_bytes=CHECK_BYTES + 1), BadRequest),
        ]
        for refused, error in refusals:
            with pytest.raises(error):
                await source.sender.on_feed(refused)
        assert source.pins == 0
        with pytest.raises(NotFound):
            await source.sender.on_feed_state(GetFeedState(epoch=feed.epoch, attempt=1))


async def test_a_feed_that_runs_is_not_begun_twice() -> None:
    async with peers(2, random_copy()) as (fabric, (source, target)):
        fabric.set_rate(SLOW_BYTES_PER_S)
        receiving = target.receive([[source.upstream()]])
        await progressed(target)
        with pytest.raises(Conflict):
            await source.sender.on_feed(target.asked[0][1])
        fabric.set_rate(FAST_BYTES_PER_S)
        await receiving


def test_a_model_larger_than_the_arena_is_refused() -> None:
    with pytest.raises(TransportError, match="ARENA"):
        WeightCopy(LAYOUT, Arena(HOST.allocate(4096)), "")


def test_arrivals_are_seen_whoever_cut_the_chunks() -> None:
    copy = empty_copy()
    coarse, fine = cut(LAYOUT, 4 * CHECK_BYTES), PIECES
    for piece in fine:
        if piece.unit == 0 and not piece.is_checksums:
            assert copy.arrived(piece) is False
    whole = [p for p in coarse if p.unit == 0]
    assert [copy.has(p) for p in whole] == [True] * (len(whole) - 1) + [False]
    assert copy.arrived(whole[-1]) is True
    assert copy.arrived(whole[-1]) is False, "a unit becomes whole once"
    assert copy.unit_arrived(0)
    assert not copy.unit_arrived(1)
