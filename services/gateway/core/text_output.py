"""One stream's text: tokens in, deltas out, until a stop string or the end."""

from __future__ import annotations

from services.gateway.core.detokenizer import Detokenizer
from services.gateway.core.stop_strings import StopScanner


class TextOutput:
    """Detokenisation and stop strings of one stream; lives across attempts.

    ``hidden_ids`` are the tokens that end the output without a text of their own. Stop strings
    are looked for behind the first ``min_tokens`` tokens only.
    """

    __slots__ = ("_detokenizer", "_hidden_ids", "_min_tokens", "_scanner", "num_tokens", "stopped")

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        scanner: StopScanner | None,
        hidden_ids: frozenset[int],
        min_tokens: int,
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._hidden_ids = hidden_ids
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.stopped = False
        """A stop string was found: the stream has ended, even if the worker sends more."""

    def push(self, token_id: int) -> str:
        """The text to show with this token (may be empty)."""
        self.num_tokens += 1
        if token_id in self._hidden_ids:
            return ""
        return self._scan(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """The rest of the text, when the worker has finished the stream."""
        rest = self._scan(self._detokenizer.flush())
        if self._scanner is not None and not self.stopped:
            rest += self._scanner.flush()
        return rest

    def _scan(self, delta: str) -> str:
        scanner = self._scanner
        if scanner is None or not delta:
            return delta
        if self.num_tokens <= self._min_tokens:
            return delta
        text = scanner.push(delta)
        self.stopped = scanner.stopped
        return text
