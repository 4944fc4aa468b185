"""The tensor transport over UCX. The one file that imports ``ucxx``, and only when a transport starts.

One thread owns the UCX worker and makes every call. Receives are not posted to UCX: the thread takes
each arriving message by a wildcard probe, sees its tag and length, and only then receives it, straight
into the buffer posted for that tag. So a message of the wrong length writes nothing, and a receive
that no message has matched can be dropped at once. Large messages (rendezvous) have moved no data by then.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from shared.errors import DeadlineExceeded, PeerLost, TransferAborted, TransportError
from shared.transport.base import Buffer, Channel, Transfer
from shared.transport.control import CONTROL_TAG, Control, Kind
from shared.transport.mailbox import Mailbox
from shared.transport.transfer import PostedTransfer

_log = logging.getLogger(__name__)

# With work posted the thread spins this long after the last event, then sleeps until the next.
# A long spin takes the core that the peer needs where cores are few.
_SPIN_S = 0.0002
# Bounds of a sleep: a lost event costs this much and no more. Ten wake-ups a second are 0.1 % of a core.
_BUSY_SLEEP_S = 0.002
_IDLE_SLEEP_S = 0.1
_CLOSE_S = 2.0
# Tags of aborted receives, kept so that a late message is thrown away and its sender set free.
_MAX_ABORTED_TAGS = 1 << 16


class UcxChannel:
    """A ``Channel``; made by ``UcxTransport.connect``."""

    def __init__(self, transport: UcxTransport, peer: _Peer) -> None:
        self._transport = transport
        self._peer = peer
        self.closed = False

    @property
    def alive(self) -> bool:
        """False once the peer is known to be lost or the channel was closed."""
        return not self.closed and not self._peer.lost

    def send(self, buffer: Buffer, tag: int) -> Transfer:
        """Post a send; failures end the transfer."""
        return self._transport.post_send(self, self._peer, buffer, tag)

    async def close(self) -> None:
        """Finish posted sends, then disconnect."""
        pending = [t for t in self._peer.sends.copy() if not t.done]
        self.closed = True
        for transfer in pending:
            try:
                await transfer.wait()
            except TransportError:
                continue  # its owner sees the error; here only the end counts
        self._transport.post(lambda: self._transport.drop_channel(self, self._peer, force=False))

    def abort(self) -> None:
        """Disconnect at once; posted sends end with ``TransferAborted``."""
        self.closed = True
        self._transport.post(lambda: self._transport.drop_channel(self, self._peer, force=True))


class _Peer:
    """An endpoint and who uses it. Touched by the transport's thread only, but for reads of ``lost``."""

    def __init__(self, address: bytes, same_host: bool, endpoint: Any) -> None:
        self.address = address
        self.same_host = same_host
        self.endpoint = endpoint
        self.lost = False
        self.used_by_remote = False
        self.channel: UcxChannel | None = None
        self.dial = 0
        self.waiters: list[concurrent.futures.Future[UcxChannel]] = []
        self.sends: set[PostedTransfer] = set()


