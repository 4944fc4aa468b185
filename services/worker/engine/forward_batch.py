"""What an engine is told of a step: values that nothing changes once they are made, numbered in one place.

A scheduler may go on, preempt, end and free while a step that it has begun is still computed: nothing of a step is
looked up in what goes on. Where the token that a request decodes from is still being sampled, a slice names the row
that it comes from (``RowOf``).

What is made for each slice of a step is part of no circle: the garbage collector need not look (``gc=False``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.core.scheduling.schedule import Sampled, ScheduledSlice
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import BadRequest
from shared.messages.common import ErrorInfo
from shared.messages.generation import SamplingParams

Bits = npt.NDArray[np.int32]
CountsOf = Callable[[Sequence[int], Sequence[int]], Any]
"""``Engine.counts_of``."""

SAMPLED_STEPS = 2
"""Of the newest steps, an engine knows the tokens that it sampled: those that are in flight at once."""


class RowOf(msgspec.Struct, frozen=True, gc=False):
    """The token that a row of an earlier step samples: of the slices that sample, the ``row``-th."""

    step: int
    row: int


class Masks(Protocol):
    """What a request's next token may be (``engine.grammar``)."""

    @property
    def is_complete(self) -> bool:
        """It can be none but the end."""

    def mask(self, wait_s: float = 0.0) -> Bits | ErrorInfo | None:
        """A bit per token, ``[ceil(vocabulary / 32)]``, the first one the lowest of each number; or why there is none.
        None: it is not there, not after so many seconds either."""


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """How the token behind a slice is chosen."""

    params: SamplingParams
    position: int
    """Of the token in the request's output: draws depend on it and on the seed."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end the sequence, beside the parameters' own stop tokens."""
    masks_ends: bool = False
    """Neither may be chosen: fewer than ``min_tokens`` are put out."""
    counts: Any = None
    """The engine's, of the tokens that penalties count (``Engine.counts_of``); None for a request without."""
    masks: Masks | None = None
    """Of the tokens that may be chosen, where that is not all of them."""


