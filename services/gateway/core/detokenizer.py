"""Token ids to text, one at a time: the deltas add up to the decoded whole, never half a character.

Two ways. Byte-level vocabularies (GPT-2, Llama 3, Qwen 2) map each token to bytes, so that an
incremental UTF-8 decoder is exact and cheap. Others (SentencePiece style) are decoded through the
tokenizer over a short sliding window. There, a run of byte-fallback tokens that begins with whole
characters and only later turns out invalid keeps the characters already sent.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8
"""A character has at most 4 bytes: a window that ends broken for longer will stay broken."""

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

    ``decode`` gives the text of some ids. The text of ``ids[prefix:read]`` is already sent; a
    leading space that a decoder strips from the first token is then stripped on both sides.
    """

    __slots__ = ("_decode", "_ids", "_prefix_text", "_read")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0
        self._prefix_text = ""

    def push(self, token_id: int) -> str:
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
            # A token without text (hidden, or a stripped space) cannot serve as the next prefix.
            self._read = len(self._ids)
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._prefix_text = self._decode(self._ids)
        return delta
