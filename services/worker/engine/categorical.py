"""Drawing tokens: a row of scores, a temperature, top-k, top-p and one number give one token.

The number is a hash of (seed, index of the output token). It is looked up in a cumulative distribution:

- Without top-k and top-p over all tokens in the order of their ids. No sort is needed: the row's blocks are summed, and
  only the block in which the number falls is gone through. It is also the order that does not depend on the scores, so
  that a rounding difference between two machines or batch sizes does not reorder near-equal tokens.
- Else over the kept tokens by falling score, ties by id. What surely is not kept is left out first. Where much is left,
  it is divided by score into buckets, and only those are sorted in which the limit or the number falls.

Weights are float32 (exp of the scaled distance to the best score), their sums float64 but for those inside a block.
Everything is row-wise, and so the same whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
BLOCK_TOKENS = 512
SORT_TOKENS = 4096
"""More tokens than this are not sorted whole."""
NUM_BUCKETS = 1024
LEAST_TEMPERATURE = 1e-30
"""Below, float32 has too little left; the draw has been greedy since long before."""
_SPAN = 60.0
"""A token so many temperatures below the best weighs 1e-26."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DrawRow:
    """How one row is drawn. ``number``: in [0, 1)."""

    number: float
    temperature: float
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0

    def keeps_all(self, vocab: int) -> bool:
        return self.top_p >= 1.0 and not 0 < self.top_k < vocab


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, index of the output token): splitmix64 over both."""
    state = _mix((seed & _MASK) + 0x9E3779B97F4A7C15)
    state = _mix((state ^ (position & _MASK)) + 0x9E3779B97F4A7C15)
    return (state >> 11) * 2.0**-53


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Doubles:
    """``uniform`` of each pair, which takes 2 us for one; 256 of them together take 0.1 ms."""
    state = _mix_all(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + _STEP)
    state = _mix_all((state ^ np.array([position & _MASK for position in positions], dtype=np.uint64)) + _STEP)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix_all(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw(scores: torch.Tensor, best: Floats, rows: Sequence[DrawRow]) -> list[int]:
    """One token per row of ``scores`` [n, vocab], float32 on the CPU, which is not changed.

    ``best`` [n]: each row's largest score, a finite number. A token of score -inf is never drawn.
    """
    vocab = scores.shape[1]
    weights = draw_weights(
        scores,
        torch.from_numpy(best),
        torch.tensor([max(row.temperature, LEAST_TEMPERATURE) for row in rows], dtype=torch.float32),
    )
    # float32 inside a block, as that is eight times as quick; the error is that of the weights themselves.
    masses = weights.sum(-1)
    cumulative = masses.cumsum(-1, dtype=torch.float64)
    token_ids = [0] * len(rows)
    whole = [i for i, row in enumerate(rows) if row.keeps_all(vocab)]
    if whole:
        numbers = torch.tensor([rows[i].number for i in whole], dtype=torch.float64)
        chosen = slice(None) if len(whole) == len(rows) else whole
        for i, token_id in zip(whole, _draw_by_id(weights, cumulative, chosen, numbers), strict=True):
            token_ids[i] = token_id
    for i, row in enumerate(rows):
        if not row.keeps_all(vocab):
            flat = weights[i].view(-1)[:vocab].numpy()
            token_ids[i] = _draw_falling(scores[i].numpy(), flat, float(cumulative[i, -1]), row)
    return token_ids


def draw_weights(scores: torch.Tensor, best: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """``[n, blocks, BLOCK_TOKENS]``: relative to the likeliest token, whose weight is 1; zeros after the last token."""
    num_rows, vocab = scores.shape
    num_blocks = -(-vocab // BLOCK_TOKENS)
    flat = torch.empty(num_rows, num_blocks * BLOCK_TOKENS, dtype=torch.float32)
    flat[:, vocab:] = -torch.inf
    torch.sub(scores, best[:, None], out=flat[:, :vocab])
    if bool((temperatures != 1.0).any()):
        flat /= temperatures[:, None]
    return flat.exp_().view(num_rows, num_blocks, BLOCK_TOKENS)


def _draw_by_id(
    weights: torch.Tensor, cumulative: torch.Tensor, chosen: slice | list[int], numbers: torch.Tensor
) -> list[int]:
    """Tokens of the rows ``chosen`` [m] at ``numbers`` [m], over all tokens in the order of their ids."""
    sums = cumulative[chosen]
    # Below the sum however it was rounded: then a first sum beyond it exists, and its block has a mass.
    wanted = torch.minimum(numbers * sums[:, -1], sums[:, -1].nextafter(torch.zeros((), dtype=torch.float64)))
    at = torch.searchsorted(sums, wanted[:, None], right=True)
    before = torch.where(at > 0, sums.gather(1, (at - 1).clamp_(min=0)), 0.0)
    rows = torch.arange(len(weights))[chosen]
    inside = weights[rows, at[:, 0]].cumsum(-1, dtype=torch.float64)
    rest = torch.minimum(wanted[:, None] - before, inside[:, -1:].nextafter(torch.zeros((), dtype=torch.float64)))
    tokens = at * BLOCK_TOKENS + torch.searchsorted(inside, rest, right=True)
    result: list[int] = tokens[:, 0].tolist()
    return result


def _draw_falling(scores: Floats, weights: Floats, whole_mass: float, row: DrawRow) -> int:
    """The token at ``row.number`` of what top-k and then top-p keep of a row [vocab], by falling score."""
    vocab = len(scores)
    if 0 < row.top_k < vocab:
        ids = _largest(scores, row.top_k)
        order = _FallingOrder(scores[ids], weights[ids], ids, _SPAN * row.temperature)
        mass = float(weights[ids].sum(dtype=np.float64))
    else:
        # All tokens of less weight together cannot make up for what top_p leaves out. Half of that allows for rounding.
        least = 0.5 * (1.0 - row.top_p) * whole_mass / vocab
        candidates = weights >= least
        mass = whole_mass
        if np.count_nonzero(candidates) <= SORT_TOKENS:
            ids = np.flatnonzero(candidates)
            order = _FallingOrder(scores[ids], weights[ids], ids, 0.0)
        else:
            order = _FallingOrder(scores, weights, None, -math.log(least) * row.temperature)
    if row.top_p < 1.0:
        mass = order.mass_reaching(row.top_p * mass)
    return order.token_beyond(min(row.number * mass, np.nextafter(mass, 0.0)))


def _largest(scores: Floats, count: int) -> Ids:
    """The ids of the ``count`` largest scores, of equals at the end the lowest, in rising order among equals."""
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > least)
    return np.concatenate([above, np.flatnonzero(scores == least)[: count - len(above)]])


class _FallingOrder:
    """Tokens by falling score, ties by id, with their cumulative mass; sorted only where they are looked up."""

    def __init__(self, scores: Floats, weights: Floats, ids: Ids | None, span: float) -> None:
        """``ids``: of the tokens, in rising order among equal scores; None: 0, 1, 2, ... ``span``: so far below the
        best score it is worth dividing many tokens into buckets."""
        self._scores, self._weights, self._ids = scores, weights, ids
        self._bucket: npt.NDArray[np.int32] | None = None
        self._sums: Doubles = np.zeros(1)
        if len(scores) > SORT_TOKENS:
            last = np.float32(NUM_BUCKETS - 1)
            scale = np.float32((NUM_BUCKETS - 1) / max(span, LEAST_TEMPERATURE))
            # Monotone in the score, so every token of a bucket comes before all of the next.
            self._bucket = np.minimum((scores.max() - scores) * scale, last).astype(np.int32)
            masses = np.bincount(self._bucket, weights=weights, minlength=NUM_BUCKETS)
            self._sums = np.concatenate([self._sums, masses.cumsum()])

    def mass_reaching(self, mass: float) -> float:
        """The cumulative mass of the first token at which it is at least ``mass``; of the last if it never is."""
        _, sums = self._sorted(int(np.searchsorted(self._sums[1:], mass, side="left")))
        return float(sums[min(int(np.searchsorted(sums, mass, side="left")), len(sums) - 1)])

    def token_beyond(self, mass: float) -> int:
        """The first token at which the cumulative mass is more than ``mass``, or the last that has any."""
        tokens, sums = self._sorted(int(np.searchsorted(self._sums[1:], mass, side="right")))
        at = min(int(np.searchsorted(sums, mass, side="right")), int(np.searchsorted(sums, sums[-1])))
        return int(tokens[at] if self._ids is None else self._ids[tokens[at]])

    def _sorted(self, bucket: int) -> tuple[Ids, Doubles]:
        """Which tokens are in a bucket, in order, and the cumulative mass through each."""
        if self._bucket is None:
            order = _falling(self._scores)
            return order, self._weights[order].cumsum(dtype=np.float64)
        # Rounding may put the end of the sums a little below what is asked for.
        bucket = min(bucket, int(np.searchsorted(self._sums[1:], self._sums[-1])))
        inside = np.flatnonzero(self._bucket == bucket)
        order = inside[_falling(self._scores[inside])]
        return order, self._sums[bucket] + self._weights[order].cumsum(dtype=np.float64)


def _falling(scores: Floats) -> Ids:
    """The order by falling score, stable. A sort of numbers is several times as quick as a stable argsort."""
    bits = (scores + np.float32(0)).view(np.int32).astype(np.int64)  # -0.0 becomes 0.0: equal scores have equal bits
    rank = np.where(bits < 0, bits & 0x7FFFFFFF, -1 - bits)
    keys = (rank << 32) | np.arange(len(scores))
    keys.sort()
    return keys & 0xFFFFFFFF
