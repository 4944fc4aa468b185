"""Where a batch's tokens are: arrays, next to what a loop over tokens says."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from services.worker.engine.forward_batch import ForwardBatch
from services.worker.engine.placement import places_of
from tests.services.worker.engine.batches import slice_of

BLOCK_SIZE = 4
TABLES = [
    (9, 6, [7, 3, 0, 5]),
    (0, 4, [2]),
    (7, 1, [1, 8, 6, 9]),
    (3, 1, [4]),
]
"""Start, tokens, blocks: a chunk behind a prefix, a whole prompt, decodes; some with blocks to spare."""
KINDS: dict[str, Callable[[Sequence[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": lambda table: array("i", table),
}


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_those_of_each_token(kind: str) -> None:
    slices = [
        slice_of(number, range(count), start, KINDS[kind](table)) for number, (start, count, table) in enumerate(TABLES)
    ]
    places = places_of(ForwardBatch(0, tuple(slices)), BLOCK_SIZE)
    tokens = [(table, at) for start, count, table in TABLES for at in range(start, start + count)]
    assert places.positions.tolist() == [at for _, at in tokens]
    assert places.slots.tolist() == [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for table, at in tokens]
    paged = places.paged
    used = [table[: -(-(start + count) // BLOCK_SIZE)] for start, count, table in TABLES]
    assert paged.pages.tolist() == [block for blocks in used for block in blocks]
    assert paged.kv_indptr.tolist() == [0, 4, 5, 7, 8]
    assert paged.qo_indptr.tolist() == [0, 6, 10, 11, 12]
    assert paged.last_page_len.tolist() == [3, 4, 4, 4]
    assert {array.dtype for array in (paged.pages, paged.kv_indptr, paged.qo_indptr, paged.last_page_len)} == {
        np.dtype(np.int32)
    }
    assert paged.pages.flags.writeable, "a tensor may lie in it"
