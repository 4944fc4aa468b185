"""Sends and receives over UCX: the channel to one peer; messages that arrived and buffers that were posted, brought
together by tag.

Receives are not posted to UCX: each arriving message is taken by a wildcard probe, which shows its tag and length,
and only then received, straight into the buffer posted for that tag. So a message of the wrong length
writes nothing, and a receive that no message has matched can be dropped at once. Large messages over
shared memory and RDMA (rendezvous) have moved no data by then: what waits unclaimed is a handle. Over TCP
between hosts messages come whole, so their bytes are bounded.
All but the channel runs on the transport's thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from shared.errors import PeerLost, TransferAborted, TransportError
from shared.transport.base import CLOSE_TIMEOUT_S, Buffer, Transfer
from shared.transport.control import CONTROL_TAG, Control, ControlKind
from shared.transport.tags import MAX_UNCLAIMED_BYTES, RecentTags
from shared.transport.traffic import TrafficCounters
from shared.transport.transfer import PostedTransfer, ended_within
from shared.transport.ucx_peers import Peer, UcxPeers
from shared.transport.ucx_worker import UcxWorker

_log = logging.getLogger(__name__)


Post = Callable[[Callable[[], None]], bool]
"""Runs a command on the transport's thread; False when that has ended."""


class UcxChannel:
    """A ``Channel``; made by ``UcxTransport.connect``. Any thread may use it."""

    def __init__(self, worker: UcxWorker, peers: UcxPeers, peer: Peer, traffic: TrafficCounters, run: Post) -> None:
        self._worker = worker
        self._peers = peers
        self._traffic = traffic
        self._run = run
        self.peer = peer
        self.closed = False

    @property
    def alive(self) -> bool:
        """False once the peer is known to be lost or the channel was closed."""
        return not self.closed and not self.peer.lost

    def send(self, buffer: Buffer, tag: int) -> Transfer:
        """Post a send; failures end the transfer."""
        transfer = PostedTransfer(buffer, tag, self._on_abort)
        if self.closed:
            transfer.finish(TransferAborted("the channel is closed"))
            return transfer
        self.peer.sends.add(transfer)
        if not self._run(lambda: self._send(transfer)):
            self._ended(transfer, TransferAborted("the transport is closed"))
        return transfer

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish posted sends, then disconnect; after ``timeout_s`` disconnect as ``abort`` does."""
        pending = [t for t in self.peer.sends.copy() if not t.done]
        self.closed = True
        force = not await ended_within(pending, timeout_s)
        self._run(lambda: self._peers.drop(self, self.peer, force=force))

    def abort(self) -> None:
        """Disconnect at once; posted sends end with ``TransferAborted``.

        UCX cannot take back a send: a living peer is asked to throw the message away, which ends it. A send to a
        dead peer of the same host, about whose death UCX says nothing, ends when the transport closes; until
        then its buffer is quarantined, and the rest of the transport works on, or sleeps.
        """
        self.closed = True
        self._run(lambda: self._peers.drop(self, self.peer, force=True))

    # From here on: the transport's thread, but for ``_on_abort``.

    def _send(self, transfer: PostedTransfer) -> None:
        try:
            if transfer.aborted:
                raise TransferAborted("the send was aborted")
            if self.peer.lost:
                raise PeerLost("the peer of this channel is lost")
            array = array_of(self._worker, transfer)
            self._worker.send(self.peer.endpoint, array, transfer.tag, lambda error: self._ended(transfer, error))
        except TransportError as error:
            self._ended(transfer, error)

    def _on_abort(self, transfer: PostedTransfer) -> None:
        transfer.aborted = True
        self._run(lambda: self._cancel(transfer))

    def _cancel(self, transfer: PostedTransfer) -> None:
        """Ask the peer to throw the message away if it is waiting there."""
        if not transfer.done and not self.peer.lost:
            self._peers.tell(self.peer, Control(ControlKind.CANCEL, transfer.tag))

    def _ended(self, transfer: PostedTransfer, error: Exception | None) -> None:
        self.peer.sends.discard(transfer)
        if error is None and not transfer.aborted:
            self._traffic.count("sent", transfer.tag, transfer.nbytes, same_host=self.peer.same_host)
        transfer.finish_or_abort(error)


class Receives:
    """The posted receives of one transport, and the messages that no receive has asked for yet."""

    def __init__(self, worker: UcxWorker, name: str, max_unclaimed: int, traffic: TrafficCounters) -> None:
        self._worker = worker
        self._name = name
        self._max_unclaimed = max_unclaimed
        self._traffic = traffic
        self._expected: dict[int, tuple[PostedTransfer, Any, Peer | None]] = {}
        self._writing: dict[PostedTransfer, Peer] = {}
        """Matched, and not whole yet, with the only peer that can send the rest."""
        self._unclaimed: OrderedDict[int, Any] = OrderedDict()
        self._unclaimed_bytes = 0
        self._aborted = RecentTags()
        self._overflowed = RecentTags()
        self.num_overflowed = 0
        self._over = False

    @property
    def num_unclaimed(self) -> int:
        """Messages that wait for their receive."""
        return len(self._unclaimed)

    @property
    def busy(self) -> bool:
        """Whether receives wait for their message."""
        return bool(self._expected)

    def post(self, transfer: PostedTransfer, array: Any, peer: Peer | None) -> None:
        """Receive into ``array`` what carries the transfer's tag."""
        tag = transfer.tag
        if tag in self._expected:
            transfer.finish(TransportError(f"tag {tag:#x} is posted already"))
        elif (message := self._claim(tag)) is not None:
            self._take(transfer, array, peer, message)
        elif tag in self._overflowed:
            transfer.finish(TransportError(f"the message with tag {tag:#x} came too early and was thrown away"))
        elif peer is not None and peer.lost:
            transfer.finish(PeerLost("the peer of a connection was lost"))
        else:
            self._expected[tag] = (transfer, array, peer)

    def arrived(self, tag: int, message: Any) -> None:
        """A message came: into its buffer, away, or aside."""
        if (expected := self._expected.pop(tag, None)) is not None:
            self._take(*expected, message)
        elif self._over or tag in self._aborted:
            self._worker.discard(message)
        else:
            self._set_aside(tag, message)

    def drop(self, transfer: PostedTransfer) -> None:
        """Abort. What nothing has matched ends now; what is being written ends when UCX says so."""
        transfer.aborted = True
        if (expected := self._expected.get(transfer.tag)) is not None and expected[0] is transfer:
            del self._expected[transfer.tag]
            self._aborted.add(transfer.tag)
            transfer.finish_or_abort(None)

    def cancelled(self, tag: int) -> None:
        """The sender of a message wants it thrown away."""
        if (message := self._claim(tag)) is not None:
            self._worker.discard(message)

    def peer_lost(self, peer: Peer, error: PeerLost) -> None:
        """End the receives that only this peer could have matched. What it is writing goes on."""
        for tag, (transfer, _, source) in list(self._expected.items()):
            if source is peer:
                del self._expected[tag]
                self._aborted.add(tag)
                transfer.finish(error)

    def connection_broke(self, peer: Peer, error: PeerLost) -> None:
        """End the receives that this peer was writing."""
        # Of a message in several segments, UCX waits for the rest for ever. The connection that they came over is
        # closed: nothing writes into the buffer any more.
        for transfer in [transfer for transfer, source in self._writing.items() if source is peer]:
            del self._writing[transfer]
            transfer.finish(error)

    def end(self, error: TransferAborted) -> None:
        """End every receive and throw every message away, also those that come later: their senders wait."""
        self._over = True
        for tag, (transfer, _, _) in list(self._expected.items()):
            del self._expected[tag]
            transfer.finish(error)
        for message in self._unclaimed.values():
            self._worker.discard(message)
        self._unclaimed.clear()
        self._unclaimed_bytes = 0

    def _take(self, transfer: PostedTransfer, array: Any, peer: Peer | None, message: Any) -> None:
        if message.length != transfer.nbytes:
            self._worker.discard(message)
            transfer.finish(
                TransportError(
                    f"the message with tag {transfer.tag:#x} has {message.length} bytes, not {transfer.nbytes}"
                )
            )
            return

        def ended(error: Exception | None) -> None:
            self._writing.pop(transfer, None)
            if error is None and not transfer.aborted and peer is not None:
                self._traffic.count("received", transfer.tag, transfer.nbytes, same_host=peer.same_host)
            transfer.finish_or_abort(error)

        if peer is not None and not peer.closed:
            self._writing[transfer] = peer
        self._worker.receive(message, array, ended)

    def _set_aside(self, tag: int, message: Any) -> None:
        if (same := self._claim(tag)) is not None:
            self._worker.discard(same)  # a tag is used once; a second message must not leak the first
        self._unclaimed[tag] = message
        self._unclaimed_bytes += message.length
        while len(self._unclaimed) > self._max_unclaimed or self._unclaimed_bytes > MAX_UNCLAIMED_BYTES:
            if len(self._unclaimed) == 1:
                return  # one message may be as large as it likes
            self._throw_oldest_away()

    def _claim(self, tag: int) -> Any | None:
        """The message that waits under this tag, which now is the caller's."""
        message = self._unclaimed.pop(tag, None)
        if message is not None:
            self._unclaimed_bytes -= message.length
        return message

    def _throw_oldest_away(self) -> None:
        oldest = next(iter(self._unclaimed))
        self._worker.discard(self._claim(oldest))
        self._overflowed.add(oldest)
        self.num_overflowed += 1
        if self.num_overflowed.bit_count() == 1:  # 1, 2, 4, 8 ...: a flood must not flood the log as well
            _log.warning(
                "transport %s: %d messages thrown away because more than %d, or %d MiB, waited for a receive",
                self._name,
                self.num_overflowed,
                self._max_unclaimed,
                MAX_UNCLAIMED_BYTES >> 20,
            )


def array_of(worker: UcxWorker, transfer: PostedTransfer) -> Any:
    """A transfer's buffer as UCX wants it. Raises ``TransportError`` for a bad tag or buffer."""
    if not 0 <= transfer.tag < CONTROL_TAG:
        raise TransportError(f"tag {transfer.tag:#x} is not a 63-bit number")
    array = worker.array(transfer.buffer)
    transfer.nbytes = array.nbytes
    return array
