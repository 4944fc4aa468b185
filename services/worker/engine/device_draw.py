"""Drawing tokens on a device: what ``categorical`` does, without a look at what is there.

Nothing here waits for the device: there is no shape, branch or index of the host's that depends on what a tensor holds.
Weights are integers, so that sums are the same in whatever order a device adds: a token's weight is exp of the scaled
distance to the best score, in float32 as ``categorical`` has it, times 2**42, rounded down. A token so unlikely that
this is 0 is never drawn: all of 2**18 such tokens together weigh 6e-8 of the best one. Sums of 2**20 tokens fit.

Everything is row-wise. Of rows whose best score is not a finite number the result is any token; nothing else is
impaired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

WEIGHT_BITS = 42
BLOCK_TOKENS = 512
TOP_K_TOKENS = 1024
"""So many largest tokens are selected, which reads a row a few times; for more it is sorted whole."""
ROWS_AT_ONCE = 64
"""Bounds what is allocated at once: 20 bytes per token of the vocabulary and row, 160 MB for 128k tokens."""
SORTED_ROWS_AT_ONCE = 32
"""The same where rows are sorted, with about 60 bytes: 250 MB."""


@dataclass(frozen=True, slots=True)
class DrawTable:
    """How some rows are drawn, on their device; each ``[n]``."""

    numbers: torch.Tensor
    """float64, in [0, 1)."""
    temperatures: torch.Tensor
    """float32, positive."""
    top_p: torch.Tensor
    """float64; 1.0 keeps all."""
    top_k: torch.Tensor
    """int64, positive; the vocabulary's size keeps all."""


