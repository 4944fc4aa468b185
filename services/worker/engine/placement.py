"""Where a batch's tokens are: their positions, KV slots and pages, as arrays of the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice

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
    tables = [islice(piece.block_table, count) for piece, count in zip(slices, num_pages.tolist(), strict=True)]
    pages = np.fromiter(chain.from_iterable(tables), dtype=np.int32, count=int(kv_indptr[-1]))
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