class UcxTransport:
    """A ``TensorTransport``; make it with ``start``."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._mailbox = Mailbox()
        self._peers: dict[bytes, _Peer] = {}
        self._dials: dict[int, _Peer] = {}
        self._next_dial = 1
        self._lost: list[_Peer] = []
        self._expected: dict[int, tuple[PostedTransfer, Any, _Peer | None]] = {}
        self._unexpected: dict[int, Any] = {}
        self._aborted_tags: OrderedDict[int, None] = OrderedDict()
        # UCX request -> its buffer, which UCX does not keep alive, and what to do when it completes.
        self._active: dict[Any, tuple[Any, Callable[[Exception | None], None]]] = {}
        self._stopping = False
        self._address = b""
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"ucx-{name}", daemon=True)
        self._thread.start()
        started.result()

    @classmethod
    def start(cls, *, name: str) -> UcxTransport:
        """Create the UCX worker and its thread. Raises ``TransportError`` when UCX does not start."""
        return cls(name=name)

    @property
    def address(self) -> bytes:
        """The UCX worker address, what peers connect to."""
        return self._address

    async def connect(self, address: bytes, *, same_host: bool, timeout_s: float = 10.0) -> UcxChannel:
        """Connect to a peer and wait for its answer. Raises ``DeadlineExceeded``, ``PeerLost``, ``TransportError``.

        Inside a host shared memory is used, which UCX offers only without error handling (11 GB/s;
        with it UCX falls back to TCP, 1 GB/s). So such a channel never notices a lost peer.
        """
        future: concurrent.futures.Future[UcxChannel] = concurrent.futures.Future()
        if not self.post(lambda: self._dial(address, same_host, future)):
            raise TransportError(f"transport {self._name} is closed")
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            self.post(lambda: self._forget_dial(address))
            raise DeadlineExceeded(f"no answer from a peer of transport {self._name} in {timeout_s} s") from None

    def recv(self, buffer: Buffer, tag: int, *, source: Channel | None = None) -> Transfer:
        """Post a receive of exactly ``len(buffer)`` bytes; see ``base``."""
        transfer = PostedTransfer(buffer, tag, self._abort_recv)
        peer = source._peer if isinstance(source, UcxChannel) else None
        if not self.post(lambda: self._recv(transfer, peer)):
            transfer.finish(TransferAborted(f"transport {self._name} is closed"))
        return transfer

    async def close(self) -> None:
        """Abort what is posted, disconnect, stop the thread."""
        self.post(self._stop)
        await asyncio.to_thread(self._thread.join)

    # From here on: for channels.

    def post(self, command: Callable[[], None]) -> bool:
        """Run ``command`` on the transport's thread; False when that has ended."""
        return self._mailbox.post(command)

    def post_send(self, channel: UcxChannel, peer: _Peer, buffer: Buffer, tag: int) -> PostedTransfer:
        """Post a send on a channel."""
        transfer = PostedTransfer(buffer, tag, lambda t: self._abort_send(t, peer))
        if channel.closed:
            transfer.finish(TransferAborted("the channel is closed"))
            return transfer
        peer.sends.add(transfer)
        if not self.post(lambda: self._send(transfer, peer)):
            peer.sends.discard(transfer)
            transfer.finish(TransferAborted(f"transport {self._name} is closed"))
        return transfer

    def drop_channel(self, channel: UcxChannel, peer: _Peer, *, force: bool) -> None:
        """Give up this side's use of a peer; disconnect when the peer does not use the endpoint either."""
        if peer.channel is not channel:
            return
        if force:
            for transfer in tuple(peer.sends):
                transfer.abort()
        peer.channel = None
        if peer.lost or (peer.used_by_remote and not (force and peer.sends)):
            return
        self._control(peer, Control(Kind.BYE, same_host=peer.same_host, address=self._address))
        self._disconnect(peer)

    # From here on: the transport's thread.

    def _run(self, started: concurrent.futures.Future[None]) -> None:
        self._mailbox.own()
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - whatever UCX raises goes to the caller of start
            self._mailbox.close()
            started.set_exception(TransportError(f"UCX did not start: {error}"))
            return
        self._address = self._worker.address.tobytes()
        started.set_result(None)
        try:
            self._serve()
        except Exception:  # noqa: BLE001 - a fault here must end every transfer rather than leave it waiting
            _log.exception("the thread of transport %s failed; the transport closes", self._name)
        self._shut()

    def _serve(self) -> None:
        last_event_s = time.monotonic()
        while not self._stopping:
            now_s = time.monotonic()
            if self._turn():
                last_event_s = now_s
                continue
            busy = bool(self._active or self._expected or self._dials)
            if (busy and now_s - last_event_s < _SPIN_S) or not self._worker.arm():
                continue
            self._mailbox.sleep(_BUSY_SLEEP_S if busy else _IDLE_SLEEP_S)

    def _open(self) -> None:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array

        self._ucx: Any = libucxx
        self._array: Any = Array
        # UCX reads UCX_* from the environment for every option that is not given here.
        self._context: Any = libucxx.UCXContext({}, (libucxx.Feature.TAG, libucxx.Feature.WAKEUP))
        self._worker: Any = libucxx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._mailbox.watch(self._worker.epoll_file_descriptor)
        self._any_tag = libucxx.UCXXTag(0)
        self._any_mask = libucxx.UCXXTagMask(0)

    def _turn(self) -> bool:
        """One round of commands, progress and completions; whether anything happened."""
        moved = self._mailbox.run_posted()
        if self._worker.progress_once():
            moved = True
            self._worker.progress()
        while (message := self._worker.tag_probe(self._any_tag, self._any_mask, True)).matched:
            moved = True
            self._arrived(message)
        while self._lost:
            self._peer_lost(self._lost.pop())
        if moved and self._active:
            for request in [request for request in self._active if request.completed]:
                _, ended = self._active.pop(request)
                ended(self._error_of(request))
        return moved

    def _track(self, request: Any, array: Any, ended: Callable[[Exception | None], None]) -> None:
        if request.completed:
            ended(self._error_of(request))
        else:
            self._active[request] = (array, ended)

    def _error_of(self, request: Any) -> Exception | None:
        try:
            request.check_error()
        except self._ucx.UCXMessageTruncatedError as error:
            return TransportError(str(error))
        except self._ucx.UCXError as error:
            return PeerLost(f"the connection broke: {error}")
        return None

    # Messages that arrive.

    def _arrived(self, message: Any) -> None:
        tag = message.sender_tag.value
        if tag & CONTROL_TAG:
            data = bytearray(message.length)
            request = self._worker.tag_recv_with_handle(self._array(data), message)
            self._track(request, data, lambda error: self._on_control(bytes(data)) if error is None else None)
        elif (expected := self._expected.pop(tag, None)) is not None:
            self._take(expected[0], expected[1], message)
        elif tag in self._aborted_tags:
            self._discard(message)
        else:
            self._unexpected[tag] = message

    def _take(self, transfer: PostedTransfer, array: Any, message: Any) -> None:
        if message.length != transfer.nbytes:
            self._discard(message)
            transfer.finish(
                TransportError(
                    f"the message with tag {transfer.tag:#x} has {message.length} bytes, not {transfer.nbytes}"
                )
            )
            return
        request = self._worker.tag_recv_with_handle(array, message)
        self._track(request, array, lambda error: self._finish(transfer, error))

    def _discard(self, message: Any) -> None:
        """Let UCX throw a message away: received into nothing, it counts as truncated and its sender is done."""
        nothing = self._array(bytearray(1))
        self._track(self._worker.tag_recv_with_handle(nothing, message), nothing, lambda _: None)

    def _on_control(self, data: bytes) -> None:
        try:
            control = Control.decode(data)
        except ValueError as error:
            _log.warning("transport %s: bad control message: %s", self._name, error)
            return
        if control.kind is Kind.HELLO:
            try:
                peer = self._peer_at(control.address, control.same_host)
            except self._ucx.UCXError as error:
                _log.warning("transport %s: cannot answer a peer: %s", self._name, error)
                return
            peer.used_by_remote = True
            self._control(peer, Control(Kind.WELCOME, control.value))
        elif control.kind is Kind.WELCOME:
            if (dialed := self._dials.pop(control.value, None)) is not None:
                dialed.dial = 0
                dialed.channel = UcxChannel(self, dialed)
                self._answer(dialed, dialed.channel)
        elif control.kind is Kind.BYE:
            gone = self._peers.get(control.address)
            if gone is not None:
                gone.used_by_remote = False
                if gone.channel is None and not gone.dial:
                    self._disconnect(gone)
        elif (message := self._unexpected.pop(control.value, None)) is not None:
            self._discard(message)

    # Peers.

    def _peer_at(self, address: bytes, same_host: bool) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            endpoint = self._worker.create_endpoint_from_worker_address(
                self._ucx.UCXAddress.create_from_buffer(address), not same_host
            )
            peer = self._peers[address] = _Peer(address, same_host, endpoint)
            if not same_host:
                endpoint.set_close_callback(self._lost.append, (peer,))
        return peer

    def _dial(self, address: bytes, same_host: bool, future: concurrent.futures.Future[UcxChannel]) -> None:
        if future.cancelled():
            return
        try:
            peer = self._peer_at(address, same_host)
        except (self._ucx.UCXError, ValueError) as error:
            _settle(future, TransportError(f"cannot connect: {error}"))
            return
        if peer.channel is not None and peer.channel.alive:
            _settle(future, peer.channel)
            return
        peer.waiters.append(future)
        if not peer.dial:
            peer.dial, self._next_dial = self._next_dial, self._next_dial + 1
            self._dials[peer.dial] = peer
            self._control(peer, Control(Kind.HELLO, peer.dial, peer.same_host, self._address))

    def _answer(self, peer: _Peer, result: UcxChannel | Exception) -> None:
        waiters, peer.waiters = peer.waiters, []
        for future in waiters:
            _settle(future, result)

    def _forget_dial(self, address: bytes) -> None:
        peer = self._peers.get(address)
        if peer is None or not peer.dial or any(not future.cancelled() for future in peer.waiters):
            return
        self._dials.pop(peer.dial, None)
        peer.dial = 0
        peer.waiters = []
        if not peer.used_by_remote:
            self._disconnect(peer)

    def _peer_lost(self, peer: _Peer) -> None:
        if peer.lost:
            return
        self._disconnect(peer, broken=True)
        error = PeerLost("the peer of a connection was lost")
        self._answer(peer, error)
        for tag, (transfer, _, source) in list(self._expected.items()):
            if source is peer:
                del self._expected[tag]
                self._remember_aborted(tag)
                transfer.finish(error)

    def _disconnect(self, peer: _Peer, *, broken: bool = False) -> None:
        # A broken endpoint is closed by ucxx itself; closing it again crashes the process.
        peer.lost = True
        self._dials.pop(peer.dial, None)
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        if not broken:
            if not peer.same_host:
                peer.endpoint.remove_close_callback()
            peer.endpoint.close()

    def _control(self, peer: _Peer, control: Control) -> None:
        data = self._array(bytearray(control.encode()))
        try:
            request = peer.endpoint.tag_send(data, self._ucx.UCXXTag(CONTROL_TAG))
        except self._ucx.UCXError as error:
            _log.info("transport %s: a connection broke: %s", self._name, error)
            self._lost.append(peer)
            return
        self._track(request, data, lambda _: None)

    # Transfers.

    def _array_of(self, transfer: PostedTransfer) -> Any:
        """The buffer as UCX wants it, or None when the transfer has ended by this."""
        if not 0 <= transfer.tag < CONTROL_TAG:
            transfer.finish(TransportError(f"tag {transfer.tag:#x} is not a 63-bit number"))
            return None
        try:
            array = self._array(transfer.buffer)
        except (TypeError, ValueError, BufferError) as error:
            transfer.finish(TransportError(f"not a buffer: {error}"))
            return None
        if not array.c_contiguous:
            transfer.finish(TransportError("the buffer is not C-contiguous"))
            return None
        transfer.nbytes = array.nbytes
        return array

    def _send(self, transfer: PostedTransfer, peer: _Peer) -> None:
        error: Exception | None = None
        if transfer.aborted:
            error = TransferAborted("the send was aborted")
        elif peer.lost:
            error = PeerLost("the peer of this channel is lost")
        elif (array := self._array_of(transfer)) is not None:
            try:
                request = peer.endpoint.tag_send(array, self._ucx.UCXXTag(transfer.tag))
            except self._ucx.UCXError as raised:
                error = PeerLost(f"the connection broke: {raised}")
            else:
                self._track(request, array, lambda failed: self._sent(transfer, peer, failed))
                return
        peer.sends.discard(transfer)
        transfer.finish(error)

    def _sent(self, transfer: PostedTransfer, peer: _Peer, error: Exception | None) -> None:
        peer.sends.discard(transfer)
        self._finish(transfer, error)

    def _recv(self, transfer: PostedTransfer, peer: _Peer | None) -> None:
        array = None if transfer.done else self._array_of(transfer)
        if array is None:
            return
        if not array.cuda and memoryview(transfer.buffer).readonly:
            transfer.finish(TransportError("the buffer of a receive is read-only"))
        elif transfer.tag in self._expected:
            transfer.finish(TransportError(f"tag {transfer.tag:#x} is posted already"))
        elif (message := self._unexpected.pop(transfer.tag, None)) is not None:
            self._take(transfer, array, message)
        elif peer is not None and peer.lost:
            transfer.finish(PeerLost("the peer of a connection was lost"))
        else:
            self._expected[transfer.tag] = (transfer, array, peer)

    def _finish(self, transfer: PostedTransfer, error: Exception | None) -> None:
        if transfer.aborted:
            error = TransferAborted(f"the transfer with tag {transfer.tag:#x} was aborted")
        transfer.finish(error)

    def _abort_recv(self, transfer: PostedTransfer) -> None:
        self.post(lambda: self._drop_recv(transfer))

    def _drop_recv(self, transfer: PostedTransfer) -> None:
        """End a receive that nothing has matched; one that is being written ends when UCX says so."""
        transfer.aborted = True
        if (expected := self._expected.get(transfer.tag)) is not None and expected[0] is transfer:
            del self._expected[transfer.tag]
            self._remember_aborted(transfer.tag)
            self._finish(transfer, None)

    def _remember_aborted(self, tag: int) -> None:
        self._aborted_tags[tag] = None
        if len(self._aborted_tags) > _MAX_ABORTED_TAGS:
            self._aborted_tags.popitem(last=False)

    def _abort_send(self, transfer: PostedTransfer, peer: _Peer) -> None:
        transfer.aborted = True
        self.post(lambda: self._cancel_send(transfer, peer))

    def _cancel_send(self, transfer: PostedTransfer, peer: _Peer) -> None:
        """UCX cannot take a send back; ask the peer to throw it away if it is waiting there."""
        if not transfer.done and not peer.lost:
            self._control(peer, Control(Kind.CANCEL, transfer.tag))

    # The end.

    def _stop(self) -> None:
        self._stopping = True

    def _shut(self) -> None:
        closed = TransferAborted(f"transport {self._name} was closed")
        for tag, (transfer, _, _) in list(self._expected.items()):
            del self._expected[tag]
            transfer.finish(closed)
        for message in self._unexpected.values():
            self._discard(message)
        self._unexpected.clear()
        for peer in list(self._peers.values()):
            for transfer in tuple(peer.sends):
                transfer.aborted = True
                self._cancel_send(transfer, peer)
            self._control(peer, Control(Kind.BYE, same_host=peer.same_host, address=self._address))
            self._answer(peer, closed)
        deadline_s = time.monotonic() + _CLOSE_S
        while self._active and time.monotonic() < deadline_s:
            if not self._turn():
                time.sleep(0.0001)
        for peer in list(self._peers.values()):
            self._disconnect(peer)
        self._worker.progress()
        leftovers, self._active = list(self._active.values()), {}
        self._mailbox.close()
        # Without its worker UCX touches no buffer any more.
        del self._worker
        for _, ended in leftovers:
            ended(closed)


def _settle(future: concurrent.futures.Future[UcxChannel], result: UcxChannel | Exception) -> None:
    """Answer a waiter of ``connect``, unless it has given up."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
