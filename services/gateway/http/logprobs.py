"""Log-probabilities in the two shapes that OpenAI defines."""

from __future__ import annotations

import math
from typing import Any, Protocol

import msgspec

from services.gateway.tokenizer import ModelTokenizer
from shared.messages.generation import TokenLogprobs

ENTRY_BYTES = 256
"""What an entry takes beside its JSON."""
_FLOOR = -9999.0
"""JSON has no minus infinity; OpenAI clients know this value."""


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _FLOOR


def _packed(value: dict[str, Any]) -> msgspec.Raw:
    """As JSON: objects of twenty alternatives each would take ten times the memory."""
    return msgspec.Raw(msgspec.json.encode(value))


def entry_bytes(entry: Any) -> int:
    """About what an entry takes in memory."""
    pieces = entry if isinstance(entry, tuple) else (entry,)
    return sum(ENTRY_BYTES + len(bytes(piece)) for piece in pieces if isinstance(piece, msgspec.Raw))


class LogprobShape(Protocol):
    """Renders log-probabilities of one choice, token by token."""

    def entry(self, token_id: int, logprobs: TokenLogprobs, text: str) -> Any:
        """One token's part; ``text`` is what the token printed."""

    def join(self, entries: list[Any]) -> dict[str, Any]:
        """The ``logprobs`` object of some tokens."""


class ChatLogprobs:
    """``{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}``."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    def entry(self, token_id: int, logprobs: TokenLogprobs, text: str) -> Any:  # noqa: ARG002 - the other shape's
        own = self._token(token_id, logprobs.logprob)
        return _packed({**own, "top_logprobs": [self._token(other, value) for other, value in logprobs.top]})

    def join(self, entries: list[Any]) -> dict[str, Any]:
        return {"content": entries}


class CompletionLogprobs:
    """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``; offsets count shown characters."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def entry(self, token_id: int, logprobs: TokenLogprobs, text: str) -> Any:
        offset = self._offset
        self._offset += len(text)
        top = {self._text(other): _finite(value) for other, value in logprobs.top}
        token = self._text(token_id)
        top.setdefault(token, _finite(logprobs.logprob))
        return token, _finite(logprobs.logprob), _packed(top), offset

    def join(self, entries: list[Any]) -> dict[str, Any]:
        return {
            "tokens": [entry[0] for entry in entries],
            "token_logprobs": [entry[1] for entry in entries],
            "top_logprobs": [entry[2] for entry in entries],
            "text_offset": [entry[3] for entry in entries],
        }
