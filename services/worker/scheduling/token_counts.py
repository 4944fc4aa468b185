"""The distinct tokens of one request, kept from step to step: what penalties are computed from."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class TokenCounts:
    """Grows with the request: a step costs its new tokens, whatever was there before.

    ``ids``: every token that occurred, in the order of its first appearance, as int64. ``times``: how often each
    occurs in the output, as float32; 0 for those of the prompt alone.
    """

    __slots__ = ("_has_prompt", "_index", "_num_output", "ids", "times")

    def __init__(self) -> None:
        self.ids = array("q")
        self.times = array("f")
        self._index: dict[int, int] = {}
        self._num_output = 0
        self._has_prompt = False

    def catch_up(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Count what came since the last call. Always the same request's: its output only grows."""
        if not self._has_prompt:
            self._has_prompt = True
            for token_id in prompt:
                self._at(token_id)
        for position in range(self._num_output, len(output)):
            self.times[self._at(output[position])] += 1.0
        self._num_output = len(output)

    def _at(self, token_id: int) -> int:
        at = self._index.setdefault(token_id, len(self.ids))
        if at == len(self.ids):
            self.ids.append(token_id)
            self.times.append(0.0)
        return at
