"""A transport that lets a test touch what is sent: flip its bytes, or lose it on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from shared.errors import TransferAborted
from shared.transport.base import Buffer, Channel, TensorTransport, Transfer
from shared.transport.tags import MAX_NUMBER
from shared.transport.traffic import TrafficCounters
from shared.transport.transfer import PostedTransfer

Tamper = Callable[[Buffer, int], tuple[Buffer, int]]
"""(buffer, tag) as posted -> as sent."""

_ASTRAY = 1 << 62


def index_of(tag: int) -> int:
    """The piece's index in its transfer."""
    return tag & MAX_NUMBER


def corrupt(index: int) -> Tamper:
    """Flip a byte of the first message with this index, once."""
    done = False

    def tamper(buffer: Buffer, tag: int) -> tuple[Buffer, int]:
        nonlocal done
        if done or index_of(tag) != index:
            return buffer, tag
        done = True
        bad = bytearray(buffer)
        bad[len(bad) // 2] ^= 0xFF
        return bad, tag

    return tamper


def lose_from(index: int) -> Tamper:
    """From this index on, messages reach nobody and their sends never complete, as on a link that stalls."""

    def tamper(buffer: Buffer, tag: int) -> tuple[Buffer, int]:
        return buffer, tag | _ASTRAY if index_of(tag) >= index else tag

    return tamper


_LOOK_S = 0.002


class TamperingTransport(TensorTransport):
    """Passes everything to a real transport; ``tamper`` changes what goes out."""

    def __init__(self, real: TensorTransport) -> None:
        self.real = real
        self.tamper: Tamper | None = None
        self.stuck_from: int | None = None
        """Receives from this index on never end, not even when they are aborted."""
        self.delay_s = 0.0
        """Every message of lane 0 leaves this much later, one after the other. Time in which this process is not run
        delays one message, not all: what the engine computes meanwhile is no more, either."""
        self.holds: Callable[[], bool] = lambda: False
        """What is late waits further while this is so; asked on the link's thread."""
        self._link: SimpleQueue[tuple[float, Callable[[], None]] | None] = SimpleQueue()
        self._slow: threading.Thread | None = None

    @property
    def address(self) -> bytes:
        return self.real.address

    async def connect(self, address: bytes, *, same_host: bool, timeout_s: float = 10.0, lane: int = 0) -> Channel:
        real = await self.real.connect(address, same_host=same_host, timeout_s=timeout_s, lane=lane)
        return _TamperingChannel(self, real, lane)

    def recv(self, buffer: Buffer, tag: int, *, source: Channel | None = None) -> Transfer:
        if self.stuck_from is not None and index_of(tag) >= self.stuck_from:
            return PostedTransfer(buffer, tag, lambda _: None)
        return self.real.recv(buffer, tag, source=source.channel if isinstance(source, _TamperingChannel) else source)

    def send_slowly(self, send: Callable[[], None]) -> None:
        """Once those before it have left, and ``delay_s`` later."""
        if self._slow is None:
            self._slow = threading.Thread(target=self._run_slowly, daemon=True)
            self._slow.start()
        self._link.put((self.delay_s, send))

    def _run_slowly(self) -> None:
        while (next_one := self._link.get()) is not None:
            delay_s, send = next_one
            time.sleep(delay_s)
            while self.holds():
                time.sleep(_LOOK_S)
            send()

    @property
    def peers(self) -> frozenset[bytes]:
        return self.real.peers

    async def peer_transports(self) -> Mapping[bytes, tuple[str, ...]]:
        return await self.real.peer_transports()

    @property
    def traffic(self) -> TrafficCounters:
        return self.real.traffic

    def forget(self, address: bytes) -> None:
        self.real.forget(address)

    async def close(self) -> None:
        self._link.put(None)
        await self.real.close()


class _TamperingChannel(Channel):
    def __init__(self, transport: TamperingTransport, channel: Channel, lane: int) -> None:
        self._transport = transport
        self._lane = lane
        self.channel = channel

    @property
    def alive(self) -> bool:
        return self.channel.alive

    def send(self, buffer: Buffer, tag: int) -> Transfer:
        if self._transport.delay_s and self._lane == 0:
            return self._send_later(buffer, tag)
        tamper = self._transport.tamper
        return self.channel.send(*(tamper(buffer, tag) if tamper else (buffer, tag)))

    def _send_later(self, buffer: Buffer, tag: int) -> Transfer:
        transfer = PostedTransfer(buffer, tag, lambda transfer: transfer.finish(TransferAborted("aborted")))

        def send() -> None:
            if not transfer.done:
                sent = self.channel.send(buffer, tag)
                sent.add_done_callback(lambda real: transfer.finish(real.error))

        self._transport.send_slowly(send)
        return transfer

    async def close(self, timeout_s: float = 5.0) -> None:
        await self.channel.close(timeout_s)

    def abort(self) -> None:
        self.channel.abort()
