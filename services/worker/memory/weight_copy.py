"""One copy of a model's weights: bytes in an arena, checksums, what has arrived, and which units are ready.

Bytes *arrive* (unverified) in any order and may be sent on from then; units become *ready* one by one, once they are
verified, and stay ready until the copy is dropped. Checksums travel with the weights: the worker that read the
checkpoint computed them. They count if their digest is the one in the model's record, wherever they came from
(``shared.unit_digests``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from services.worker.device.completion import waited
from services.worker.memory.arena import Arena, weights_digest
from services.worker.memory.pieces import Piece, Pieces, check_blocks
from shared.errors import Conflict, TransportError
from shared.layout import CHECK_BYTES, ArenaLayout
from shared.transport.base import Buffer
from shared.unit_digests import DIGEST_DIGITS, unit_digest

Listener = Callable[[], None]


class WeightCopy:
    """Buffers and arrivals are touched from the transport's and loader's threads; readiness is the event loop's."""

    def __init__(self, layout: ArenaLayout, arena: Arena, digests: str) -> None:
        """``digests``: what the model's record says of its units (``ModelRecord.unit_digests``). Raises
        ``TransportError`` if the arena is too small, ``Conflict`` for digests of another number of units."""
        if layout.num_bytes > arena.capacity_bytes:
            raise TransportError(
                f"the model needs {layout.num_bytes} bytes and the arena has {arena.capacity_bytes}: "
                "raise BLITZ_WORKER_ARENA_MIB"
            )
        if len(digests) != DIGEST_DIGITS * len(layout.units):
            raise Conflict(
                f"{len(digests) // DIGEST_DIGITS} digests in the model's record, for {len(layout.units)} units: "
                "remove the model and add it again"
            )
        self.layout = layout
        self.arena = arena
        self.digests = digests
        self._starts: list[int] = []
        total = 0
        for unit in layout.units:
            self._starts.append(total)
            total += check_blocks(unit.num_bytes)
        self._starts.append(total)
        self._checksums: npt.NDArray[np.uint64] = np.zeros(total, dtype=np.uint64)
        self._blocks = bytearray(total)
        """1 for each arrived block of ``CHECK_BYTES``; chunks are whole blocks, whichever worker cut them."""
        self._missing = [self._starts[i + 1] - self._starts[i] + 1 for i in range(len(layout.units))]
        """Blocks and checksum tables (one each) that a unit still lacks."""
        self._tables = bytearray(len(layout.units))
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()
        self._ready = [False] * len(layout.units)

    def buffer(self, piece: Piece) -> Buffer:
        """The memory a piece comes from or goes to."""
        if piece.is_checksums:
            return self._checksums.view(np.uint8)[piece.offset : piece.offset + piece.num_bytes]
        return self.arena.memory(piece.offset, piece.num_bytes)

    # --- arrival: any thread ---------------------------------------------------------------

    def has(self, piece: Piece) -> bool:
        """Whether the piece's bytes are here, verified or not."""
        if piece.is_checksums:
            return bool(self._tables[piece.unit])
        first, end = self._block_range(piece)
        return self._blocks.find(0, first, end) < 0

    def missing(self, pieces: Pieces) -> Pieces:
        """Those of them that are not here yet."""
        (units, within), starts = pieces.places, np.array(self._starts)
        blocks = pieces.chunk_bytes // CHECK_BYTES
        first = starts[units] + within * blocks
        end = np.minimum(first + blocks, starts[units + 1])
        is_checksums = first >= starts[units + 1]
        arrived = np.concatenate(([0], np.cumsum(np.frombuffer(self._blocks, dtype=np.uint8), dtype=np.int64)))
        tables = np.frombuffer(self._tables, dtype=np.uint8)[units] > 0
        here = np.where(is_checksums, tables, arrived[end] - arrived[np.minimum(first, end)] == end - first)
        return pieces.only(pieces.indices[~here])

    def arrived(self, piece: Piece) -> bool:
        """The piece's bytes are here; True if its unit is whole now, and was not before."""
        with self._lock:
            if piece.is_checksums:
                fresh = 1 - self._tables[piece.unit]
                self._tables[piece.unit] = 1
            else:
                first, end = self._block_range(piece)
                fresh = self._blocks.count(0, first, end)
                self._blocks[first:end] = b"\1" * (end - first)
            self._missing[piece.unit] -= fresh
            whole = fresh > 0 and self._missing[piece.unit] == 0
        for listener in self._listeners:
            listener()
        return whole

    def unit_arrived(self, unit: int) -> bool:
        """Whether all bytes of the unit are here, verified or not."""
        return self._missing[unit] == 0

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` at every arrival, on the thread that it happens on."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Listener) -> None:
        """Undo ``listen``; a call may still be under way."""
        with self._lock:
            self._listeners = tuple(known for known in self._listeners if known != listener)

    def _block_range(self, piece: Piece) -> tuple[int, int]:
        start = self._starts[piece.unit] + (piece.offset - self.layout.units[piece.unit].offset) // CHECK_BYTES
        return start, start + check_blocks(piece.num_bytes)

    # --- bytes are copied: slow, not on the event loop; on return they are here ----------------

    def write(self, piece: Piece, source: Buffer) -> None:
        """Copy a piece from host memory. It has arrived once ``arrived`` says so."""
        if piece.is_checksums:
            self.buffer(piece)[:] = source
        else:
            waited(self.arena.write(piece.offset, source))

    def forget(self, unit: int) -> None:
        """Nothing of the unit is here: its range is about to be written over, by bytes that may turn out wrong."""
        with self._lock:
            first, end = self._starts[unit], self._starts[unit + 1]
            self._blocks[first:end] = bytes(end - first)
            self._tables[unit] = 0
            self._missing[unit] = end - first + 1

    def seal(self, unit: int) -> bool:
        """Compute and declare the checksums of a unit read from the checkpoint: it has arrived, and is verified.

        False, and nothing of it, if it is not what was registered.
        """
        computed = self.arena.unit_checksums(self.layout.units[unit])
        if not self.is_registered(unit, computed):
            return False
        self._checksums[self._starts[unit] : self._starts[unit + 1]] = computed
        self._whole_unit_arrived(unit)
        return True

    def copy_piece(self, piece: Piece, source: WeightCopy) -> None:
        """As ``write``, from a copy in this process's memory."""
        self.write(piece, source.buffer(piece))

    def copy_unit(self, unit: int, source: WeightCopy) -> bool:
        """Copy a unit and its checksums from a copy in this process's memory: it has arrived. Whether it is verified,
        too: if not, some of its blocks do not match, or the checksums are not those that were registered."""
        computed = waited(self.arena.copy_unit(self.layout.units[unit], source.arena))
        first, end = self._starts[unit], self._starts[unit + 1]
        self._checksums[first:end] = source._checksums[first:end]
        self._whole_unit_arrived(unit)
        return computed == self.checksums(unit) and self.is_registered(unit, computed)

    def _whole_unit_arrived(self, unit: int) -> None:
        with self._lock:
            first, end = self._starts[unit], self._starts[unit + 1]
            self._blocks[first:end] = b"\1" * (end - first)
            self._tables[unit] = 1
            self._missing[unit] = 0
        for listener in self._listeners:
            listener()

    def bad_ranges(self, unit: int) -> tuple[tuple[int, int], ...]:
        """(arena offset, bytes) of the unit's blocks that differ from their checksum; of all blocks, if the checksums
        are not those that were registered."""
        declared = self.checksums(unit)
        target = self.layout.units[unit]
        computed = self.arena.unit_checksums(target) if self.is_registered(unit, declared) else (None,) * len(declared)
        return tuple(
            (target.offset + i * CHECK_BYTES, min(CHECK_BYTES, target.num_bytes - i * CHECK_BYTES))
            for i in range(len(declared))
            if computed[i] != declared[i]
        )

    # --- readiness: the event loop -----------------------------------------------------------

    def checksums(self, unit: int) -> tuple[int, ...]:
        """The unit's declared checksums, one per ``CHECK_BYTES``."""
        return tuple(int(c) for c in self._checksums[self._starts[unit] : self._starts[unit + 1]])

    def is_registered(self, unit: int, checksums: npt.ArrayLike) -> bool:
        """Whether a unit with these checksums is the one that was registered."""
        return unit_digest(checksums) == self.digests[unit * DIGEST_DIGITS : (unit + 1) * DIGEST_DIGITS]

    def declare(self, unit: int, checksums: tuple[int, ...]) -> None:
        """Take a unit's checksums from a holder. Raises ``TransportError`` for others than were registered."""
        if not self.is_registered(unit, checksums):
            raise TransportError(
                f"these checksums of {self.layout.units[unit].name} are not those that were registered"
            )
        self._checksums[self._starts[unit] : self._starts[unit + 1]] = np.array(checksums, dtype=np.uint64)

    def mark_ready(self, unit: int) -> None:
        """The unit's bytes match their checksums: it may be computed with. Raises ``TransportError`` if these are not
        those that were registered."""
        if not self.is_registered(unit, self._checksums[self._starts[unit] : self._starts[unit + 1]]):
            raise TransportError(f"{self.layout.units[unit].name} is not what was registered")
        self._ready[unit] = True

    def is_ready(self, unit: int) -> bool:
        return self._ready[unit]

    @property
    def layers_ready(self) -> int:
        """Leading decoder layers that are ready."""
        first, count = self.layout.first_layer, 0
        while count < self.layout.num_layers and self._ready[first + count]:
            count += 1
        return count

    @property
    def complete(self) -> bool:
        return all(self._ready)

    def digest(self) -> str:
        """xxh3-128 over all checksums: equal digests mean equal weights. Only of a complete copy."""
        return weights_digest(self._checksums)
