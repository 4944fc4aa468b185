"""One link of a chain: pieces out of a copy to one peer, or into a copy from one peer.

``Outflow`` sends pieces in order, each once the copy has it; ``Inflow`` receives them in place. A copy that receives
and sends at once forwards: both run on the transport's thread, driven by completions, so a chunk is forwarded without
a trip through the event loop. The event loop hears of whole units only.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from services.worker.memory.pieces import Piece, Pieces, feed_index
from services.worker.memory.weight_copy import WeightCopy
from shared.transport.base import Channel, TensorTransport, Transfer
from shared.transport.tags import tag_of

SEND_WINDOW_BYTES = 8 * 1024 * 1024
"""In flight to one peer: enough to keep a link full, little enough to stop soon."""
RECEIVE_WINDOW_BYTES = 4 * SEND_WINDOW_BYTES
"""Posted ahead, so that no chunk waits for its buffer."""
MIN_WINDOW = 4
"""Never so few pieces in flight that the link waits for this process."""

BURST_S = 0.005
"""Bytes that may go at once, as time at the capped rate: little enough not to queue ahead of serving traffic."""

OnDone = Callable[[], None]
OnError = Callable[[Exception], None]
CallLater = Callable[[float, OnDone], None]
"""(seconds, callback): thread-safe; the callback may run on any thread."""


class _Flow(ABC):
    """Keeps a window of transfers posted, in the order of the pieces. Thread-safe.

    A subclass says whether the next piece may be posted, and how. When all pieces went, ``on_done`` is called once; an
    error ends the flow with one ``on_error`` instead. Both on any thread, and nothing after them.
    """

    def __init__(
        self,
        copy: WeightCopy,
        pieces: Pieces,
        epoch: int,
        attempt: int,
        window_bytes: int,
        on_done: OnDone,
        on_error: OnError,
    ) -> None:
        """``pieces``: at least one."""
        self._copy = copy
        self._pieces = pieces
        self._epoch = epoch
        self._attempt = attempt
        self._window = max(MIN_WINDOW, window_bytes // pieces.most_bytes)
        self._on_done = on_done
        self._on_error = on_error
        self._lock = threading.Lock()
        self._next = 0
        self._num_done = 0
        self._posted: set[Transfer] = set()
        self._pumping = False
        self._ended = False
        self.moved_bytes = 0
        """Bytes whose transfer is complete."""

    def start(self) -> None:
        """Post what may be posted."""
        self._pump()

    def abort(self) -> None:
        """Stop. The copy's memory is the caller's again when ``quiet``."""
        with self._lock:
            self._ended = True
            posted = list(self._posted)
        for transfer in posted:
            transfer.abort()

    @property
    def quiet(self) -> bool:
        """Whether no posted transfer holds a buffer any more."""
        with self._lock:
            return not self._posted and not self._pumping

    @abstractmethod
    def _may_post(self, piece: Piece) -> bool:
        """Whether the piece may go now; if not, ``_pump`` is called when it may. Called with the lock held."""

    @abstractmethod
    def _post(self, piece: Piece, tag: int) -> Transfer:
        """Post the piece's transfer."""

    @abstractmethod
    def _moved(self, piece: Piece) -> None:
        """A piece is complete. Not called with the lock held."""

    def _pump(self) -> None:
        # One pump at a time: a transfer may complete while it is posted, and would recurse.
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._lock:
                if (
                    self._ended
                    or self._next == len(self._pieces)
                    or len(self._posted) >= self._window
                    or not self._may_post(self._pieces[self._next])
                ):
                    self._pumping = False
                    return
                piece = self._pieces[self._next]
                self._next += 1
            try:
                self._track(piece, self._post(piece, tag_of(self._epoch, feed_index(self._attempt, piece.index))))
            except BaseException:
                with self._lock:
                    self._pumping = False
                raise

    def _track(self, piece: Piece, transfer: Transfer) -> None:
        with self._lock:
            self._posted.add(transfer)
            too_late = self._ended
        transfer.add_done_callback(partial(self._transfer_ended, piece))
        if too_late:
            # ``abort`` came while this was being posted, and could not know it.
            transfer.abort()

    def _transfer_ended(self, piece: Piece, transfer: Transfer) -> None:
        with self._lock:
            self._posted.discard(transfer)
            if self._ended:
                return
            error = transfer.error
            is_last = False
            if error is None:
                self.moved_bytes += piece.num_bytes
                self._num_done += 1
                is_last = self._num_done == len(self._pieces)
            self._ended = error is not None or is_last
        if error is not None:
            self._on_error(error)
            return
        self._moved(piece)
        if is_last:
            self._on_done()
        else:
            self._pump()


