"""The tensor transport within one process: the honest twin of ``shared.transport.ucx``."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from shared.errors import DeadlineExceeded, PeerLost, TransferAborted, TransportError
from shared.messages.traffic import Direction
from shared.transport.base import CLOSE_TIMEOUT_S, Buffer, Channel, Transfer
from shared.transport.mailbox import Mailbox
from shared.transport.tags import MAX_UNCLAIMED, RecentTags
from shared.transport.traffic import TrafficCounters
from shared.transport.transfer import PostedTransfer, ended_within

_SLEEP_S = 1.0
_CLOSE_S = 2.0


class MemoryFabric:
    """What joins memory transports: addresses, the rate of the wire, and the power to kill a peer."""

    def __init__(self, mailbox: Callable[[], Mailbox] | None = None) -> None:
        """``mailbox``: whoever runs the commands of one that it makes does a transport's work; by default each has a
        thread for that."""
        self._mailbox = mailbox
        self._transports: dict[bytes, MemoryTransport] = {}
        self._next_id = 1
        self.bytes_per_s: float | None = None

    def start(self, *, name: str, max_unclaimed: int = MAX_UNCLAIMED) -> MemoryTransport:
        """A new transport on this fabric. ``max_unclaimed``: messages kept for a receive not posted yet."""
        address = f"memory:{name}:{self._next_id}".encode()
        self._next_id += 1
        mailbox = None if self._mailbox is None else self._mailbox()
        transport = self._transports[address] = MemoryTransport(self, address, name, max_unclaimed, mailbox)
        return transport

    def find(self, address: bytes) -> MemoryTransport | None:
        """The transport at an address, alive or killed; None when there never was one or it closed."""
        return self._transports.get(address)

    def forget(self, address: bytes) -> None:
        """Take a closed transport off the fabric; it has told its peers."""
        self._transports.pop(address, None)
        for transport in list(self._transports.values()):
            transport.post(lambda transport=transport: transport.peer_left(address))

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Limit each sender to this rate; None lifts the limit."""
        self.bytes_per_s = bytes_per_s

    def kill(self, address: bytes) -> None:
        """Let a peer die without a word: channels between hosts lose it, channels inside a host hang."""
        victim = self._transports[address]
        victim.killed = True
        for transport in list(self._transports.values()):
            if transport is not victim:
                transport.post(lambda transport=transport: transport.peer_lost(address))


