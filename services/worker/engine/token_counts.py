"""The tokens of one request that penalties are computed from."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from services.worker.engine.forward_batch import SAMPLED_STEPS


class TokenCounts:
    """Made of what a request has, and extended by each token that is sampled for it: a step costs its new token,
    whatever was there before.

    ``ids``: every token that occurred, in the order of its first appearance, as int64. ``times``: how often each
    occurs in the output, as float32; 0 for those of the prompt alone.
    """

    __slots__ = ("_at", "_last", "_num_output", "ids", "times")

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        self.ids = array("q")
        self.times = array("f")
        self._at: dict[int, int] = {}
        self._num_output = 0
        self._last: deque[tuple[int, bool]] = deque(maxlen=SAMPLED_STEPS)
        """Where the last tokens were counted, and whether each occurred there first."""
        for token_id in prompt:
            self._place(token_id)
        for token_id in output:
            self._add(token_id)

    def before(self, position: int) -> TokenCounts:
        """As they are where this token of the output is sampled. A step that failed is run again: then what it drew is
        taken out, and what the one behind it drew. Raises ``ValueError`` for any other position than the next one and
        the last two."""
        if not self._num_output - len(self._last) <= position <= self._num_output:
            raise ValueError(f"counts of {self._num_output} tokens, to sample the one at {position}")
        while position < self._num_output:
            self._take_last_out()
        return self

    def add(self, position: int, token_id: int) -> None:
        """It was sampled. Raises ``ValueError`` as ``before`` does."""
        self.before(position)
        self._add(token_id)

    def _add(self, token_id: int) -> None:
        num_known = len(self.ids)
        place = self._place(token_id)
        self.times[place] += 1.0
        self._num_output += 1
        self._last.append((place, len(self.ids) > num_known))

    def _take_last_out(self) -> None:
        place, is_new = self._last.pop()
        self.times[place] -= 1.0
        if is_new:
            del self._at[self.ids.pop()]
            self.times.pop()
        self._num_output -= 1

    def _place(self, token_id: int) -> int:
        place = self._at.setdefault(token_id, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token_id)
            self.times.append(0.0)
        return place
