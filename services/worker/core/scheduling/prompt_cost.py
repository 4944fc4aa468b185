"""What prompt tokens add to a step, as measured: a line per token over the context that it attends to.

    seconds of a prompt token = token + context · pair

``context`` is the mean number of tokens that those of a step attend to, so that the later chunks of a long prompt cost
more. The line follows the last few steps; what was measured earlier fades. Pure: sizes and seconds come in.
"""

from __future__ import annotations

import math

DECAY = 0.7
"""Of what a step says, per step after it: half of it has gone after two."""
MOST_SLOWER = 2.0
"""A step that took more than this many times what was expected was a stall, unless the one before was as slow."""
LEAST_S = 1e-9
"""That a step can be measured to take: no engine is quicker, and dividing by less overflows."""
LEAST_TOKEN_S = 1e-18
"""That a token can take, by the same reasons: a profile may say anything."""
LEAST_SPREAD = 0.1
"""Contexts that differ by less than this share of their mean say little of the slope."""


class PromptCost:
    """Takes what steps took, says what others will."""

    def __init__(self) -> None:
        self.token_s = 0.0
        """0, as the next: unknown."""
        self.pair_s = 0.0
        self._weight = 0.0
        # Weighted sums, over steps, of the context, of the seconds per token, and of their products.
        self._context = self._per_token = self._square = self._product = 0.0
        self._was_slow = False

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def expect(self, token_s: float, pair_s: float) -> None:
        """Of an instance that was measured beforehand."""
        for context in (0.0, 1024.0):
            self._add(context, token_s + context * pair_s)
        self.token_s, self.pair_s = token_s, pair_s

    def measured(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """So many prompt tokens, which attended to ``num_pairs`` tokens together, added so much to a step."""
        if num_tokens <= 0 or not LEAST_S <= seconds < math.inf:
            return
        if self.is_known:
            most_s = MOST_SLOWER * self.seconds(num_tokens, num_pairs)
            is_slow = seconds > most_s
            if is_slow and not self._was_slow:
                seconds = most_s
            self._was_slow = is_slow
        self._add(num_pairs / num_tokens, seconds / num_tokens)
        self._fit()

    def seconds(self, num_tokens: int, num_pairs: int) -> float:
        """What they would add; 0 while nothing is known."""
        return num_tokens * self.token_s + num_pairs * self.pair_s

    def tokens_within(self, seconds: float, start: int) -> int:
        """How many tokens of a prompt, from position ``start`` on, add no more than that. 0 while nothing is known."""
        first_s = self.token_s + (start + 0.5) * self.pair_s
        if seconds <= 0 or first_s < LEAST_TOKEN_S:
            return 0
        # n · first + n² / 2 · pair = seconds, in the form that loses no digits where pairs cost next to nothing.
        return int(2 * seconds / (first_s + math.sqrt(first_s**2 + 2 * self.pair_s * seconds)))

    def _add(self, context: float, per_token_s: float) -> None:
        self._weight = DECAY * self._weight + 1
        self._context = DECAY * self._context + context
        self._per_token = DECAY * self._per_token + per_token_s
        self._square = DECAY * self._square + context * context
        self._product = DECAY * self._product + context * per_token_s

    def _fit(self) -> None:
        """The nearest line, neither part negative; its slope stays as it was where contexts hardly differ."""
        context, per_token_s = self._context / self._weight, self._per_token / self._weight
        variance = max(0.0, self._square / self._weight - context**2)
        covariance = self._product / self._weight - context * per_token_s
        doubt = (LEAST_SPREAD * context) ** 2
        slope = (covariance + doubt * self.pair_s) / (variance + doubt) if variance + doubt else 0.0
        self.pair_s = min(max(slope, 0.0), per_token_s / context if context else 0.0)
        self.token_s = max(0.0, per_token_s - self.pair_s * context)


def num_pairs(start: int, num_tokens: int) -> int:
    """Tokens that so many of a prompt, from position ``start`` on, attend to: all before them, and themselves."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2