class PromptRows(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a slice whose logits say how likely the prompt's own next tokens are."""

    first: int
    """Of the slice's tokens."""
    next_ids: tuple[int, ...]
    """The token behind each: the last one of a slice has its in the next slice."""
    num_top: int
    """Alternatives to each."""


class Slice(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one sequence that a batch computes: positions ``start .. start + num_tokens``."""

    sequence_id: int
    token_ids: tuple[int, ...]
    start: int
    """Position of the first token; KV of all earlier positions is in the blocks."""
    block_table: Sequence[int]
    """KV blocks of positions 0.., enough for every position up to the slice's end. Nobody changes it."""
    row: SamplingRow | None = None
    """How the token behind the last one is sampled, where the slice ends the known tokens."""
    token_from: RowOf | None = None
    """The only token is the one of this row. ``token_ids`` has any id in its place."""
    scored: PromptRows | None = None
    """Of a prompt whose log-probabilities are asked for."""


class ForwardBatch(msgspec.Struct, frozen=True):
    """Slices to compute together; decode slices have one token."""

    number: int
    """Of the step, counted over the engine's life."""
    slices: tuple[Slice, ...]
    scores: bool = False
    """Whether a slice is ``scored``."""

    @property
    def num_tokens(self) -> int:
        return sum([len(piece.token_ids) for piece in self.slices])

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """``[num_tokens]``, with any id where a slice names a row."""
        return np.fromiter(chain.from_iterable([s.token_ids for s in self.slices]), np.int64, count=self.num_tokens)

    @property
    def rows(self) -> tuple[SamplingRow, ...]:
        """Of the slices that sample, in their order."""
        return tuple(piece.row for piece in self.slices if piece.row is not None)

    def part(self, begin: int, end: int) -> ForwardBatch:
        """Tokens ``begin <= i < end`` of all slices, one after another; a slice that does not end in it samples
        nothing. Parts score nothing."""
        slices: list[Slice] = []
        for piece in self.slices:
            count = len(piece.token_ids)
            first, last = max(0, begin), min(count, end)
            if first < last:
                token_ids, start = piece.token_ids[first:last], piece.start + first
                row = piece.row if last == count else None
                slices.append(Slice(piece.sequence_id, token_ids, start, piece.block_table, row, piece.token_from))
            begin, end = begin - count, end - count
        return ForwardBatch(self.number, tuple(slices))


class ForwardBatches:
    """Makes those of one engine, and numbers them. On the engine's thread."""

    def __init__(self, counts_of: CountsOf) -> None:
        self._counts_of = counts_of
        self._next_number = 0
        self._last_step: tuple[int, Sequence[ScheduledSlice]] = (0, ())
        self._last_rows: dict[int, RowOf] | None = None
        """Of that step, by a sequence's ``id``; None: to be found out."""

    def of_step(self, pieces: Sequence[ScheduledSlice]) -> ForwardBatch:
        """What a scheduler's step computes, as it is now. A slice behind all known tokens has the one that the step
        before samples."""
        slices: list[Slice] = []
        scores = False
        for piece in pieces:
            sequence, start, count = piece.sequence, piece.start, piece.num_tokens
            tokens = sequence.tokens
            if start == len(tokens):
                behind = self._row(sequence, len(sequence.output) + 1)
                slices.append(Slice(sequence.id, (0,), start, sequence.placed(), behind, self._row_of(sequence)))
                continue
            row = self._row(sequence, len(sequence.output)) if piece.sample else None
            if count == 1 and row is not None:  # no token of a prompt is behind it
                slices.append(Slice(sequence.id, (tokens[start],), start, sequence.placed(), row))
                continue
            token_ids, scored = tuple(tokens[start : start + count]), None
            if sequence.num_to_score:
                scored = _prompt_rows(sequence, start, start + count)
                scores = scores or scored is not None
            slices.append(Slice(sequence.id, token_ids, start, sequence.placed(), row, None, scored))
        self._last_step, self._last_rows = (self._next_number, pieces), None
        return self.of(slices, scores=scores)

    def _row_of(self, sequence: ActiveSequence) -> RowOf:
        """Which samples its next token."""
        if self._last_rows is None:
            number, pieces = self._last_step
            sampling = [piece.sequence for piece in pieces if piece.sample]
            self._last_rows = {id(sampled): RowOf(number, row) for row, sampled in enumerate(sampling)}
        return self._last_rows[id(sequence)]

    def of_prompts(self, sequences: Iterable[ActiveSequence]) -> ForwardBatch:
        """Whole contexts, which have their blocks."""
        return self.of([Slice(s.id, tuple(s.tokens), 0, s.placed(), self._row(s, len(s.output))) for s in sequences])

    def of(self, slices: Iterable[Slice], *, scores: bool = False) -> ForwardBatch:
        """With the next number."""
        number, self._next_number = self._next_number, self._next_number + 1
        return ForwardBatch(number, tuple(slices), scores)

    def _row(self, sequence: ActiveSequence, position: int) -> SamplingRow:
        params = sequence.params
        if sequence.is_penalised and sequence.counts is None:
            sequence.counts = self._counts_of(sequence.prompt, sequence.output)
        masks_ends = position < params.min_tokens
        if not sequence.is_guided:
            return SamplingRow(params, position, sequence.end_ids, masks_ends, sequence.counts)
        masks = cast("Masks", sequence.guidance)
        return SamplingRow(params, position, sequence.end_ids, masks_ends, sequence.counts, masks)


def _prompt_rows(sequence: ActiveSequence, start: int, end: int) -> PromptRows | None:
    """Of tokens ``start <= i < end`` of a prompt, those whose next one has no log-probability yet."""
    first, last = max(start + 1, sequence.num_scored), min(end + 1, sequence.num_to_score)
    if first >= last:
        return None
    num_top = sequence.params.prompt_logprobs
    assert num_top is not None
    return PromptRows(first - 1 - start, sequence.prompt[first:last], num_top)


class SampledSteps:
    """The tokens of an engine's newest steps, for slices that name their rows. Of an engine that computes as it is
    called: they are there."""

    def __init__(self) -> None:
        self._token_ids: dict[int, list[int]] = {}

    def add(self, number: int, sampled: Sequence[Sampled]) -> None:
        """A row that failed has a token id all the same: what was begun behind it must be computable."""
        self._token_ids[number] = [max(0, token.token_id) for token in sampled]
        while len(self._token_ids) > SAMPLED_STEPS:
            del self._token_ids[next(iter(self._token_ids))]

    def known(self, batch: ForwardBatch) -> ForwardBatch:
        """With token ids everywhere. Raises ``BadRequest`` for a row that none of the newest steps has."""
        for piece in batch.slices:
            if piece.token_from is not None:
                return ForwardBatch(batch.number, tuple([self._known(s) for s in batch.slices]), batch.scores)
        return batch

    def _known(self, piece: Slice) -> Slice:
        if piece.token_from is None:
            return piece
        step, row = piece.token_from.step, piece.token_from.row
        sampled = self._token_ids.get(step, [])
        if not 0 <= row < len(sampled):
            raise BadRequest(f"row {row} of step {step}: not sampled, or too long ago")
        return msgspec.structs.replace(piece, token_ids=(sampled[row],), token_from=None)