class MemoryChannel:
    """A ``Channel``; made by ``MemoryTransport.connect``."""

    def __init__(self, transport: MemoryTransport, address: bytes, same_host: bool) -> None:
        self._transport = transport
        self.address = address
        self.same_host = same_host
        self.lost = False
        self.closed = False
        self.sends: set[PostedTransfer] = set()

    @property
    def alive(self) -> bool:
        """False once the peer is known to be lost or the channel was closed."""
        return not self.closed and not self.lost

    def send(self, buffer: Buffer, tag: int) -> Transfer:
        """Post a send; failures end the transfer."""
        return self._transport.post_send(self, buffer, tag)

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish posted sends, then disconnect; after ``timeout_s`` disconnect as ``abort`` does."""
        self.closed = True
        if not await ended_within(self.sends.copy(), timeout_s):
            self.abort()

    def abort(self) -> None:
        """Disconnect at once; posted sends end with ``TransferAborted``."""
        self.closed = True
        for transfer in self.sends.copy():
            transfer.abort()


class MemoryTransport:
    """A ``TensorTransport``; make it with ``MemoryFabric.start``."""

    def __init__(
        self, fabric: MemoryFabric, address: bytes, name: str, max_unclaimed: int, mailbox: Mailbox | None = None
    ) -> None:
        self._fabric = fabric
        self._address = address
        self._name = name
        self.killed = False
        self._channels: dict[tuple[bytes, int], MemoryChannel] = {}
        """By address and lane."""
        self._expected: dict[int, tuple[PostedTransfer, memoryview, MemoryChannel | None]] = {}
        self._unclaimed: dict[int, tuple[PostedTransfer, memoryview, MemoryTransport]] = {}
        self._max_unclaimed = max_unclaimed
        self._aborted_tags = RecentTags()
        self._overflowed = RecentTags()
        self.num_overflowed = 0
        self.traffic = TrafficCounters()
        self._mailbox = mailbox or Mailbox()
        self._stopping = False
        self._thread: threading.Thread | None = None
        if mailbox is None:
            self._thread = threading.Thread(target=self._run, name=f"memory-{name}", daemon=True)
            self._thread.start()

    @property
    def address(self) -> bytes:
        """What peers connect to."""
        return self._address

    @property
    def peers(self) -> frozenset[bytes]:
        """Addresses of the peers of living channels: only who connects holds anything open here."""
        return frozenset(address for (address, _), channel in self._channels.copy().items() if channel.alive)

    async def peer_transports(self) -> Mapping[bytes, tuple[str, ...]]:
        """Of the peers of living channels."""
        return dict.fromkeys(self.peers, ("memory/fabric",))

    async def connect(
        self, address: bytes, *, same_host: bool, timeout_s: float = 10.0, lane: int = 0
    ) -> MemoryChannel:
        """Connect to a peer. Raises ``TransportError`` for no such address, ``PeerLost`` or, inside
        a host, ``DeadlineExceeded`` for a dead one."""
        channel = self._channels.get((address, lane))
        if channel is not None and channel.alive:
            return channel
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no answer from {address!r} in {timeout_s} s")
        peer = self._fabric.find(address)
        if self._stopping or peer is None:
            raise TransportError(f"cannot connect to {address!r}: no such transport, or this one is closed")
        if peer.killed and not same_host:
            raise PeerLost(f"the peer {address!r} is lost")
        if peer.killed:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded(f"no answer from {address!r} in {timeout_s} s")
        channel = self._channels[address, lane] = MemoryChannel(self, address, same_host)
        return channel

    def recv(self, buffer: Buffer, tag: int, *, source: Channel | None = None) -> Transfer:
        """Post a receive of exactly ``len(buffer)`` bytes; see ``base``."""
        transfer = PostedTransfer(buffer, tag, self._abort_recv)
        view = _view_of(transfer, writable=True)
        channel = source if isinstance(source, MemoryChannel) else None
        if channel is not None:
            transfer.add_done_callback(lambda _: self._count("received", transfer, channel))
        if view is not None and not self.post(lambda: self._recv(transfer, view, channel)):
            transfer.finish(TransferAborted(f"transport {self._name} is closed"))
        return transfer

    def forget(self, address: bytes) -> None:
        """A peer of this host is gone for good; see ``base``."""
        self.post(lambda: self._forget(address))

    async def close(self) -> None:
        """Abort what is posted, disconnect, stop the thread."""
        if self._thread is None:
            self._stop()
            self._end()
            return
        self.post(self._stop)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)

    @property
    def num_expected(self) -> int:
        """Receives that are posted and have no message yet."""
        return len(self._expected)

    @property
    def num_unclaimed(self) -> int:
        """Messages that wait for their receive."""
        return len(self._unclaimed)

    # From here on: for channels, peers and the fabric.

    def post(self, command: Any) -> bool:
        """Run ``command`` on this transport's thread; False when that has ended."""
        return self._mailbox.post(command)

    def post_send(self, channel: MemoryChannel, buffer: Buffer, tag: int) -> PostedTransfer:
        """Post a send on a channel."""
        transfer = PostedTransfer(buffer, tag, lambda transfer: self._abort_send(transfer, channel))
        if channel.closed:
            transfer.finish(TransferAborted("the channel is closed"))
        elif (view := _view_of(transfer, writable=False)) is not None:
            channel.sends.add(transfer)
            transfer.add_done_callback(lambda _: channel.sends.discard(transfer))
            transfer.add_done_callback(lambda _: self._count("sent", transfer, channel))
            if not self.post(lambda: self._send(transfer, view, channel)):
                transfer.finish(TransferAborted(f"transport {self._name} is closed"))
        return transfer

    def _count(self, direction: Direction, transfer: PostedTransfer, channel: MemoryChannel) -> None:
        if transfer.error is None:
            self.traffic.count(direction, transfer.tag, transfer.nbytes, same_host=channel.same_host)

    def peer_lost(self, address: bytes) -> None:
        """A peer died: end what waits for it on channels that notice."""
        for channel in self._channels_to(address):
            if not channel.same_host:
                self._channel_lost(channel)

    def peer_left(self, address: bytes) -> None:
        """A peer says that it closes, or that it takes this one for dead."""
        for channel in self._channels_to(address):
            self._channel_lost(channel)

    def _channels_to(self, address: bytes) -> list[MemoryChannel]:
        return [channel for (known, _), channel in self._channels.copy().items() if known == address]

    def _channel_lost(self, channel: MemoryChannel) -> None:
        channel.lost = True
        error = PeerLost(f"the peer {channel.address!r} is lost")
        for transfer in () if channel.same_host else channel.sends.copy():
            transfer.finish(error)
        for tag, (transfer, _, source) in list(self._expected.items()):
            if source is channel:
                del self._expected[tag]
                self._aborted_tags.add(tag)
                transfer.finish(error)

    def arrived(self, send: PostedTransfer, data: memoryview, sender: MemoryTransport) -> None:
        """A message for this transport, on its thread."""
        if self.killed:
            return
        if self._stopping or send.tag in self._aborted_tags:
            sender.post(send.finish)
        elif (expected := self._expected.pop(send.tag, None)) is not None:
            self._deliver(send, data, sender, expected[0], expected[1])
        else:
            self.set_aside(send, data, sender)

    # From here on: the transport's thread.

    def _run(self) -> None:
        self._mailbox.own()
        while not self._stopping:
            if not self._mailbox.run_posted():
                self._mailbox.sleep(_SLEEP_S)
        self._end()

    def _end(self) -> None:
        closed = TransferAborted(f"transport {self._name} was closed")
        for transfer, _, _ in list(self._expected.values()):
            transfer.finish(closed)
        for channel in self._channels.values():
            channel.closed = True
            for transfer in channel.sends.copy():
                transfer.finish(closed)
        for send, _, sender in self._unclaimed.values():
            sender.post(send.finish)
        self._fabric.forget(self._address)
        self._mailbox.close()

    def _forget(self, address: bytes) -> None:
        for channel in self._channels_to(address):
            if channel.same_host:
                self._channel_lost(channel)
        peer = self._fabric.find(address)
        if peer is not None and not peer.killed:
            peer.post(lambda: peer.peer_left(self._address))

    def _stop(self) -> None:
        self._stopping = True

    def _send(self, transfer: PostedTransfer, data: memoryview, channel: MemoryChannel) -> None:
        if transfer.done or self.killed:
            return
        if transfer.aborted:
            transfer.finish(TransferAborted("the send was aborted"))
            return
        peer = self._fabric.find(channel.address)
        if channel.lost or (not channel.same_host and (peer is None or peer.killed)):
            channel.lost = True
            transfer.finish(PeerLost(f"the peer {channel.address!r} is lost"))
            return
        if (rate := self._fabric.bytes_per_s) is not None:
            time.sleep(transfer.nbytes / rate)
        if peer is not None:
            peer.post(lambda: peer.arrived(transfer, data, self))

    def _recv(self, transfer: PostedTransfer, view: memoryview, source: MemoryChannel | None) -> None:
        if transfer.tag in self._expected:
            transfer.finish(TransportError(f"tag {transfer.tag:#x} is posted already"))
        elif (message := self._unclaimed.pop(transfer.tag, None)) is not None:
            self._deliver(*message, transfer, view)
        elif transfer.tag in self._overflowed:
            transfer.finish(
                TransportError(f"the message with tag {transfer.tag:#x} came too early and was thrown away")
            )
        elif source is not None and source.lost:
            transfer.finish(PeerLost(f"the peer {source.address!r} is lost"))
        else:
            self._expected[transfer.tag] = (transfer, view, source)

    def set_aside(self, send: PostedTransfer, data: memoryview, sender: MemoryTransport) -> None:
        if (same := self._unclaimed.pop(send.tag, None)) is not None:
            same[2].post(same[0].finish)
        self._unclaimed[send.tag] = (send, data, sender)
        if len(self._unclaimed) > self._max_unclaimed:
            oldest, _, its_sender = self._unclaimed.pop(next(iter(self._unclaimed)))
            its_sender.post(oldest.finish)
            self._overflowed.add(oldest.tag)
            self.num_overflowed += 1

    def _deliver(
        self, send: PostedTransfer, data: memoryview, sender: MemoryTransport, recv: PostedTransfer, view: memoryview
    ) -> None:
        error: TransportError | None = None
        if send.done:
            error = PeerLost("the sender of the message is gone")
        elif data.nbytes != view.nbytes:
            error = TransportError(f"the message with tag {recv.tag:#x} has {data.nbytes} bytes, not {view.nbytes}")
        else:
            view[:] = data
        if not sender.post(send.finish):
            send.finish()
        recv.finish(error)

    def _abort_recv(self, transfer: PostedTransfer) -> None:
        self.post(lambda: self._drop_recv(transfer))

    def _drop_recv(self, transfer: PostedTransfer) -> None:
        if (expected := self._expected.get(transfer.tag)) is not None and expected[0] is transfer:
            del self._expected[transfer.tag]
            self._aborted_tags.add(transfer.tag)
            transfer.finish(TransferAborted(f"the transfer with tag {transfer.tag:#x} was aborted"))

    def _abort_send(self, transfer: PostedTransfer, channel: MemoryChannel) -> None:
        """Take a send back from the peer's thread, which alone knows whether it is being copied."""
        transfer.aborted = True
        error = TransferAborted(f"the transfer with tag {transfer.tag:#x} was aborted")
        peer = self._fabric.find(channel.address)
        if peer is None or not peer.post(lambda: peer.withdraw(transfer, error, self)):
            self.post(lambda: transfer.finish(error))

    def withdraw(self, send: PostedTransfer, error: TransferAborted, sender: MemoryTransport) -> None:
        """Forget a message whose sender gave it up. The dead take nothing any more, so this holds for them too."""
        if (waiting := self._unclaimed.get(send.tag)) is not None and waiting[0] is send:
            del self._unclaimed[send.tag]
        sender.post(lambda: send.finish(error))


def _view_of(transfer: PostedTransfer, *, writable: bool) -> memoryview | None:
    """The buffer as flat bytes, or None when the transfer has ended by this."""
    try:
        view = memoryview(transfer.buffer)
        flat = view.cast("B") if view.nbytes else memoryview(bytearray())
    except (TypeError, ValueError) as error:
        transfer.finish(TransportError(f"not a C-contiguous buffer: {error}"))
        return None
    if writable and view.readonly:
        transfer.finish(TransportError("the buffer of a receive is read-only"))
        return None
    transfer.nbytes = view.nbytes
    return flat
