"""One hop of a chain: receive pieces in place, and send them on.

``Outflow`` sends a copy's pieces to one peer as they become available; ``Inflow`` receives them and
feeds an ``Outflow`` while it does. Both run on the transport's thread, driven by completions: a chunk
is forwarded without a trip through the event loop. The event loop hears of whole units only.
"""

from __future__ import annotations

import threading
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


def _window(pieces: tuple[Piece, ...], window_bytes: int) -> int:
    """Pieces in flight: by bytes, but never so few that the link waits for this process."""
    return max(MIN_WINDOW, window_bytes // max(p.num_bytes for p in pieces))


OnError = Callable[[Exception], None]


class Outflow:
    """Sends ``pieces`` in order, each once it is available. Thread-safe."""

    def __init__(
        self,
        channel: Channel,
        copy: WeightCopy,
        pieces: tuple[Piece, ...],
        header: bytearray,
        epoch: int,
        on_done: Callable[[], None],
        on_error: OnError,
    ) -> None:
        """``epoch`` is the receiver's; ``on_done`` and ``on_error`` may be called on any thread, once in total."""
        self._channel = channel
        self._copy = copy
        self._pieces = pieces
        self._header = header
        self._epoch = epoch
        self._on_done = on_done
        self._on_error = on_error
        self._lock = threading.Lock()
        self._window = _window(pieces, SEND_WINDOW_BYTES)
        self._available = 0
        self._next = 0
        self._posted: set[Transfer] = set()
        self._pumping = False
        self._ended = False
        self.sent_bytes = 0

    def start(self) -> None:
        """Send the header."""
        self._post(self._header, HEADER_INDEX, 0)

    def make_available(self, count: int) -> None:
        """The first ``count`` pieces may be sent."""
        with self._lock:
            self._available = max(self._available, count)
        self._pump()

    def abort(self) -> None:
        """Stop sending. Buffers are free when ``quiet``."""
        with self._lock:
            self._ended = True
            posted = list(self._posted)
        for transfer in posted:
            transfer.abort()

    @property
    def quiet(self) -> bool:
        """Whether no posted send holds a buffer any more."""
        return not self._posted

    def _pump(self) -> None:
        # One pump at a time: a transfer may complete while it is posted, and would recurse.
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._lock:
                full = len(self._posted) >= self._window
                if self._ended or full or self._next >= self._available:
                    self._pumping = False
                    return
                piece = self._pieces[self._next]
                self._next += 1
            self._post(self._copy.buffer(piece), piece.index, piece.num_bytes)

    def _post(self, buffer: object, index: int, num_bytes: int) -> None:
        transfer = self._channel.send(buffer, tag_of(self._epoch, index))
        with self._lock:
            self._posted.add(transfer)
        transfer.add_done_callback(lambda t: self._sent(t, num_bytes))

    def _sent(self, transfer: Transfer, num_bytes: int) -> None:
        with self._lock:
            self._posted.discard(transfer)
            if self._ended:
                return
            error = transfer.error
            self.sent_bytes += num_bytes
            all_sent = self._next == len(self._pieces) and not self._posted
            self._ended = error is not None or all_sent
        if error is not None:
            self._on_error(error)
        elif all_sent:
            self._on_done()
        else:
            self._pump()


class Inflow:
    """Receives ``pieces`` into a copy, in place. Thread-safe."""

    def __init__(
        self,
        transport: TensorTransport,
        source: Channel,
        copy: WeightCopy,
        pieces: tuple[Piece, ...],
        epoch: int,
        header: bytearray,
        on_header: Callable[[], None],
        on_unit: Callable[[int], None],
        on_error: OnError,
    ) -> None:
        """``on_unit(unit)``: all bytes and checksums of a unit arrived, unverified. Callbacks run on the
        transport's thread; ``on_error`` is called at most once, and nothing after it."""
        self._transport = transport
        self._source = source
        self._copy = copy
        self._pieces = pieces
        self._epoch = epoch
        self._header = header
        self._on_header = on_header
        self._on_unit = on_unit
        self._on_error = on_error
        self._lock = threading.Lock()
        self._next = 0
        self._window = _window(pieces, RECEIVE_WINDOW_BYTES)
        self._arrived = [False] * len(pieces)
        self._prefix = 0
        self._missing = [0] * len(copy.layout.units)
        for piece in pieces:
            self._missing[piece.unit] += 1
        self._posted: set[Transfer] = set()
        self._pumping = False
        self._ended = False
        self._outflow: Outflow | None = None
        self.received_bytes = 0

    def forward_to(self, outflow: Outflow) -> None:
        """Send on what arrived and what will."""
        with self._lock:
            self._outflow = outflow
            prefix = self._prefix
        outflow.make_available(prefix)

    def start(self) -> None:
        """Post the first receives."""
        self._post(self._header, HEADER_INDEX, self._got_header)
        self._pump()

    def abort(self) -> None:
        """Stop receiving. The copy's memory is free when ``quiet``."""
        with self._lock:
            self._ended = True
            posted = list(self._posted)
        for transfer in posted:
            transfer.abort()

    @property
    def quiet(self) -> bool:
        """Whether no posted receive can write any more."""
        return not self._posted

    def _pump(self) -> None:
        # One pump at a time: a transfer may complete while it is posted, and would recurse.
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while True:
            with self._lock:
                full = len(self._posted) >= self._window
                if self._ended or full or self._next >= len(self._pieces):
                    self._pumping = False
                    return
                position = self._next
                self._next += 1
            piece = self._pieces[position]
            self._post(self._copy.buffer(piece), piece.index, partial(self._got, position))

    def _post(self, buffer: object, index: int, arrived: Callable[[Transfer], None]) -> None:
        transfer = self._transport.recv(buffer, tag_of(self._epoch, index), source=self._source)
        with self._lock:
            self._posted.add(transfer)
        transfer.add_done_callback(lambda t: self._received(t, arrived))

    def _received(self, transfer: Transfer, arrived: Callable[[Transfer], None]) -> None:
        with self._lock:
            self._posted.discard(transfer)
            if self._ended:
                return
            error = transfer.error
            self._ended = error is not None
        if error is not None:
            self._on_error(error)
            return
        arrived(transfer)
        self._pump()

    def _got_header(self, _: Transfer) -> None:
        self._on_header()

    def _got(self, position: int, _: Transfer) -> None:
        piece = self._pieces[position]
        with self._lock:
            self._arrived[position] = True
            while self._prefix < len(self._arrived) and self._arrived[self._prefix]:
                self._prefix += 1
            prefix, outflow = self._prefix, self._outflow
            self.received_bytes += piece.num_bytes
            self._missing[piece.unit] -= 1
            whole = self._missing[piece.unit] == 0
        if outflow is not None:
            outflow.make_available(prefix)
        if whole:
            self._on_unit(piece.unit)
