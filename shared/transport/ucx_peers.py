"""The peers of a UCX transport: endpoints, dialing, and the control messages between transports.

A dial is HELLO there and WELCOME back: the connection carries data in both directions then. An endpoint
closes when neither side uses it, and when the other side says BYE: UCX has paired the two endpoints of a lane, and
large messages no longer pass one whose other half is gone. Everything here runs on the transport's thread, but for
reads of ``Peer.lost`` and ``UcxPeers.addresses``.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable
from typing import Any

from shared.errors import BadAddress, PeerLost, TransportError
from shared.transport.base import Channel
from shared.transport.control import CLOSES, CONTROL_TAG, Control, ControlKind
from shared.transport.transfer import PostedTransfer
from shared.transport.ucx_worker import UcxWorker, check

_log = logging.getLogger(__name__)

LEAVING_S = 5.0
"""How long the sends to a peer of this host that closes may take to end. It closes within half of that."""

Waiter = concurrent.futures.Future[Any]
"""Of a caller of ``connect``; its result is the channel."""


class Peer:
    """An endpoint and who uses it."""

    def __init__(self, address: bytes, lane: int, same_host: bool, endpoint: Any) -> None:
        self.address = address
        self.lane = lane
        self.same_host = same_host
        self.endpoint = endpoint
        self.lost = False
        """Nothing is sent to it any more."""
        self.closed = False
        """Its endpoint is."""
        self.used_by_remote = False
        self.channel: Channel | None = None
        self.dial = 0
        self.waiters: list[Waiter] = []
        self.sends: set[PostedTransfer] = set()


class UcxPeers:
    """All peers of one transport, by address and lane.

    A lane other than 0 is an endpoint of its own in this direction only: the other side answers on its lane 0.
    """

    def __init__(
        self,
        worker: UcxWorker,
        name: str,
        make_channel: Callable[[Peer], Channel],
        on_lost: Callable[[Peer, PeerLost], None],
        on_broken: Callable[[Peer, PeerLost], None],
        on_cancel: Callable[[int], None],
    ) -> None:
        """``on_lost``: a peer sends nothing new; ``on_broken``: nothing more comes from it, then ``on_lost``;
        ``on_cancel``: a sender gave the message of a tag up."""
        self._worker = worker
        self._name = name
        self._make_channel = make_channel
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._on_cancel = on_cancel
        self._peers: dict[tuple[bytes, int], Peer] = {}
        self._dials: dict[int, Peer] = {}
        self._next_dial = 1
        self._broken: list[Peer] = []
        self._leaving: dict[Peer, float] = {}
        """Closing their transports: what is under way may still end well. With the time of the farewell."""

    @property
    def busy(self) -> bool:
        """Whether dials wait for their answer."""
        return bool(self._dials)

    @property
    def any_on_this_host(self) -> bool:
        """Whether a peer is reached over shared memory, which answers within microseconds."""
        return any(peer.same_host for peer in self._peers.values())

    @property
    def addresses(self) -> frozenset[bytes]:
        """Of the peers that are not lost. From any thread."""
        return frozenset(address for address, _ in tuple(self._peers))

    def transports(self) -> dict[bytes, tuple[str, ...]]:
        """What the connections to each peer run over, those of all its lanes together."""
        found: dict[bytes, set[str]] = {}
        for peer in self.all():
            if peer not in self._broken:  # UCX has closed those already
                found.setdefault(peer.address, set()).update(self._worker.transports(peer.endpoint))
        return {address: tuple(sorted(names)) for address, names in found.items()}

    def all(self) -> list[Peer]:
        """The peers that are not lost."""
        return list(self._peers.values())

    # Connecting.

    def dial(self, address: bytes, lane: int, same_host: bool, waiter: Waiter) -> None:
        """Answer ``waiter`` with a channel to the peer, the living one or a new one."""
        if waiter.cancelled():
            return
        try:
            check(address)
            peer = self._at(address, lane, same_host)
        except (TransportError, BadAddress) as error:
            _settle(waiter, error)
            return
        if peer.channel is not None and peer.channel.alive:
            _settle(waiter, peer.channel)
            return
        peer.waiters.append(waiter)
        if not peer.dial:
            peer.dial, self._next_dial = self._next_dial, self._next_dial + 1
            self._dials[peer.dial] = peer
            self.tell(peer, Control(ControlKind.HELLO, peer.dial, peer.same_host, self._worker.address))

    def forget_dial(self, address: bytes, lane: int) -> None:
        """Give up a dial for which no caller waits any more."""
        peer = self._peers.get((address, lane))
        if peer is None or not peer.dial or any(not waiter.cancelled() for waiter in peer.waiters):
            return
        self._dials.pop(peer.dial, None)
        peer.dial = 0
        peer.waiters = []
        if not peer.used_by_remote:
            self._disconnect(peer)

    def drop(self, channel: Channel, peer: Peer, *, force: bool) -> None:
        """Give up this side's use of a peer; disconnect when the peer does not use the endpoint either."""
        if peer.channel is not channel:
            return
        if force:
            for transfer in tuple(peer.sends):
                transfer.abort()
        peer.channel = None
        if peer.lost or (peer.used_by_remote and not (force and peer.sends)):
            return
        self._hang_up(peer)

    # Control messages.

    def tell(self, peer: Peer, control: Control) -> None:
        """Send a control message; a broken connection shows up in ``end_lost``."""
        data = self._worker.array(bytearray(control.encode()))
        try:
            self._worker.send(peer.endpoint, data, CONTROL_TAG, lambda _: None)
        except PeerLost as error:
            _log.info("transport %s: %s", self._name, error)
            self._broken.append(peer)

    def on_control(self, data: bytes) -> None:
        """A control message came."""
        try:
            control = Control.decode(data)
        except ValueError as error:
            _log.warning("transport %s: bad control message: %s", self._name, error)
            return
        if control.kind is ControlKind.HELLO:
            self._on_hello(control)
        elif control.kind is ControlKind.WELCOME:
            self._on_welcome(control)
        elif control.kind is ControlKind.BYE:
            self._on_bye(control)
        else:
            self._on_cancel(control.value)

    def _on_hello(self, control: Control) -> None:
        try:
            peer = self._at(control.address, 0, control.same_host)
        except TransportError as error:
            _log.warning("transport %s: cannot answer a peer: %s", self._name, error)
            return
        peer.used_by_remote = True
        self.tell(peer, Control(ControlKind.WELCOME, control.value))

    def _on_welcome(self, control: Control) -> None:
        if (peer := self._dials.pop(control.value, None)) is not None:
            peer.dial = 0
            peer.channel = self._make_channel(peer)
            _answer(peer, peer.channel)

    def _on_bye(self, control: Control) -> None:
        if control.value == CLOSES:
            for peer in self._lanes(control.address):
                self._leave_out(peer)
                self._leaving[peer] = time.monotonic()
                self._end_waiting(peer, PeerLost("the peer of a connection closed its transport"))
        elif (gone := self._peers.get((control.address, 0))) is not None:
            dialing, gone.waiters = gone.waiters, []
            self._lose(gone, "the peer of a connection disconnected")
            for waiter in dialing:  # it lives, and has not seen this dial yet
                self.dial(gone.address, 0, gone.same_host, waiter)

    # The end of a peer.

    def forget(self, address: bytes) -> None:
        """A peer of this host is gone, as far as others know. Should it live, it learns that it is lost here."""
        for i, peer in enumerate(self._lanes(address)):
            if not peer.same_host:
                continue
            if i == 0:
                self._say_bye(peer, CLOSES)
            self._lose(peer, "the peer of a connection is gone")

    def end_lost(self) -> None:
        """End what waits for peers whose connection broke, and the connections of those that have said farewell."""
        for peer, since_s in tuple(self._leaving.items()):
            # Between hosts the connection breaks as their process ends, and nothing is written any more only then.
            if peer.same_host and (not peer.sends or time.monotonic() - since_s > LEAVING_S):
                self._disconnect(peer)
        while self._broken:
            peer = self._broken.pop()
            if peer.closed:
                continue
            self._disconnect(peer, broken=True)
            error = PeerLost("the peer of a connection was lost")
            self._on_broken(peer, error)
            self._end_waiting(peer, error)

    def farewell(self, error: TransportError) -> None:
        """Tell every peer that this transport closes, and every caller of ``connect``."""
        for peer in self.all():
            if peer.lane == 0 or (peer.address, 0) not in self._peers:
                self._say_bye(peer, CLOSES)
            _answer(peer, error)

    def disconnect_all(self) -> None:
        """Close every endpoint."""
        for peer in (*self.all(), *self._leaving):
            self._disconnect(peer)

    def _hang_up(self, peer: Peer) -> None:
        # It is about the endpoint that the other side answers on; another lane's end says nothing about that.
        if peer.lane == 0:
            self._say_bye(peer, 0)
        self._disconnect(peer)

    def _say_bye(self, peer: Peer, value: int) -> None:
        self.tell(peer, Control(ControlKind.BYE, value, peer.same_host, self._worker.address))

    def _lose(self, peer: Peer, why: str) -> None:
        self._disconnect(peer)
        self._end_waiting(peer, PeerLost(why))

    def _end_waiting(self, peer: Peer, error: PeerLost) -> None:
        _answer(peer, error)
        self._on_lost(peer, error)

    def _lanes(self, address: bytes) -> list[Peer]:
        return [peer for (known, _), peer in sorted(self._peers.items()) if known == address]

    def _at(self, address: bytes, lane: int, same_host: bool) -> Peer:
        peer = self._peers.get((address, lane))
        if peer is None:
            endpoint = self._worker.endpoint(address, same_host=same_host)
            peer = self._peers[address, lane] = Peer(address, lane, same_host, endpoint)
            if not same_host:
                endpoint.set_close_callback(self._broken.append, (peer,))
        return peer

    def _leave_out(self, peer: Peer) -> None:
        """Nothing goes to this peer any more."""
        peer.lost = True
        self._dials.pop(peer.dial, None)
        if self._peers.get((peer.address, peer.lane)) is peer:
            del self._peers[peer.address, peer.lane]

    def _disconnect(self, peer: Peer, *, broken: bool = False) -> None:
        self._leave_out(peer)
        self._leaving.pop(peer, None)
        if peer.closed:
            return
        peer.closed = True
        # A broken endpoint is closed by ucxx itself; closing it again crashes the process.
        if not broken:
            if not peer.same_host:
                peer.endpoint.remove_close_callback()
            peer.endpoint.close()
            self._worker.give_up(peer.endpoint)


def _answer(peer: Peer, result: Channel | Exception) -> None:
    waiters, peer.waiters = peer.waiters, []
    for waiter in waiters:
        _settle(waiter, result)


def _settle(waiter: Waiter, result: Channel | Exception) -> None:
    """Answer a waiter of ``connect``, unless it has given up."""
    if not waiter.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        waiter.set_exception(result)
    else:
        waiter.set_result(result)
