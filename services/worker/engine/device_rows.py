"""Rows of one step that a device samples by other rules than taking the best, kind by kind.

Each kind is made of what the host knows and adds that to the step's pack; what it does afterwards the device does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.worker.device.tensors import Array
from services.worker.engine.categorical import LEAST_TEMPERATURE, uniforms
from services.worker.engine.device_draw import (
    ROWS_AT_ONCE,
    SORTED_ROWS_AT_ONCE,
    TOP_K_TOKENS,
    DrawTable,
    draw_by_id,
    draw_of_top_k,
    draw_sorted,
    largest_of,
    log_sums_of,
)
from services.worker.engine.forward_batch import Bits, SamplingRow
from services.worker.engine.host_pack import HostPack
from services.worker.engine.sampler import bias_error, bits_of, masks_ends
from shared.messages.common import ErrorInfo
from shared.messages.generation import TokenLogprobs

_Draw = Callable[[torch.Tensor, torch.Tensor, DrawTable], torch.Tensor]


class GuidedRows:
    """Those that a grammar guides."""

    def __init__(self, rows: Sequence[SamplingRow], vocab: int, pack: HostPack, *, wait_s: float) -> None:
        """``wait_s``: for masks, at most, in all: the device has the step's layers to compute meanwhile."""
        self.errors: dict[int, ErrorInfo] = {}
        """Why there is no mask, by row."""
        self._vocab = vocab
        bits = bits_of(rows, self.errors, wait_s)
        there = {index: mask for index, mask in bits.items() if mask is not None}
        late = [index for index in bits if index not in there]
        self._rows = pack.ints(list(there)) if there else None
        self._words = pack.ints([_words(mask) for mask in there.values()]) if there else None
        self._late = pack.ints(late) if late else None
        self._refused = pack.ints(list(self.errors)) if self.errors else None

    @property
    def change(self) -> bool:
        """Whether there is anything to ``adjust``."""
        return self._rows is not None

    def adjust(self, logits: torch.Tensor) -> None:
        """In place."""
        if self._rows is not None and self._words is not None:
            places = torch.arange(_WORD_BITS, device=logits.device)
            for row, words in zip(self._rows.tensor, self._words.tensor, strict=True):
                fits = ((words[:, None] >> places) & 1).view(-1)[: self._vocab]
                logits.index_put_((row,), logits[row].masked_fill(fits == 0, -torch.inf))

    def mark(self, codes: torch.Tensor, nothing: int, late: int) -> None:
        """Those without a mask have ``nothing`` in place of a token, or the less that they have, or ``late``."""
        if self._refused is not None:
            rows = self._refused.tensor
            codes.index_copy_(0, rows, codes.index_select(0, rows).clamp_(max=nothing))
        if self._late is not None:
            codes.index_fill_(0, self._late.tensor, late)


_WORD_BITS = 64


def _words(bits: Bits) -> Array:
    """The same, in whole words of 64 bits."""
    return np.pad(bits, (0, len(bits) % 2)).view(np.int64)


class BiasedRows:
    """Those that mask the tokens that end them, or have a bias."""

    def __init__(self, rows: Sequence[SamplingRow], vocab: int, pack: HostPack) -> None:
        self.errors: dict[int, ErrorInfo] = {}
        """Of a bias outside of the vocabulary, by row."""
        masked: list[tuple[int, int]] = []
        biased: list[tuple[int, int]] = []
        values: list[float] = []
        for index, row in enumerate(rows):
            params = row.params
            if masks_ends(row):
                ends = {*params.stop_token_ids, *row.end_ids}
                masked += [(index, token_id) for token_id in ends if 0 <= token_id < vocab]
            if params.logit_bias:
                error = bias_error(params, vocab)
                if error is not None:
                    self.errors[index] = error
                    continue
                bias = dict(params.logit_bias)
                biased += [(index, token_id) for token_id in bias]
                values += bias.values()
        self._masked = pack.ints(np.array(masked).T) if masked else None
        self._biased = pack.ints(np.array(biased).T) if biased else None
        self._values = pack.floats(values) if biased else None
        self._refused = pack.ints(list(self.errors)) if self.errors else None

    @property
    def change(self) -> bool:
        """Whether there is anything to ``adjust``."""
        return self._masked is not None or self._biased is not None

    def adjust(self, logits: torch.Tensor) -> None:
        """In place."""
        if self._masked is not None:
            rows, ids = self._masked.tensor
            logits.index_put_((rows, ids), logits.new_full((), -torch.inf))
        if self._biased is not None and self._values is not None:
            rows, ids = self._biased.tensor
            logits.index_put_((rows, ids), logits[rows, ids] + self._values.tensor.to(torch.float32))

    def refuse(self, codes: torch.Tensor, nothing: int) -> None:
        """Those with an error have ``nothing`` in place of a token, or the less that they have."""
        if self._refused is not None:
            rows = self._refused.tensor
            codes.index_copy_(0, rows, codes.index_select(0, rows).clamp_(max=nothing))


