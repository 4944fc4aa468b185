"""What a copy misses, read from the checkpoint's directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from services.worker.device.host import HOST
from services.worker.memory.arena import Arena
from services.worker.memory.loader import load_unit
from services.worker.memory.pieces import Pieces
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.pace import Pace
from shared.aio import in_thread
from shared.checkpoint import Checkpoint, inspect_registered
from shared.errors import CheckpointChanged
from shared.messages.registry import FileDigest


class CheckpointReader:
    """Fills one copy, whole units or single pieces. All methods on the event loop; the reading is done in threads."""

    def __init__(
        self,
        copy: WeightCopy,
        path: str,
        files: Sequence[FileDigest],
        on_unit: Callable[[int], None],
        *,
        alone: bool,
        pace: Pace | None = None,
    ) -> None:
        """``files``: those beside the weights, as they were registered. ``on_unit(unit)``: a unit is whole.
        ``alone``: nothing else writes into the copy at the same time. ``pace``: no unit comes ahead of it."""
        self._copy = copy
        self._path = Path(path)
        self._files = tuple(files)
        self._on_unit = on_unit
        self._alone = alone
        self._pace = pace or Pace()
        self._lock = asyncio.Lock()
        self._checkpoint: Checkpoint | None = None
        self.sealed: set[int] = set()
        """Units that were read and hashed here: nothing is left to verify."""

    async def read(self, missing: Pieces, on_first: Callable[[], None]) -> None:
        """Read these pieces, unit by unit; ``on_first`` is called before. Raises ``BadCheckpoint``, and
        ``CheckpointChanged`` for files or units that are not those that were registered; no such unit arrives."""
        async with self._lock:  # several stripes may climb here
            checkpoint = await self._inspected()
            on_first()
            with self._pace.reading():
                if self._alone:
                    await self._read_units(checkpoint, [unit for unit, _, _ in missing.by_unit()])
                else:
                    await self._read_pieces(checkpoint, missing)

    async def read_unit(self, unit: int) -> None:
        """Read a unit over what is there. Raises as ``read`` does: then nothing of the unit is here."""
        async with self._lock:
            checkpoint = await self._inspected()
            with self._pace.reading():
                await self._load_in_place(checkpoint, unit)
            await self._seal(checkpoint, unit)

    async def _inspected(self) -> Checkpoint:
        if self._checkpoint is None:
            # The hash was taken when the model was added; taking it again would read everything twice.
            layout = self._copy.layout
            found = await asyncio.to_thread(inspect_registered, self._path, self._files, generic=layout.is_generic)
            if layout.is_generic and found.layout.hash != layout.hash:
                raise CheckpointChanged(
                    f"{self._path} does not have the tensors that were registered: put them back, or register the "
                    "model anew"
                )
            self._checkpoint = found
        return self._checkpoint

    async def _read_units(self, checkpoint: Checkpoint, units: Sequence[int]) -> None:
        hashed: asyncio.Task[None] | None = None
        try:
            for unit in units:
                await self._load_in_place(checkpoint, unit)
                if hashed is not None:
                    await hashed
                # Hashed while the next unit is read: the disk does not wait for the processor.
                hashed = asyncio.create_task(self._seal_new(checkpoint, unit))
        finally:
            if hashed is not None:
                await hashed

    async def _seal(self, checkpoint: Checkpoint, unit: int) -> None:
        if not await in_thread(self._copy.seal, unit):
            raise _changed(checkpoint, unit)
        self.sealed.add(unit)

    async def _seal_new(self, checkpoint: Checkpoint, unit: int) -> None:
        await self._seal(checkpoint, unit)
        self._on_unit(unit)

    async def _read_pieces(self, checkpoint: Checkpoint, missing: Pieces) -> None:
        """Others still receive into the same units: only the missing pieces may be touched."""
        aside = Arena(HOST.allocate(self._copy.layout.num_bytes))  # a unit at a time takes real memory
        for unit, pieces, _ in missing.by_unit():
            try:
                await self._load(checkpoint, unit, aside)
                if await in_thread(self._take_over, checkpoint, aside, unit, pieces):
                    self._on_unit(unit)
            finally:
                await in_thread(aside.release)

    async def _load_in_place(self, checkpoint: Checkpoint, unit: int) -> None:
        self._copy.forget(unit)
        await self._load(checkpoint, unit, self._copy.arena)

    async def _load(self, checkpoint: Checkpoint, unit: int, arena: Arena) -> None:
        layout = self._copy.layout
        await self._pace.wait(layout.units[unit].num_bytes)
        await in_thread(load_unit, checkpoint, layout, checkpoint.layout.units[unit], arena)

    def _take_over(self, checkpoint: Checkpoint, aside: Arena, unit: int, pieces: Pieces) -> bool:
        """Whether the unit is whole now, and was not before."""
        checksums = aside.unit_checksums(self._copy.layout.units[unit])
        if not self._copy.is_registered(unit, checksums):
            raise _changed(checkpoint, unit)
        whole = False
        for piece in pieces:
            if piece.is_checksums:
                self._copy.declare(unit, checksums)
            else:
                self._copy.write(piece, aside.memory(piece.offset, piece.num_bytes))
            whole |= self._copy.arrived(piece)
        return whole


def _changed(checkpoint: Checkpoint, number: int) -> CheckpointChanged:
    unit = checkpoint.layout.units[number]
    names = {checkpoint.tensors[part.checkpoint_name].file.name for slot in unit.slots for part in slot.parts}
    return CheckpointChanged(
        f"{checkpoint.path}: {', '.join(sorted(names))}: {unit.name} is not what was registered: the file has changed, "
        "or is another on this host"
    )
