"""The tensor transport: bytes between the memories of two workers. Implementations: ``ucx`` and ``memory``.

Receives are matched by tag, wherever they come from. A tag is used once (``tags.tag_of``).
Buffers are anything with the buffer protocol (numpy arrays, memoryviews) or
``__cuda_array_interface__``, C-contiguous. **A buffer belongs to the transport from the call until
the transfer is done**: the caller must neither free, move nor (for sends) write it.
Every method may be called from any thread; no method blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from shared.transport.traffic import TrafficCounters

Buffer = Any
"""C-contiguous memory; see the module's docstring."""

CLOSE_TIMEOUT_S = 5.0
"""How long a channel's ``close`` waits for posted sends unless told otherwise."""


class Transfer(Protocol):
    """One posted send or receive."""

    @property
    def done(self) -> bool:
        """Whether it ended, well or not; the buffer is the caller's again."""

    @property
    def error(self) -> Exception | None:
        """Why it failed (``PeerLost``, ``TransferAborted``, ``TransportError``); None while running or well."""

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(self)`` **on the transport's thread** when it ends (at once, on the
        calling thread, if it has). The callback may post more transfers; it must be quick and
        must not raise. Chains forward chunks this way, without a trip through an event loop."""

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end. Raises the transfer's error. On time-out the transfer is aborted and
        ``DeadlineExceeded`` raised; the buffer is free only when ``done`` turns true."""

    def abort(self) -> None:
        """Ask for the end. The buffer stays quarantined until ``done``."""


class Channel(Protocol):
    """A connection to one peer."""

    @property
    def alive(self) -> bool:
        """False once the peer is known to be lost or the channel was closed."""

    def send(self, buffer: Buffer, tag: int) -> Transfer:
        """Post a send. Raises nothing: failures end the transfer."""

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish posted sends, then disconnect. What is not sent after ``timeout_s`` is aborted."""

    def abort(self) -> None:
        """Disconnect at once; posted sends end with ``TransferAborted``.

        One exception: inside a host a send that a dead peer never took may stay quarantined, that is not ``done``,
        until the transport closes. Who waits for it sets a deadline."""


class TensorTransport(Protocol):
    """One per worker process. Owns a thread that makes progress, polling only while transfers
    or connects are posted and blocking otherwise."""

    @property
    def address(self) -> bytes:
        """What peers connect to."""

    @property
    def peers(self) -> frozenset[bytes]:
        """Addresses of the peers that hold a connection open here, whoever made it."""

    async def peer_transports(self) -> Mapping[bytes, tuple[str, ...]]:
        """By address of a connected peer, what the connection to it runs over: transport and device, as UCX names them
        (``tcp/eth0``, ``cuda_ipc/cuda``). Which of several a message takes depends on its size and memory."""

    @property
    def traffic(self) -> TrafficCounters:
        """What it has carried. A receive counts where ``source`` names its sender."""

    async def connect(self, address: bytes, *, same_host: bool, timeout_s: float = 10.0, lane: int = 0) -> Channel:
        """Connect to a peer and wait until the connection carries data. Between hosts the channel
        notices a lost peer by itself; inside a host (shared memory) only a peer that closes its transport is
        noticed, of a dead one the caller must tell (``forget``).
        Channels are cached per address and lane: a second call returns the living one. What is sent on one
        lane does not wait behind what is sent on another."""

    def recv(self, buffer: Buffer, tag: int, *, source: Channel | None = None) -> Transfer:
        """Post a receive of exactly ``len(buffer)`` bytes. A shorter or longer message is a ``TransportError``.

        A tag says nothing about the sender, so a receive that no message has matched yet can
        only end with ``PeerLost`` when ``source`` names the channel to the peer that will send.

        A message may come before its receive is posted. A limited number of such messages wait; beyond it
        the oldest is thrown away, its sender counts it as sent, and a receive posted for it later ends with
        ``TransportError`` (while its tag is remembered, then at its deadline)."""

    def forget(self, address: bytes) -> None:
        """A peer of this host is gone for good: its channels are lost, receives that only it could match end with
        ``PeerLost``, what it held open is released. Its buffers stay quarantined as after ``abort``.

        Of a peer on another host the transport learns by itself; this changes nothing. A peer that lives after all
        loses its channels to this side too, and may connect again."""

    async def close(self) -> None:
        """Abort what is posted, disconnect, stop the thread; ends in seconds whatever the peers do."""