class DrawnRows:
    """Those with a temperature."""

    def __init__(self, rows: Sequence[SamplingRow], vocab: int, pack: HostPack) -> None:
        by_id: list[int] = []
        of_top_k: list[int] = []
        of_all: list[int] = []
        for index, row in enumerate(rows):
            params = row.params
            if params.temperature > 0.0:
                is_limited = 0 < params.top_k < vocab
                if is_limited and params.top_k <= TOP_K_TOKENS:
                    of_top_k.append(index)
                else:
                    (of_all if is_limited or params.top_p < 1.0 else by_id).append(index)
        most = max((rows[index].params.top_k for index in of_top_k), default=0)
        kinds: list[tuple[list[int], _Draw, int]] = [
            (by_id, draw_by_id, ROWS_AT_ONCE),
            (of_top_k, functools.partial(draw_of_top_k, most=most), ROWS_AT_ONCE),
            (of_all, draw_sorted, SORTED_ROWS_AT_ONCE),
        ]
        self._groups = [_DrawGroup(at, rows, draw, at_once, vocab, pack) for at, draw, at_once in kinds if at]

    def draw(self, scores: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put theirs into ``tokens`` [n]."""
        for group in self._groups:
            group.draw(scores, best, tokens)


class _DrawGroup:
    """Those that are drawn in one way."""

    def __init__(
        self, at: list[int], rows: Sequence[SamplingRow], draw: _Draw, at_once: int, vocab: int, pack: HostPack
    ) -> None:
        """``at``: which of all ``rows``."""
        self._draw, self._at_once = draw, at_once
        self._at = None if len(at) == len(rows) else pack.ints(at)
        """None: all."""
        params = [rows[index].params for index in at]
        numbers = uniforms([one.seed for one in params], [rows[index].position for index in at])
        figures = [
            (max(one.temperature, LEAST_TEMPERATURE), one.top_p, one.top_k if one.top_k > 0 else vocab)
            for one in params
        ]
        self._how = pack.floats(np.vstack([numbers, np.array(figures).T]))

    def draw(self, scores: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor) -> None:
        for begin in range(0, self._how.tensor.shape[1], self._at_once):
            some = slice(begin, begin + self._at_once)
            numbers, temperatures, top_p, top_k = self._how.tensor[:, some]
            table = DrawTable(numbers, temperatures.to(torch.float32), top_p, top_k.to(torch.int64))
            if self._at is None:
                tokens[some].copy_(self._draw(scores[some], best[some], table))
            else:
                at = self._at.tensor[some]
                tokens.index_copy_(0, at, self._draw(scores.index_select(0, at), best.index_select(0, at), table))


class LogprobRows:
    """Those that ask for log-probabilities, which are read off the raw logits."""

    def __init__(self, rows: Sequence[SamplingRow], vocab: int, pack: HostPack) -> None:
        self._counts = {
            index: min(row.params.logprobs, vocab) for index, row in enumerate(rows) if row.params.logprobs is not None
        }
        self._most = max(self._counts.values(), default=0)
        self._rows = pack.ints(list(self._counts)) if self._counts else None
        self._parts: list[_RawRows] = []

    def read(self, logits: torch.Tensor, best: torch.Tensor) -> None:
        """Before the logits are changed."""
        if self._rows is not None:
            some = torch.split(self._rows.tensor, ROWS_AT_ONCE)
            self._parts = [_RawRows(rows, logits, best, self._most) for rows in some]

    def tables(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """What is to come to the host: none, or ``[n, 1 + 2 * most]`` float64, of each row its token's, the largest and
        whose these are."""
        parts, self._parts = self._parts, []  # their copies of the logits are not kept until somebody reads this
        return [torch.cat([part.table(tokens) for part in parts])] if parts else []

    def by_row(self, tables: Sequence[Array]) -> dict[int, TokenLogprobs]:
        """Of these, once they are there."""
        result: dict[int, TokenLogprobs] = {}
        for table in tables:
            for (index, count), (own, *rest) in zip(self._counts.items(), table.tolist(), strict=True):
                ids = map(int, rest[self._most : self._most + count])
                result[index] = TokenLogprobs(logprob=own, top=tuple(zip(ids, rest[:count], strict=True)))
        return result


class _RawRows:
    """Some rows' own copy of the logits."""

    def __init__(self, rows: torch.Tensor, logits: torch.Tensor, best: torch.Tensor, most: int) -> None:
        self._rows, self._raw = rows, logits.index_select(0, rows)
        self._log_sums = log_sums_of(self._raw, best.index_select(0, rows))
        ids = largest_of(self._raw, most)
        self._largest = torch.cat([self._logprobs(ids), ids.double()], dim=1)

    def table(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._logprobs(tokens.index_select(0, self._rows)[:, None]), self._largest], dim=1)

    def _logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        return self._raw.gather(1, ids).double() - self._log_sums[:, None]