def best_of(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``[n, vocab]`` each row's largest score, NaN if there is one, and the lowest id that has it. The scores are
    read once: ids are only compared inside of a block."""
    maxima = _by_block(scores, lambda block: block.amax(-1))
    best = maxima.amax(-1)
    block = _first_equal(maxima, best)
    ids = block * BLOCK_TOKENS + _first_equal(_block(scores, block), best)
    return best, ids.clamp_(max=scores.shape[1] - 1)


def weights_of(scores: torch.Tensor, best: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """``[n, vocab]`` int64, ``2**WEIGHT_BITS`` for the best score."""
    scaled = torch.sub(scores, best[:, None]).div_(temperatures[:, None]).exp_()
    return scaled.mul_(2.0**WEIGHT_BITS).to(torch.int64)


def log_sums_of(scores: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """``[n]`` float64: the logarithm of the sum of exp over each row ``[n, vocab]``."""
    masses = weights_of(scores, best, torch.ones_like(best)).sum(-1)
    return masses.double().mul_(2.0**-WEIGHT_BITS).log_().add_(best)


def largest_of(scores: torch.Tensor, count: int) -> torch.Tensor:
    """``[n, count]``: the ids of each row's largest scores ``[n, vocab]``, by falling score, ties by id."""
    # Which of equal values a selection finds is not said: these keys are all different, the larger the larger the
    # score, and of equal scores the lower the id.
    vocab = scores.shape[1]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0: equal scores have equal bits
    rank = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    keys = torch.add(torch.arange(vocab - 1, -1, -1, device=scores.device), rank, alpha=1 << 32)
    return (keys.topk(count, dim=-1).values & 0xFFFFFFFF).neg_().add_(vocab - 1)


def draw_by_id(scores: torch.Tensor, best: torch.Tensor, how: DrawTable) -> torch.Tensor:
    """``[n]``: of all tokens, in the order of their ids."""
    masses = _Masses(weights_of(scores, best, how.temperatures))
    return masses.first_beyond(_share(how.numbers, masses.whole))


def draw_of_top_k(scores: torch.Tensor, best: torch.Tensor, how: DrawTable, most: int) -> torch.Tensor:
    """``[n]``: of what top-k and then top-p keep, by falling score, ties by id. ``most``: the largest top-k."""
    ids = largest_of(scores, most)
    return _draw_falling(scores.gather(1, ids), ids, best, how)


def draw_sorted(scores: torch.Tensor, best: torch.Tensor, how: DrawTable) -> torch.Tensor:
    """As ``draw_of_top_k``, for any top-k."""
    # Half of what it costs to sort keys. A stable sort leaves equal scores in the order of their ids.
    falling, ids = (scores + 0.0).sort(dim=-1, descending=True, stable=True)
    return _draw_falling(falling, ids, best, how)


def _draw_falling(scores: torch.Tensor, ids: torch.Tensor, best: torch.Tensor, how: DrawTable) -> torch.Tensor:
    """``scores`` [n, m] fall; ``ids`` [n, m] are whose they are."""
    weights = weights_of(scores, best, how.temperatures)
    weights.masked_fill_(torch.arange(scores.shape[1], device=scores.device) >= how.top_k[:, None], 0)
    masses = _Masses(weights)
    reached = (how.top_p * masses.whole.double()).ceil_().to(torch.int64).clamp_(min=1)
    last = torch.where(how.top_p < 1.0, torch.minimum(reached, masses.whole), masses.whole)
    kept = masses.through(masses.first_beyond(last - 1))
    return ids.gather(1, masses.first_beyond(_share(how.numbers, kept))[:, None])[:, 0]


def _share(numbers: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """That share of each mass, rounded down; less than the mass."""
    return torch.minimum((numbers * masses.double()).to(torch.int64), masses - 1)


class _Masses:
    """Cumulative weights of rows ``[n, m]`` int64, looked up without their being written: the sums of blocks first,
    then only the block in which it falls."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        self._sums = _by_block(weights, lambda block: block.sum(-1)).cumsum(-1)
        self.whole = self._sums[:, -1]

    def first_beyond(self, masses: torch.Tensor) -> torch.Tensor:
        """``[n]``: the first place through which the weights are more than ``masses``, each less than the whole."""
        at = torch.searchsorted(self._sums, masses[:, None], right=True).clamp_(max=self._sums.shape[1] - 1)
        inside = _block(self._weights, at[:, 0]).cumsum(-1)
        places = torch.searchsorted(inside, masses[:, None] - self._before(at), right=True).add_(at * BLOCK_TOKENS)
        return places[:, 0].clamp_(max=self._weights.shape[1] - 1)

    def through(self, places: torch.Tensor) -> torch.Tensor:
        """``[n]``: the weights of each row up to its place, and of that."""
        at = places[:, None] // BLOCK_TOKENS
        inside = _block(self._weights, at[:, 0]).cumsum(-1).gather(1, places[:, None] - at * BLOCK_TOKENS)
        return (self._before(at) + inside)[:, 0]

    def _before(self, at: torch.Tensor) -> torch.Tensor:
        """``[n, 1]``: the sums of all blocks before these."""
        return self._sums.gather(1, (at - 1).clamp_(min=0)).masked_fill_(at == 0, 0)


def _by_block(table: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``[n, blocks]`` of ``[n, m]``: each block's last dimension is reduced. The last one may be short."""
    whole = table.shape[1] // BLOCK_TOKENS
    blocks = reduce(table[:, : whole * BLOCK_TOKENS].view(len(table), whole, BLOCK_TOKENS))
    rest = table[:, whole * BLOCK_TOKENS :]
    return blocks if not rest.shape[1] else torch.cat([blocks, reduce(rest)[:, None]], dim=1)


def _block(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """``[n, BLOCK_TOKENS]``: each row's own block. Behind the end the last value is repeated."""
    places = at[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=table.device)
    return table.gather(1, places.clamp_(max=table.shape[1] - 1))


def _first_equal(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``[n]``: the first place of each row ``[m]`` that has its value; the last place if none has. An argmax may give
    any of several."""
    places = torch.arange(table.shape[1], device=table.device)
    return places.masked_fill(table != values[:, None], table.shape[1] - 1).amin(-1)
