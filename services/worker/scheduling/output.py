"""What a step produced for one request."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages.common import ErrorInfo
from shared.messages.generation import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New tokens of one attempt. ``finish_reason`` makes it terminal; each sequence has exactly one terminal."""

    request_id: str
    attempt: int
    gateway_id: str
    offset: int
    """Output tokens of the request before these, across attempts."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    queued_s: float | None = None
    """With the first token of an attempt: seconds from arrival to first scheduling."""
    error: ErrorInfo | None = None
    computing: bool | None = None
    """Of a request that is computed alone: its step is about to begin, or has ended."""
