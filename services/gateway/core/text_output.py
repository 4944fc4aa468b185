"""One stream's text: tokens in, deltas out, until a stop string or the end.

The deltas add up to the decoded whole, never half a character. Byte-level vocabularies (GPT-2, Llama 3, Qwen 2) map
each token to bytes, so that an incremental UTF-8 decoder is exact and cheap. Others (SentencePiece style) are decoded
through the tokenizer over a short sliding window. There, a run of byte-fallback tokens that begins with whole
characters and only later turns out invalid keeps the characters already sent.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8
"""A character has at most 4 bytes: a window that ends broken for longer will stay broken."""
_MAX_WINDOW_TOKENS = 32
"""More than an emission and what is held behind it: beyond, tokens without text are not kept."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Decodes one stream."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token (may be empty)."""

    def flush(self) -> str:
        """The rest, when no token follows."""


class ByteDetokenizer:
    """For byte-level vocabularies. ``table[id]`` are the token's bytes; ``hidden`` ids print nothing."""

    __slots__ = ("_decoder", "_hidden", "_table")

    def __init__(self, table: Sequence[bytes], hidden: frozenset[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._hidden or token_id >= len(self._table):
            return ""
        return self._decoder.decode(self._table[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any other vocabulary: decodes a window that starts one emission before the new tokens.

    ``decode`` gives the text of some ids; ``hidden`` ids print nothing, whatever is around them. The text of
    ``ids[prefix:read]`` is already sent; a leading space that a decoder strips from the first token is then stripped
    on both sides.
    """

    __slots__ = ("_decode", "_hidden", "_ids", "_prefix_text", "_read")

    def __init__(self, decode: Callable[[list[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids: list[int] = []
        self._read = 0
        self._prefix_text = ""

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < _MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        if len(self._ids) == self._read:
            return ""
        return self._emit(self._decode(self._ids))

    def _emit(self, text: str) -> str:
        delta = text[len(self._prefix_text) :]
        if not delta:
            # A token without text (a stripped space, an id that the tokenizer lacks) cannot serve as the next prefix.
            del self._ids[_MAX_WINDOW_TOKENS:]
            self._read = len(self._ids)
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._prefix_text = self._decode(self._ids)
        return delta


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

    @property
    def stop_string(self) -> str | None:
        """The one that was found; None: none was."""
        return self._scanner.found if self._scanner is not None else None

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


class StopScanner:
    """Finds the earliest stop string in a growing text.

    ``include`` keeps the stop string itself in the output. After ``stopped`` is set, nothing more may be pushed.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "found", "stopped")

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = stops
        self._longest = max(len(stop) for stop in stops)
        self._include = include
        self._held = ""
        self.stopped = False
        self.found: str | None = None
        """Which of them was found."""

    def push(self, delta: str) -> str:
        """The text that may be shown now."""
        if not delta:
            return ""
        text = self._held + delta
        at, match = min(
            ((found, stop) for stop in self._stops if (found := text.find(stop)) >= 0),
            key=lambda hit: (hit[0], len(hit[1])),
            default=(-1, ""),
        )
        if at >= 0:
            self.stopped, self.found = True, match
            self._held = ""
            return text[: at + len(match)] if self._include else text[:at]
        keep = self._overlap(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
