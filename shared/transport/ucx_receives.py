"""Receives over UCX: messages that arrived and buffers that were posted, brought together by tag.

Receives are not posted to UCX: each arriving message is taken by a wildcard probe, which shows its tag and length,
and only then received, straight into the buffer posted for that tag. So a message of the wrong length
writes nothing, and a receive that no message has matched can be dropped at once. Large messages over
shared memory and RDMA (rendezvous) have moved no data by then: what waits unclaimed is a handle. Over TCP
between hosts messages come whole, so their bytes are bounded.
Everything here runs on the transport's thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from shared.errors import PeerLost, TransferAborted, TransportError
from shared.transport.tags import MAX_UNCLAIMED_BYTES, RecentTags
from shared.transport.transfer import PostedTransfer
from shared.transport.ucx_peers import Peer
from shared.transport.ucx_worker import UcxWorker

_log = logging.getLogger(__name__)


class Receives:
    """The posted receives of one transport, and the messages that nobody has asked for yet."""

    def __init__(self, worker: UcxWorker, name: str, max_unclaimed: int) -> None:
        self._worker = worker
        self._name = name
        self._max_unclaimed = max_unclaimed
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
