"""What a late engine was given, as it was when it was called."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from services.worker.engine.forward_batch import ForwardBatch
from shared.transport.base import Buffer

Tables = Sequence[Sequence[int]]


class Argument:
    """Something that nobody may change until the call that was given it is done."""

    def __init__(self, what: str, look: Callable[[], object]) -> None:
        """``look()`` gives equal values while it is unchanged."""
        self.what = what
        self._look = look
        self._then = look()

    @property
    def changed(self) -> bool:
        return self._look() != self._then


def batch_argument(batch: ForwardBatch) -> Argument:
    """Its tokens and block tables. Tuples are not copied, and compared at once where they are the same objects."""

    def look() -> object:
        return batch.number, [(s.sequence_id, tuple(s.token_ids), s.start, tuple(s.block_table)) for s in batch.slices]

    return Argument("the batch has changed", look)


def buffer_argument(buffer: Buffer) -> Argument:
    """Its bytes, by their hash."""
    flat = np.frombuffer(buffer, dtype=np.uint8)
    return Argument("the bytes have changed", lambda: xxhash.xxh3_64_intdigest(flat.data))


def positions_argument(tables: Tables, ends: Sequence[int], starts: Sequence[int]) -> Argument:
    """Positions of sequences, and their block tables."""
    return Argument(
        "the positions have changed", lambda: ([tuple(table) for table in tables], tuple(ends), tuple(starts))
    )


def blocks_argument(
    times_freed: Sequence[int], block_size: int, tables: Tables, ends: Sequence[int], starts: Sequence[int] = ()
) -> Argument:
    """The blocks of these positions: each is whose it was until it is freed. ``times_freed``: of the pool."""
    blocks = [
        block
        for table, end, start in zip(tables, ends, starts or [0] * len(ends), strict=True)
        for block in table[start // block_size : -(-end // block_size)]
    ]
    return Argument("a KV block was freed", lambda: [times_freed[block] for block in blocks])
