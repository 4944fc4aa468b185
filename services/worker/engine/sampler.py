"""From logits to tokens, with OpenAI's and vLLM's meaning of every parameter.

Order: log-probabilities are read off the raw logits; then ``min_tokens`` masks the tokens that
would end the request, ``logit_bias`` is added, the repetition penalty (prompt and output) and
the frequency and presence penalties (output) apply; then temperature, top-k, top-p, draw.

A draw is one uniform number from a hash of (seed, index of the output token), looked up in the
cumulative distribution over tokens by falling probability, ties by id. All of it is row-wise
and in float64 on the CPU, so it does not depend on the rest of the batch. Greedy takes the
lowest id among equals.

A row whose logits are not finite numbers (NaN, +inf, or all -inf) yields ``Sampled.error``: its
request ends with an ``internal`` error, the other rows are unaffected. A ``logit_bias`` outside the vocabulary yields
``bad_request`` likewise; other ids outside the vocabulary cannot occur in logits and are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from services.worker.engine.base import Sampled, SamplingRow
from shared.errors import BadRequest, Internal
from shared.messages.common import ErrorInfo
from shared.messages.generation import TokenLogprobs

_MASK = (1 << 64) - 1
_HEAD_TOKENS = 1024
"""Likeliest tokens that are looked at before a whole vocabulary is sorted; the result is the same."""
_ROWS_AT_ONCE = 32
"""Bounds the float64 copies: 32 rows of 128k tokens are 32 MiB each."""


def sample_rows(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """One token per row of ``logits`` [n, vocab], any float dtype and device. ``logits`` is not changed."""
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows of parameters")
    if not rows:
        return []
    best, greedy = logits.max(dim=-1)
    finite = torch.isfinite(best).tolist()
    token_ids = greedy.tolist()
    sampled = [
        Sampled(token_id) if ok else _not_finite(row)
        for row, (token_id, ok) in enumerate(zip(token_ids, finite, strict=True))
    ]
    special = [i for i, row in enumerate(rows) if finite[i] and not _is_plain_greedy(row)]
    for start in range(0, len(special), _ROWS_AT_ONCE):
        chosen = special[start : start + _ROWS_AT_ONCE]
        raw = logits[chosen].to(device="cpu", dtype=torch.float32)
        for i, token in zip(chosen, _sample_special(raw, [rows[i] for i in chosen]), strict=True):
            sampled[i] = token
    return sampled


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, index of the output token): splitmix64 over both."""
    state = _mix((seed & _MASK) + 0x9E3779B97F4A7C15)
    state = _mix((state ^ (position & _MASK)) + 0x9E3779B97F4A7C15)
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _not_finite(row: int) -> Sampled:
    message = f"the model's logits for row {row} are not finite numbers"
    return Sampled(-1, error=ErrorInfo.of(Internal(message)))


def _masks_ends(row: SamplingRow) -> bool:
    return len(row.output) < row.params.min_tokens


def _penalises(row: SamplingRow) -> bool:
    params = row.params
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _is_plain_greedy(row: SamplingRow) -> bool:
    params = row.params
    return (
        params.temperature <= 0.0
        and params.logprobs is None
        and not params.logit_bias
        and not _masks_ends(row)
        and not _penalises(row)
    )


def _sample_special(raw: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """``raw`` [n, vocab] float32 on the CPU."""
    scores = raw.clone()
    errors: dict[int, ErrorInfo] = {}
    for i, row in enumerate(rows):
        error = _adjust(scores[i], row)
        if error is not None:
            errors[i] = error
    best, greedy = scores.max(dim=-1)
    token_ids = greedy.tolist()
    for i, ok in enumerate(torch.isfinite(best).tolist()):
        if not ok and i not in errors:
            errors[i] = ErrorInfo.of(BadRequest("logit_bias and min_tokens leave no token to sample"))
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0.0 and i not in errors]
    if drawn:
        for i, token_id in zip(drawn, _draw(scores[drawn], [rows[i] for i in drawn]), strict=True):
            token_ids[i] = token_id
    logprobs = _logprobs(raw, token_ids, rows)
    return [
        Sampled(-1, error=errors[i]) if i in errors else Sampled(token_id, logprobs[i])
        for i, token_id in enumerate(token_ids)
    ]


