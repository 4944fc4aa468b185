"""From logits to tokens, with OpenAI's and vLLM's meaning of every parameter.

Order: log-probabilities are read off the raw logits; then a grammar masks what does not fit, ``min_tokens`` the tokens
that would end the request, ``logit_bias`` is added, the repetition penalty (prompt and output) and
the frequency and presence penalties (output) apply; then temperature, top-k, top-p, draw.

A draw depends on the logits and on (seed, index of the output token), never on the rest of the batch; see
``categorical``.
Greedy takes the lowest id among equals.

A row whose logits are not finite numbers (NaN, +inf, or all -inf) yields ``Sampled.error``: its
request ends with an ``internal`` error, the other rows are unaffected. A ``logit_bias`` outside the vocabulary yields
``bad_request`` likewise; other ids outside the vocabulary cannot occur in logits and are ignored. A row whose mask is
not there yields ``Sampled.is_late``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.tensors import Tensors
from services.worker.engine.categorical import DrawRow, Floats, Ids, draw, uniform
from services.worker.engine.forward_batch import Bits, ForwardBatch, SampledSteps, SamplingRow
from services.worker.engine.handoff import check_tokens
from services.worker.engine.sampling import Drawn
from services.worker.engine.token_counts import TokenCounts
from shared.errors import BadRequest, Internal
from shared.messages.common import ErrorInfo
from shared.messages.generation import SamplingParams, TokenLogprobs


class HostSampler:
    """``Sampler`` on the CPU, where logits are there when they are asked for."""

    def __init__(self, vocab_size: int, tensors: Tensors) -> None:
        self._vocab_size = vocab_size
        self._tensors = tensors
        self._steps = SampledSteps()

    def known(self, batch: ForwardBatch) -> Ids:
        token_ids = self._steps.known(batch).token_ids
        check_tokens(token_ids, self._vocab_size)
        return token_ids

    def token_ids(self, known: Ids) -> torch.Tensor:
        return self._tensors.upload(known)[0]

    def counts_of(self, prompt: Sequence[int], output: Sequence[int]) -> TokenCounts:
        return TokenCounts(prompt, output)

    def sample(self, logits: torch.Tensor, batch: ForwardBatch) -> Drawn:
        sampled = sample_rows(logits, batch.rows)
        self._steps.add(batch.number, sampled)
        return lambda: sampled


_ROWS_AT_ONCE = 32
"""Bounds the copies: 32 rows of 128k tokens are 16 MiB each."""


def sample_rows(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """One token per row of ``logits`` [n, vocab], any float dtype and device. ``logits`` is not changed. Counts get
    what is sampled."""
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows of parameters")
    sampled: list[Sampled] = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        sampled += _sample(logits[start:end].to(device="cpu", dtype=torch.float32), rows[start:end])
    for row, token in zip(rows, sampled, strict=True):
        if row.counts is not None and token.token_id >= 0:
            row.counts.add(row.position, token.token_id)
    return sampled


def _sample(raw: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """``raw`` [n, vocab] float32 on the CPU."""
    errors: dict[int, ErrorInfo] = {}
    bits = bits_of(rows, errors)
    best, greedy = _best(raw)
    for i in np.flatnonzero(~np.isfinite(best)).tolist():
        errors[i] = not_finite(i)
    scores = raw
    adjusted = [i for i, row in enumerate(rows) if i not in errors and (_is_adjusted(row) or bits.get(i) is not None)]
    if adjusted:
        scores = raw.clone()
        for i in adjusted:
            error = _adjust(scores[i].numpy(), rows[i], bits.get(i))
            if error is not None:
                errors[i] = error
        best, greedy = _best(scores)
        for i in np.flatnonzero(~np.isfinite(best)).tolist():
            errors.setdefault(i, NOTHING_LEFT)
    token_ids = greedy.tolist()
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0.0 and i not in errors]
    if drawn:
        ours, tops = (scores, best) if len(drawn) == len(rows) else (scores[drawn], best[drawn])
        for i, token_id in zip(drawn, draw(ours, tops, [_draw_row(rows[i]) for i in drawn]), strict=True):
            token_ids[i] = token_id
    logprobs = _logprobs(raw, token_ids, rows)
    sampled = [
        Sampled(-1, error=errors[i]) if i in errors else Sampled(token_id, logprobs[i])
        for i, token_id in enumerate(token_ids)
    ]
    for i, mask in bits.items():
        if mask is None:
            sampled[i] = Sampled(-1, is_late=True)
    return sampled


def _best(scores: torch.Tensor) -> tuple[Floats, Ids]:
    """Each row's largest score, NaN if there is one, and the lowest id that has it."""
    table = scores.numpy()
    greedy = table.argmax(axis=-1)
    return np.take_along_axis(table, greedy[:, None], axis=-1)[:, 0], greedy


