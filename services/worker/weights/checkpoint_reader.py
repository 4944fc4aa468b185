"""What a copy misses, read from the checkpoint's directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from services.worker.memory.arena import Arena, HostArena
from services.worker.memory.loader import load_unit
from services.worker.memory.pieces import Pieces
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.pace import Pace
from shared.aio import in_thread
from shared.checkpoint import Checkpoint, inspect_checkpoint


class CheckpointReader:
    """Fills one copy, whole units or single pieces. All methods on the event loop; the reading is done in threads."""

    def __init__(
        self, copy: WeightCopy, path: str, on_unit: Callable[[int], None], *, alone: bool, pace: Pace | None = None
    ) -> None:
        """``on_unit(unit)``: a unit is whole. ``alone``: nothing else writes into the copy at the same time.
        ``pace``: no unit comes ahead of it."""
        self._copy = copy
        self._path = Path(path)
        self._on_unit = on_unit
        self._alone = alone
        self._pace = pace or Pace()
        self._lock = asyncio.Lock()
        self._checkpoint: Checkpoint | None = None
        self.sealed: set[int] = set()
        """Units that were read and hashed here: nothing is left to verify."""

    async def read(self, missing: Pieces, on_first: Callable[[], None]) -> None:
        """Read these pieces, unit by unit; ``on_first`` is called before. Raises ``BadCheckpoint``."""
        async with self._lock:  # several stripes may climb here
            checkpoint = await self._inspected()
            on_first()
            with self._pace.reading():
                if self._alone:
                    await self._read_units(checkpoint, [unit for unit, _, _ in missing.by_unit()])
                else:
                    await self._read_pieces(checkpoint, missing)

    async def read_unit(self, unit: int) -> None:
        """Read a unit over what is there; its checksums are those of what was read. Raises ``BadCheckpoint``."""
        async with self._lock:
            checkpoint = await self._inspected()
            with self._pace.reading():
                await self._load(checkpoint, unit, self._copy.arena)
            await in_thread(self._copy.seal, unit)

    async def _inspected(self) -> Checkpoint:
        if self._checkpoint is None:
            # The hash was taken when the model was added; taking it again would read everything twice.
            self._checkpoint = await asyncio.to_thread(inspect_checkpoint, self._path, with_hash=False)
        return self._checkpoint

    async def _read_units(self, checkpoint: Checkpoint, units: Sequence[int]) -> None:
        hashed: asyncio.Task[None] | None = None
        try:
            for unit in units:
                await self._load(checkpoint, unit, self._copy.arena)
                if hashed is not None:
                    await hashed
                # Hashed while the next unit is read: the disk does not wait for the processor.
                hashed = asyncio.create_task(self._seal(unit))
        finally:
            if hashed is not None:
                await hashed

    async def _seal(self, unit: int) -> None:
        await in_thread(self._copy.seal, unit)
        self.sealed.add(unit)
        self._on_unit(unit)

    async def _read_pieces(self, checkpoint: Checkpoint, missing: Pieces) -> None:
        """Others still receive into the same units: only the missing pieces may be touched."""
        aside = HostArena(self._copy.layout.num_bytes)  # a unit at a time takes real memory
        for unit, pieces, _ in missing.by_unit():
            try:
                await self._load(checkpoint, unit, aside)
                if await in_thread(self._take_over, aside, unit, pieces):
                    self._on_unit(unit)
            finally:
                await in_thread(aside.release)

    async def _load(self, checkpoint: Checkpoint, unit: int, arena: Arena) -> None:
        layout = self._copy.layout
        await self._pace.wait(layout.units[unit].num_bytes)
        await in_thread(load_unit, checkpoint, layout, layout.units[unit], arena)

    def _take_over(self, aside: HostArena, unit: int, pieces: Pieces) -> bool:
        """Whether the unit is whole now, and was not before."""
        whole = False
        for piece in pieces:
            if piece.is_checksums:
                self._copy.declare(unit, aside.unit_checksums(self._copy.layout.units[unit]))
            else:
                self._copy.buffer(piece)[:] = aside.memory(piece.offset, piece.num_bytes)
            whole |= self._copy.arrived(piece)
        return whole