def _adjust(scores: torch.Tensor, row: SamplingRow) -> ErrorInfo | None:
    """Apply mask, bias and penalties to one row [vocab] in place; the error of a bad bias."""
    params, vocab = row.params, scores.shape[0]
    if _masks_ends(row):
        ends = set(params.stop_token_ids) | set(() if params.ignore_eos else row.eos_token_ids)
        scores[_ids(ends, vocab)] = -torch.inf
    if params.logit_bias:
        bad = [token_id for token_id, _ in params.logit_bias if not 0 <= token_id < vocab]
        if bad:
            return ErrorInfo.of(BadRequest(f"logit_bias: token {bad[0]} is not in 0..{vocab - 1}", param="logit_bias"))
        bias = dict(params.logit_bias)
        scores[torch.tensor(list(bias))] += torch.tensor(list(bias.values()), dtype=torch.float32)
    if not _penalises(row):
        return None
    if params.repetition_penalty != 1.0:
        seen = _ids({*row.prompt, *row.output}, vocab)
        values = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.output and (params.frequency_penalty or params.presence_penalty):
        counts = {t: n for t, n in Counter(row.output).items() if 0 <= t < vocab}
        tokens, times = torch.tensor(list(counts)), torch.tensor(list(counts.values()), dtype=torch.float32)
        if counts:
            scores[tokens] -= params.frequency_penalty * times + params.presence_penalty
    return None


def _ids(token_ids: Iterable[int], vocab: int) -> torch.Tensor:
    return torch.tensor([t for t in token_ids if 0 <= t < vocab], dtype=torch.int64)


def _draw(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token per row of ``scores`` [n, vocab] at its temperature, top-k and top-p."""
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
    shifted = scores.double() - scores.max(dim=-1, keepdim=True).values
    probabilities = torch.softmax(shifted / temperatures[:, None], dim=-1)
    vocab = probabilities.shape[1]
    head, ids = probabilities.topk(min(_HEAD_TOKENS, vocab), dim=-1)
    drawn = []
    for i, row in enumerate(rows):
        number = uniform(row.params.seed, len(row.output))
        # Ties at the end of the head were cut at will: leave that whole level to the full sort.
        known = head.shape[1] if head.shape[1] == vocab else int((head[i] > head[i, -1]).sum())
        token = _inverse_cdf(head[i, :known], ids[i, :known], row, number, vocab)
        if token is None:
            token = _inverse_cdf(probabilities[i], torch.arange(vocab), row, number, vocab)
        assert token is not None
        drawn.append(token)
    return drawn


def _inverse_cdf(
    probabilities: torch.Tensor, ids: torch.Tensor, row: SamplingRow, number: float, vocab: int
) -> int | None:
    """The token at ``number`` of the kept mass, from the likeliest tokens [m] in any order.

    None if m tokens do not settle it: what is kept, or the draw, reaches beyond them.
    """
    whole = len(ids) == vocab
    by_id = ids.argsort()
    order = by_id[probabilities[by_id].argsort(descending=True, stable=True)]
    cumulative = probabilities[order].cumsum(0)
    params = row.params
    kept = vocab if params.top_k <= 0 else min(params.top_k, vocab)
    mass = 1.0
    if kept < vocab:
        if kept > len(ids):
            return None
        mass = cumulative[kept - 1].item()
    if params.top_p < 1.0:
        # The smallest set that reaches top_p; always at least one token.
        limit = params.top_p * mass
        reached = int((cumulative[:kept] < limit).sum()) + 1
        if reached > len(ids) and not whole:
            return None
        kept = min(kept, reached)
        mass = cumulative[kept - 1].item()
    index = int(torch.searchsorted(cumulative, number * mass, right=True))
    if index >= len(ids) and not whole:
        return None
    # Rounding may leave the whole sum a little below ``mass``; never step onto a token of probability 0.
    likeliest = max(int((probabilities > 0).sum()), 1)
    return int(ids[order[min(index, kept - 1, likeliest - 1)]])


def _logprobs(raw: torch.Tensor, token_ids: Sequence[int], rows: Sequence[SamplingRow]) -> list[TokenLogprobs | None]:
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    result: list[TokenLogprobs | None] = [None] * len(rows)
    if not wanted:
        return result
    table = torch.log_softmax(raw[wanted], dim=-1)
    for line, i in zip(table, wanted, strict=True):
        count = min(rows[i].params.logprobs or 0, line.shape[0])
        values, ids = line.topk(count)
        best = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
        result[i] = TokenLogprobs(logprob=float(line[token_ids[i]]), top=tuple(best))
    return result
