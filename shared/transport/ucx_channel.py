"""Sends over UCX: the channel to one peer, and what becomes of a posted send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.errors import PeerLost, TransferAborted, TransportError
from shared.transport.base import CLOSE_TIMEOUT_S, Buffer, Transfer
from shared.transport.control import CONTROL_TAG, Control, Kind
from shared.transport.transfer import PostedTransfer, ended_within
from shared.transport.ucx_peers import Peer, Peers
from shared.transport.ucx_worker import UcxWorker

Post = Callable[[Callable[[], None]], bool]
"""Runs a command on the transport's thread; False when that has ended."""


class UcxChannel:
    """A ``Channel``; made by ``UcxTransport.connect``. Any thread may use it."""

    def __init__(self, sends: Sends, peer: Peer) -> None:
        self._sends = sends
        self.peer = peer
        self.closed = False

    @property
    def alive(self) -> bool:
        """False once the peer is known to be lost or the channel was closed."""
        return not self.closed and not self.peer.lost

    def send(self, buffer: Buffer, tag: int) -> Transfer:
        """Post a send; failures end the transfer."""
        return self._sends.post(self, buffer, tag)

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish posted sends, then disconnect; after ``timeout_s`` disconnect as ``abort`` does."""
        pending = [t for t in self.peer.sends.copy() if not t.done]
        self.closed = True
        self._sends.drop(self, force=not await ended_within(pending, timeout_s))

    def abort(self) -> None:
        """Disconnect at once; posted sends end with ``TransferAborted``.

        UCX cannot take back a send: a living peer is asked to throw the message away, which ends it. A send to a
        dead peer of the same host, about whose death UCX says nothing, ends when the transport closes; until
        then its buffer is quarantined, and the rest of the transport works on, or sleeps.
        """
        self.closed = True
        self._sends.drop(self, force=True)


class Sends:
    """The posted sends of one transport. ``post`` and ``drop`` from any thread, the rest from the transport's."""

    def __init__(self, worker: UcxWorker, peers: Peers, run: Post) -> None:
        self._worker = worker
        self._peers = peers
        self._run = run

    def post(self, channel: UcxChannel, buffer: Buffer, tag: int) -> PostedTransfer:
        """Post a send on a channel."""
        peer = channel.peer
        transfer = PostedTransfer(buffer, tag, lambda t: self._on_abort(t, peer))
        if channel.closed:
            transfer.finish(TransferAborted("the channel is closed"))
            return transfer
        peer.sends.add(transfer)
        if not self._run(lambda: self._send(transfer, peer)):
            self._ended(transfer, peer, TransferAborted("the transport is closed"))
        return transfer

    def drop(self, channel: UcxChannel, *, force: bool) -> None:
        """Give up a channel; ``force``: abort its sends."""
        self._run(lambda: self._peers.drop(channel, channel.peer, force=force))

    def abort(self, transfer: PostedTransfer, peer: Peer) -> None:
        """UCX cannot take a send back; ask the peer to throw it away if it is waiting there."""
        transfer.aborted = True
        if not transfer.done and not peer.lost:
            self._peers.tell(peer, Control(Kind.CANCEL, transfer.tag))

    def _on_abort(self, transfer: PostedTransfer, peer: Peer) -> None:
        transfer.aborted = True
        self._run(lambda: self.abort(transfer, peer))

    def _send(self, transfer: PostedTransfer, peer: Peer) -> None:
        try:
            if transfer.aborted:
                raise TransferAborted("the send was aborted")
            if peer.lost:
                raise PeerLost("the peer of this channel is lost")
            array = array_of(self._worker, transfer)
            self._worker.send(peer.endpoint, array, transfer.tag, lambda error: self._ended(transfer, peer, error))
        except TransportError as error:
            self._ended(transfer, peer, error)

    def _ended(self, transfer: PostedTransfer, peer: Peer, error: Exception | None) -> None:
        peer.sends.discard(transfer)
        transfer.finish_or_abort(error)


def array_of(worker: UcxWorker, transfer: PostedTransfer) -> Any:
    """A transfer's buffer as UCX wants it. Raises ``TransportError`` for a bad tag or buffer."""
    if not 0 <= transfer.tag < CONTROL_TAG:
        raise TransportError(f"tag {transfer.tag:#x} is not a 63-bit number")
    array = worker.array(transfer.buffer)
    transfer.nbytes = array.nbytes
    return array
