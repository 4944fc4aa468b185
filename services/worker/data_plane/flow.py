"""One hop of a chain: receive pieces in place, and send them on.

``Outflow`` sends a copy's pieces to one peer as they become available; ``Inflow`` receives them and
feeds an ``Outflow`` while it does. Both run on the transport's thread, driven by completions: a chunk
is forwarded without a trip through the event loop. The event loop hears of whole units only.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from services.worker.data_plane.pieces import HEADER_INDEX, Piece
from services.worker.data_plane.weight_copy import WeightCopy
from shared.transport.base import Channel, TensorTransport, Transfer, tag_of

SEND_WINDOW_BYTES = 8 * 1024 * 1024
"""In flight to one peer: enough to keep a link full, little enough to stop soon."""
RECEIVE_WINDOW_BYTES = 4 * SEND_WINDOW_BYTES
"""Posted ahead, so that no chunk waits for its buffer."""
MIN_WINDOW = 4
"""Never so few pieces in flight that the link waits for this process."""

OnError = Callable[[Exception], None]
_OnDone = Callable[[], None]


class _Flow(ABC):
    """Keeps a window of transfers posted, in the order of the pieces. Thread-safe.

    A subclass says which piece may be posted next, and how. An error ends the flow: ``on_error``
    is called once, on any thread, and no callback after it.
    """

    def __init__(self, copy: WeightCopy, pieces: tuple[Piece, ...], window_bytes: int, on_error: OnError) -> None:
        self._copy = copy
        self._pieces = pieces
        self._window = max(MIN_WINDOW, window_bytes // max(p.num_bytes for p in pieces))
        self._on_error = on_error
        self._lock = threading.Lock()
        self._next = 0
        self._posted: set[Transfer] = set()
        self._pumping = False
        self._ended = False

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

    def _limit(self) -> int:
        """How many pieces may have been posted by now. Called with the lock held."""
        return len(self._pieces)

    @abstractmethod
    def _post_piece(self, piece: Piece) -> None:
        """Post the piece's transfer and ``_track`` it."""

    def _pump(self) -> None:
        # One pump at a time: a transfer may complete while it is posted, and would recurse.
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._lock:
                if self._ended or len(self._posted) >= self._window or self._next >= self._limit():
                    self._pumping = False
                    return
                piece = self._pieces[self._next]
                self._next += 1
            try:
                self._post_piece(piece)
            except BaseException:
                with self._lock:
                    self._pumping = False
                raise

    def _track(self, transfer: Transfer, on_done: _OnDone) -> None:
        with self._lock:
            self._posted.add(transfer)
            too_late = self._ended
        transfer.add_done_callback(partial(self._ended_one, on_done))
        if too_late:
            # ``abort`` came while this was being posted, and could not know it.
            transfer.abort()

    def _ended_one(self, on_done: _OnDone, transfer: Transfer) -> None:
        with self._lock:
            self._posted.discard(transfer)
            if self._ended:
                return
            error = transfer.error
            self._ended = error is not None
        if error is not None:
            self._on_error(error)
            return
        on_done()
        self._pump()


class Outflow(_Flow):
    """Sends a copy's pieces, each once it is available."""

    def __init__(
        self,
        channel: Channel,
        copy: WeightCopy,
        pieces: tuple[Piece, ...],
        header: bytearray,
        epoch: int,
        on_all_sent: _OnDone,
        on_error: OnError,
    ) -> None:
        """``epoch`` is the receiver's; ``on_all_sent`` may be called on any thread, once."""
        super().__init__(copy, pieces, SEND_WINDOW_BYTES, on_error)
        self._channel = channel
        self._header = header
        self._epoch = epoch
        self._on_all_sent = on_all_sent
        self._available = 0
        self._num_sent = 0
        self.sent_bytes = 0

    def start(self) -> None:
        """Send the header."""
        self._track(self._channel.send(self._header, tag_of(self._epoch, HEADER_INDEX)), lambda: None)

    def make_available(self, count: int) -> None:
        """The first ``count`` pieces may be sent."""
        with self._lock:
            self._available = max(self._available, count)
        self._pump()

    def _limit(self) -> int:
        return self._available

    def _post_piece(self, piece: Piece) -> None:
        transfer = self._channel.send(self._copy.buffer(piece), tag_of(self._epoch, piece.index))
        self._track(transfer, partial(self._sent, piece))

    def _sent(self, piece: Piece) -> None:
        with self._lock:
            self.sent_bytes += piece.num_bytes
            self._num_sent += 1
            is_last = self._num_sent == len(self._pieces)
        if is_last:
            self._on_all_sent()


class Inflow(_Flow):
    """Receives pieces into a copy, in place."""

    def __init__(
        self,
        transport: TensorTransport,
        source: Channel,
        copy: WeightCopy,
        pieces: tuple[Piece, ...],
        epoch: int,
        header: bytearray,
        on_header: _OnDone,
        on_unit: Callable[[int], None],
        on_error: OnError,
    ) -> None:
        """``on_unit(unit)``: all bytes and checksums of a unit arrived, unverified. Callbacks run on
        the transport's thread."""
        super().__init__(copy, pieces, RECEIVE_WINDOW_BYTES, on_error)
        self._transport = transport
        self._source = source
        self._epoch = epoch
        self._header = header
        self._on_header = on_header
        self._on_unit = on_unit
        self._arrived = [False] * len(pieces)
        self._prefix = 0
        self._missing = [0] * len(copy.layout.units)
        for piece in pieces:
            self._missing[piece.unit] += 1
        self._outflow: Outflow | None = None
        self.received_bytes = 0

    def start(self) -> None:
        """Post the first receives."""
        self._receive(self._header, HEADER_INDEX, self._on_header)
        self._pump()

    def forward_to(self, outflow: Outflow) -> None:
        """Send on what arrived and what will."""
        with self._lock:
            self._outflow = outflow
            prefix = self._prefix
        outflow.make_available(prefix)

    def _receive(self, buffer: object, index: int, on_done: _OnDone) -> None:
        self._track(self._transport.recv(buffer, tag_of(self._epoch, index), source=self._source), on_done)

    def _post_piece(self, piece: Piece) -> None:
        self._receive(self._copy.buffer(piece), piece.index, partial(self._got, piece))

    def _got(self, piece: Piece) -> None:
        with self._lock:
            self._arrived[piece.index - 1] = True
            while self._prefix < len(self._arrived) and self._arrived[self._prefix]:
                self._prefix += 1
            prefix, outflow = self._prefix, self._outflow
            self.received_bytes += piece.num_bytes
            self._missing[piece.unit] -= 1
            is_whole = self._missing[piece.unit] == 0
        if outflow is not None:
            outflow.make_available(prefix)
        if is_whole:
            self._on_unit(piece.unit)
