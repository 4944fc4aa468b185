"""Log-probabilities of a choice, token by token. Their shape is the endpoint's."""

from __future__ import annotations

import math
from typing import Any, Protocol

import msgspec

from shared.messages.generation import TokenLogprobs

ENTRY_BYTES = 256
"""What an entry takes beside its JSON."""
_FLOOR = -9999.0
"""JSON has no minus infinity; OpenAI clients know this value."""


def finite(value: float) -> float:
    """As JSON has it."""
    return value if math.isfinite(value) else _FLOOR


def packed(value: dict[str, Any]) -> msgspec.Raw:
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

    @property
    def has_more(self) -> bool:
        """Whether the next object has tokens before those that it is made of."""