def not_finite(row: int) -> ErrorInfo:
    """Of a row whose logits are none."""
    return ErrorInfo.of(Internal(f"the model's logits for row {row} are not finite numbers"))


NOTHING_LEFT = ErrorInfo.of(BadRequest("grammar, logit_bias and min_tokens leave no token to sample"))


def bits_of(rows: Sequence[SamplingRow], errors: dict[int, ErrorInfo], wait_s: float = 0.0) -> dict[int, Bits | None]:
    """The masks of the rows that have one, by row; None where it is not there. ``errors`` gets why there is none.
    ``wait_s``: at most, in all."""
    bits: dict[int, Bits | None] = {}
    until_s = time.monotonic() + wait_s if wait_s else 0.0
    for i, row in enumerate(rows):
        if row.masks is not None:
            mask = row.masks.mask(max(0.0, until_s - time.monotonic()) if wait_s else 0.0)
            if isinstance(mask, ErrorInfo):
                errors[i] = mask
            else:
                bits[i] = mask
    return bits


def bias_error(params: SamplingParams, vocab: int) -> ErrorInfo | None:
    """Of a ``logit_bias`` outside of the vocabulary."""
    bad = [token_id for token_id, _ in params.logit_bias if not 0 <= token_id < vocab]
    if not bad:
        return None
    return ErrorInfo.of(BadRequest(f"logit_bias: token {bad[0]} is not in 0..{vocab - 1}", param="logit_bias"))


def _draw_row(row: SamplingRow) -> DrawRow:
    params = row.params
    return DrawRow(uniform(params.seed, row.position), params.temperature, max(0, params.top_k), params.top_p)


def _is_adjusted(row: SamplingRow) -> bool:
    return bool(row.params.logit_bias) or row.masks_ends or row.counts is not None


def masks_ends(row: SamplingRow) -> bool:
    """Whether none of its ends may be chosen. A complete grammar leaves nothing else."""
    return row.masks_ends and (row.masks is None or not row.masks.is_complete)


def _adjust(scores: Floats, row: SamplingRow, bits: Bits | None) -> ErrorInfo | None:
    """Apply masks, bias and penalties to one row [vocab] in place; the error of a bad bias."""
    params, vocab = row.params, len(scores)
    if bits is not None:
        fits = np.unpackbits(bits.view(np.uint8), bitorder="little", count=vocab)
        scores[fits == 0] = -np.inf
    if masks_ends(row):
        ends = {*params.stop_token_ids, *row.end_ids}
        scores[_inside(np.fromiter(ends, np.int64), vocab)] = -np.inf
    if params.logit_bias:
        error = bias_error(params, vocab)
        if error is not None:
            return error
        bias = dict(params.logit_bias)
        scores[np.fromiter(bias, np.int64)] += np.fromiter(bias.values(), np.float32)
    if row.counts is not None:
        _penalise(scores, params, row.counts.before(row.position))
    return None


def _penalise(scores: Floats, params: SamplingParams, counts: TokenCounts) -> None:
    # Copies: an array whose memory numpy holds cannot grow.
    ids, times = np.array(counts.ids), np.array(counts.times)
    known = (ids >= 0) & (ids < len(scores))
    if not known.all():
        ids, times = ids[known], times[known]
    values = scores[ids]
    if params.repetition_penalty != 1.0:
        penalty = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
    values -= np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty) * (times > 0)
    scores[ids] = values


def _inside(ids: Ids, vocab: int) -> Ids:
    return ids[(ids >= 0) & (ids < vocab)]


def _logprobs(raw: torch.Tensor, token_ids: Sequence[int], rows: Sequence[SamplingRow]) -> list[TokenLogprobs | None]:
    """Of the rows that ask for them, those with equally many alternatives together."""
    by_count: defaultdict[int, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.params.logprobs is not None:
            by_count[min(row.params.logprobs, raw.shape[1])].append(i)
    result: list[TokenLogprobs | None] = [None] * len(rows)
    for count, wanted in by_count.items():
        table = torch.log_softmax(raw[wanted], dim=-1)
        values, ids = table.topk(count, dim=-1)
        own = table[range(len(wanted)), [token_ids[i] for i in wanted]].tolist()
        for i, logprob, row_ids, row_values in zip(wanted, own, ids.tolist(), values.tolist(), strict=True):
            best = sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            result[i] = TokenLogprobs(logprob=logprob, top=tuple(best))
    return result