class TokenBucket:
    """A cap on a link that is shared with serving traffic: the bytes that may be sent by now.

    Times are monotonic seconds. Not thread-safe: the lock of its flow guards it.
    """

    def __init__(self, gbps: float, now_s: float) -> None:
        """Raises ``ValueError`` unless ``gbps`` is positive."""
        if gbps <= 0:
            raise ValueError(f"a cap of {gbps} Gbps lets nothing through")
        self._bytes_per_s = gbps * 1e9 / 8
        self._tokens = 0.0
        self._at_s = now_s

    def take(self, num_bytes: int, now_s: float) -> float:
        """Spend tokens for a message; the seconds to wait before trying again, 0 if it may go now.

        A message larger than the burst may go once the bucket is full, and leaves it in debt: the rate holds.
        """
        burst = self._bytes_per_s * BURST_S
        self._tokens = min(burst, self._tokens + (now_s - self._at_s) * self._bytes_per_s)
        self._at_s = now_s
        needed = min(float(num_bytes), burst)
        missing = needed - self._tokens
        if missing >= 1:  # less is rounding
            return missing / self._bytes_per_s
        self._tokens -= num_bytes
        return 0.0


class Outflow(_Flow):
    """Sends pieces of a copy, each once the copy has it, no faster than the cap."""

    def __init__(
        self,
        channel: Channel,
        copy: WeightCopy,
        pieces: Pieces,
        epoch: int,
        attempt: int,
        on_done: OnDone,
        on_error: OnError,
        *,
        cap_gbps: float = 0.0,
        call_later: CallLater | None = None,
    ) -> None:
        """``epoch`` and ``attempt`` are the receiver's. A cap needs ``call_later``."""
        super().__init__(copy, pieces, epoch, attempt, SEND_WINDOW_BYTES, on_done, on_error)
        self._channel = channel
        self._bucket = TokenBucket(cap_gbps, time.monotonic()) if cap_gbps else None
        self._call_later = call_later
        self._timer_runs = False

    def start(self) -> None:
        self._copy.listen(self._pump)
        super().start()

    def stop_listening(self) -> None:
        """The flow ended, or will not be used any more."""
        self._copy.unlisten(self._pump)

    @property
    def starved(self) -> bool:
        """Whether everything that the copy has was sent: it waits for its own upstream."""
        with self._lock:
            done = self._next == len(self._pieces)
            return not done and not self._posted and not self._copy.has(self._pieces[self._next])

    def _may_post(self, piece: Piece) -> bool:
        if not self._copy.has(piece):
            return False
        if self._bucket is None or self._call_later is None:
            return True
        if self._timer_runs:
            return False
        wait_s = self._bucket.take(piece.num_bytes, time.monotonic())
        if wait_s > 0:
            self._timer_runs = True
            self._call_later(wait_s, self._tokens_are_there)
        return wait_s <= 0

    def _tokens_are_there(self) -> None:
        with self._lock:
            self._timer_runs = False
        self._pump()

    def _post(self, piece: Piece, tag: int) -> Transfer:
        return self._channel.send(self._copy.buffer(piece), tag)

    def _moved(self, piece: Piece) -> None:  # noqa: ARG002 - a sender has the bytes already
        return


class Inflow(_Flow):
    """Receives pieces into a copy, in place."""

    def __init__(
        self,
        transport: TensorTransport,
        source: Channel,
        copy: WeightCopy,
        pieces: Pieces,
        epoch: int,
        attempt: int,
        on_first: OnDone,
        on_unit: Callable[[int], None],
        on_done: OnDone,
        on_error: OnError,
    ) -> None:
        """``on_first``: a first piece arrived. ``on_unit(unit)``: a unit of the copy is whole, unverified, because of
        a piece of this flow."""
        super().__init__(copy, pieces, epoch, attempt, RECEIVE_WINDOW_BYTES, on_done, on_error)
        self._transport = transport
        self._source = source
        self._on_first = on_first
        self._on_unit = on_unit
        self._any = False

    def _may_post(self, piece: Piece) -> bool:  # noqa: ARG002 - the buffers are there
        return True

    def _post(self, piece: Piece, tag: int) -> Transfer:
        return self._transport.recv(self._copy.buffer(piece), tag, source=self._source)

    def _moved(self, piece: Piece) -> None:
        if not self._any:
            self._any = True
            self._on_first()
        if self._copy.arrived(piece):
            self._on_unit(piece.unit)
