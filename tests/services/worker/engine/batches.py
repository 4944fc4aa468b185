"""What an engine is told, by hand."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.engine.forward_batch import ForwardBatch, SamplingRow, Slice
from shared.messages.generation import SamplingParams

GREEDY = SamplingRow(SamplingParams(max_tokens=99, seed=0, temperature=0.0, ignore_eos=True), position=0)


def slice_of(
    sequence_id: int, token_ids: Sequence[int], start: int, block_table: Sequence[int], sample: bool = True
) -> Slice:
    """Which samples greedily, or not at all."""
    return Slice(sequence_id, tuple(token_ids), start, block_table, GREEDY if sample else None)


def forward(*slices: Slice, number: int = 0) -> ForwardBatch:
    """Of a step with that number."""
    return ForwardBatch(number, slices)
