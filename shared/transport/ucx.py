"""The tensor transport over UCX.

One thread owns the UCX worker and makes every call: it runs the commands that other threads post, lets UCX work,
hands arriving messages out and ends what completed. ``ucx_worker`` holds the requests in flight,
``ucx_peers`` the connections, ``ucx_transfers`` the sends, and the matching of messages and buffers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from shared.errors import DeadlineExceeded, TransferAborted, TransportError
from shared.transport.base import Buffer, Channel, Transfer
from shared.transport.control import CONTROL_TAG
from shared.transport.mailbox import Mailbox
from shared.transport.tags import MAX_UNCLAIMED
from shared.transport.traffic import TrafficCounters
from shared.transport.transfer import PostedTransfer
from shared.transport.ucx_peers import Peer, UcxPeers
from shared.transport.ucx_transfers import Receives, UcxChannel, array_of
from shared.transport.ucx_worker import UcxWorker, open_worker

__all__ = ["UcxChannel", "UcxTransport"]

_log = logging.getLogger(__name__)

# With work posted the thread spins this long after the last event, then sleeps until the next. While it spins it
# offers its core: where peers share one, a plain spin held up the peer that it waited for (1 MiB chunks on a
# loaded box of two cores: 4.6 against 7.5 GB/s; on a free one 10.6 and 11). ``os.sched_yield`` keeps the GIL.
# Between hosts a wake-up costs little beside the wire, and spinning took three times the CPU per byte.
_SPIN_S = 0.0002
_yield_core = ctypes.CDLL(None).sched_yield
# Bounds of a sleep: a lost event costs this much and no more. With work posted the sleeps grow with the time since the
# last event: what has waited for a second may wait an eighth longer. Ten wake-ups a second are 0.1 % of a core.
_BUSY_SLEEP_S = 0.002
_IDLE_SLEEP_S = 0.1
_SLEEP_SHARE = 1 / 8
# UCX opens in 0.2 s; its last messages take microseconds to leave, unless a peer is dead.
_START_TIMEOUT_S = 60.0
_FAREWELL_S = 0.5
_JOIN_TIMEOUT_S = 10.0


class UcxTransport:
    """A ``TensorTransport``."""

    def __init__(
        self,
        *,
        name: str,
        max_unclaimed: int = MAX_UNCLAIMED,
        enter: Callable[[], None] | None = None,
        on_failure: Callable[[TransportError], None] = lambda _: None,
    ) -> None:
        """Create the UCX worker and start its thread. Raises ``TransportError`` when UCX does not start.

        ``max_unclaimed``: messages kept for a receive that is not posted yet; see ``base``.
        ``enter``: of buffers in a device's memory; called on the transport's thread before UCX opens, which looks for
        the device that the thread uses.
        ``on_failure``: called on the transport's thread if that breaks; every transfer then ends.
        """
        self._name = name
        self._enter = enter
        self._on_failure = on_failure
        self._max_unclaimed = max_unclaimed
        self._mailbox = Mailbox()
        self._traffic = TrafficCounters()
        self._stopping = False
        self._worker: UcxWorker
        self._peers: UcxPeers
        self._receives: Receives
        started: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"ucx-{name}", daemon=True)
        self._thread.start()
        try:
            self._address = started.result(_START_TIMEOUT_S)
        except TimeoutError:
            self._mailbox.post(self._stop)
            raise TransportError(f"UCX did not start in {_START_TIMEOUT_S} s") from None

    @property
    def address(self) -> bytes:
        """The UCX worker address, what peers connect to."""
        return self._address

    @property
    def num_unclaimed(self) -> int:
        """Messages that wait for their receive."""
        return self._receives.num_unclaimed

    @property
    def num_overflowed(self) -> int:
        """Messages thrown away because too many waited for a receive."""
        return self._receives.num_overflowed

    @property
    def traffic(self) -> TrafficCounters:
        """What it has carried."""
        return self._traffic

    @property
    def peers(self) -> frozenset[bytes]:
        """Addresses of the peers that hold a connection open here, whoever made it."""
        return self._peers.addresses

    async def connect(self, address: bytes, *, same_host: bool, timeout_s: float = 10.0, lane: int = 0) -> UcxChannel:
        """Connect to a peer and wait for its answer. Raises ``BadAddress``, ``DeadlineExceeded``, ``PeerLost``,
        ``TransportError``.

        Inside a host shared memory is used, which UCX offers only without error handling (11 GB/s;
        with it UCX falls back to TCP, 1 GB/s). So such a channel never notices a dead peer (see ``forget``);
        transfers that were copying out of its memory end with ``PeerLost``, others wait.
        """
        future: concurrent.futures.Future[UcxChannel] = concurrent.futures.Future()
        if not self.post(lambda: self._peers.dial(address, lane, same_host, future)):
            raise TransportError(f"transport {self._name} is closed")
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            self.post(lambda: self._peers.forget_dial(address, lane))
            raise DeadlineExceeded(f"no answer from a peer of transport {self._name} in {timeout_s} s") from None

    def recv(self, buffer: Buffer, tag: int, *, source: Channel | None = None) -> Transfer:
        """Post a receive of exactly ``len(buffer)`` bytes; see ``base``."""
        transfer = PostedTransfer(buffer, tag, self._abort_recv)
        peer = source.peer if isinstance(source, UcxChannel) else None
        if not self.post(lambda: self._recv(transfer, peer)):
            transfer.finish(TransferAborted(f"transport {self._name} is closed"))
        return transfer

    def forget(self, address: bytes) -> None:
        """A peer of this host is gone for good; see ``base``."""
        self.post(lambda: self._peers.forget(address))

    async def close(self) -> None:
        """Abort what is posted, disconnect, stop the thread.

        Takes at most half a second for peers that do not answer. Raises ``TransportError`` when UCX itself hangs:
        then, and only then, transfers may be left that never end, and the process should.
        """
        self.post(self._stop)
        await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise TransportError(f"UCX did not end transport {self._name} in {_JOIN_TIMEOUT_S} s; end the process")

    def post(self, command: Callable[[], None]) -> bool:
        """Run ``command`` on the transport's thread; False when that has ended."""
        return self._mailbox.post(command)

    # From here on: the transport's thread.

    def _run(self, started: concurrent.futures.Future[bytes]) -> None:
        self._mailbox.own()
        try:
            if self._enter is not None:
                self._enter()
            self._worker = open_worker(device_memory=self._enter is not None)
        except Exception as error:  # noqa: BLE001 - whatever UCX raises goes to the caller of start
            self._mailbox.close()
            started.set_exception(TransportError(f"UCX did not start: {error}"))
            return
        self._mailbox.watch(self._worker.event_fd)
        self._receives = Receives(self._worker, self._name, self._max_unclaimed, self._traffic)
        self._peers = UcxPeers(
            self._worker,
            self._name,
            make_channel=lambda peer: UcxChannel(self._worker, self._peers, peer, self._traffic, self.post),
            on_lost=self._receives.peer_lost,
            on_broken=self._receives.connection_broke,
            on_cancel=self._receives.cancelled,
        )
        started.set_result(self._worker.address)
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - a fault here must end every transfer rather than leave it waiting
            _log.exception("the thread of transport %s failed; the transport closes", self._name)
            self._on_failure(TransportError(f"the thread of transport {self._name} failed: {error}"))
        self._shut()

    def _serve(self) -> None:
        last_event_s = time.monotonic()
        while not self._stopping:
            now_s = time.monotonic()
            if self._turn():
                last_event_s = now_s
                continue
            busy = self._worker.busy or self._receives.busy or self._peers.busy
            if busy and now_s - last_event_s < _SPIN_S and self._peers.any_on_this_host:
                _yield_core()
            elif self._worker.arm():
                patient_s = max(_BUSY_SLEEP_S, (now_s - last_event_s) * _SLEEP_SHARE)
                self._mailbox.sleep(min(patient_s, _IDLE_SLEEP_S) if busy else _IDLE_SLEEP_S)

    def _turn(self) -> bool:
        """One round of commands, progress and completions; whether anything happened."""
        worker = self._worker
        moved = self._mailbox.run_posted()
        moved |= worker.progress()
        while (message := worker.probe()) is not None:
            moved = True
            tag = message.sender_tag.value
            if tag & CONTROL_TAG:
                self._receive_control(message)
            else:
                self._receives.arrived(tag, message)
        self._peers.end_lost()
        if moved:
            worker.end_completed()
        return moved

    def _receive_control(self, message: Any) -> None:
        data = bytearray(message.length)
        self._worker.receive(
            message,
            self._worker.array(data),
            lambda error: self._peers.on_control(bytes(data)) if error is None else None,
        )

    def _recv(self, transfer: PostedTransfer, peer: Peer | None) -> None:
        if transfer.done:
            return
        try:
            array = array_of(self._worker, transfer)
            if not array.cuda and memoryview(transfer.buffer).readonly:
                raise TransportError("the buffer of a receive is read-only")
        except TransportError as error:
            transfer.finish(error)
            return
        self._receives.post(transfer, array, peer)

    def _abort_recv(self, transfer: PostedTransfer) -> None:
        self.post(lambda: self._receives.drop(transfer))

    def _stop(self) -> None:
        self._stopping = True

    def _shut(self) -> None:
        closed = TransferAborted(f"transport {self._name} was closed")
        self._receives.end(closed)
        for peer in self._peers.all():
            for transfer in tuple(peer.sends):
                transfer.abort()
        self._peers.farewell(closed)
        deadline_s = time.monotonic() + _FAREWELL_S
        # What has arrived is thrown away, so that its senders are done.
        while ((moved := self._turn()) or self._worker.busy) and time.monotonic() < deadline_s:
            if not moved:
                time.sleep(0.0001)
        self._peers.disconnect_all()
        left = self._worker.release()
        self._mailbox.close()
        for ended in left:
            ended(closed)
