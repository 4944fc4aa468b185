"""One copy of a model's weights: bytes in the arena, checksums, and which units are ready.

Units become ready one by one (read from disk, or received and verified) and stay ready until
the copy is dropped. Checksums travel with the weights: whoever read the checkpoint computed them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.worker.data_plane.pieces import Piece, check_blocks
from services.worker.engine.arena import Arena, weights_digest
from shared.errors import TransportError
from shared.layout import CHECK_BYTES, ArenaLayout
from shared.transport.base import Buffer


class WeightCopy:
    """Buffers are touched from the transport's and loader's threads; readiness is the event loop's."""

    def __init__(self, layout: ArenaLayout, arena: Arena) -> None:
        """Raises ``TransportError`` if the arena is too small."""
        if layout.num_bytes > arena.capacity_bytes:
            raise TransportError(
                f"the model needs {layout.num_bytes} bytes and the arena has {arena.capacity_bytes}: "
                "raise BLITZ_WORKER_ARENA_MIB"
            )
        self.layout = layout
        self.arena = arena
        self._starts: list[int] = []
        total = 0
        for unit in layout.units:
            self._starts.append(total)
            total += check_blocks(unit.num_bytes)
        self._checksums: npt.NDArray[np.uint64] = np.zeros(total, dtype=np.uint64)
        self._ready = [False] * len(layout.units)

    def buffer(self, piece: Piece) -> Buffer:
        """The memory a piece comes from or goes to."""
        if piece.is_checksums:
            return self._checksums.view(np.uint8)[piece.offset : piece.offset + piece.num_bytes]
        return self.arena.memory(piece.offset, piece.num_bytes)

    def checksums(self, unit: int) -> tuple[int, ...]:
        """The unit's declared checksums, one per ``CHECK_BYTES``."""
        start = self._starts[unit]
        blocks = check_blocks(self.layout.units[unit].num_bytes)
        return tuple(int(c) for c in self._checksums[start : start + blocks])

    def seal(self, unit: int) -> None:
        """Compute and declare the checksums of a unit read from the checkpoint. Slow: not on the event loop."""
        start = self._starts[unit]
        computed = self.arena.unit_checksums(self.layout.units[unit])
        self._checksums[start : start + len(computed)] = computed

    def bad_ranges(self, unit: int) -> tuple[tuple[int, int], ...]:
        """(arena offset, bytes) of the unit's blocks that differ from their checksum. Slow: not on the event loop."""
        declared = self.checksums(unit)
        target = self.layout.units[unit]
        return tuple(
            (target.offset + i * CHECK_BYTES, min(CHECK_BYTES, target.num_bytes - i * CHECK_BYTES))
            for i, computed in enumerate(self.arena.unit_checksums(target))
            if computed != declared[i]
        )

    def mark_ready(self, unit: int) -> None:
        """The unit's bytes are verified."""
        self._ready[unit] = True

    def is_ready(self, unit: int) -> bool:
        return self._ready[unit]

    @property
    def layers_ready(self) -> int:
        """Leading decoder layers that are ready."""
        count = 0
        while count < self.layout.num_layers and self._ready[count]:
            count += 1
        return count

    @property
    def complete(self) -> bool:
        return all(self._ready)

    def digest(self) -> str:
        """xxh3-128 over all checksums: equal digests mean equal weights. Only of a complete copy."""
        return weights_digest([self.checksums(i) for i in range(len(self.layout.units))])
