"""Where a batch's tokens are: their positions, KV slots and pages, as arrays of the host."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.engine.attention.backend import PagedBatch
from services.worker.engine.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Of one batch, or of a part of one."""

    paged: PagedBatch
    positions: npt.NDArray[np.int64]
    """``[num_tokens]``, in its sequence."""
    slots: npt.NDArray[np.int64]
    """``[num_tokens]``: block * block_size + offset."""


def places_of(batch: ForwardBatch, block_size: int) -> TokenPlaces:
    """``batch``: has slices, and each of them a token and its blocks."""
    slices = batch.slices
    starts = np.array([piece.start for piece in slices], dtype=np.int64)
    lengths = np.array([len(piece.token_ids) for piece in slices], dtype=np.int64)
    ends = starts + lengths
    num_pages = -(-ends // block_size)
    qo_indptr, kv_indptr = (np.concatenate(([0], counts.cumsum())) for counts in (lengths, num_pages))
    pages = _joined([_table(piece.block_table, n) for piece, n in zip(slices, num_pages.tolist(), strict=True)])
    positions = np.arange(qo_indptr[-1]) + np.repeat(starts - qo_indptr[:-1], lengths)
    page_of = np.repeat(kv_indptr[:-1], lengths) + positions // block_size
    paged = PagedBatch(
        qo_indptr.astype(np.int32),
        kv_indptr.astype(np.int32),
        pages,
        (ends - (num_pages - 1) * block_size).astype(np.int32),
    )
    return TokenPlaces(paged, positions, pages[page_of].astype(np.int64) * block_size + positions % block_size)


NOWHERE = TokenPlaces(
    PagedBatch(*(np.zeros(n, dtype=np.int32) for n in (1, 1, 0, 0))), np.empty(0, np.int64), np.empty(0, np.int64)
)
"""Of no tokens."""


def _table(block_table: Sequence[int], num_pages: int) -> memoryview | array[int]:
    """Its first pages, as 32-bit numbers."""
    table = block_table if isinstance(block_table, array) else array("i", block_table)
    return table if len(table) == num_pages else memoryview(table)[:num_pages]


def _joined(tables: Sequence[memoryview | array[int]]) -> npt.NDArray[np.int32]:
    """All of them. Joined as bytes: 16,000 numbers of 256 sequences one by one would take a millisecond."""
    return np.frombuffer(bytearray().join(tables), dtype=np.int32)
