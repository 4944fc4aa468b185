"""Small structs that several messages embed."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.errors import BlitzError, error_from_code
from shared.messages.codec import Message

Role = Literal["colocated", "prefill", "decode"]
InstanceState = Literal["spare", "loading", "live", "serving", "draining", "failed"]
Device = Literal["cpu", "cuda"]
LivePolicy = Literal["zigzag", "best_effort", "stop_the_world"]
"""``shared.zigzag.queue.Policy``, by value."""
LiveChoice = Literal["auto", "always", "never"]
"""Whether a scale operation makes pairs. ``auto``: where loading first and serving then would break the SLO."""


class Ack(Message, frozen=True, kw_only=True, tag="ack.v1"):
    """Done; nothing to say."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A typed error inside a message (``shared.errors`` code and text)."""

    code: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: BlitzError) -> ErrorInfo:
        return cls(code=error.code, message=error.message, retry_after_s=error.retry_after_s)

    def as_error(self) -> BlitzError:
        return error_from_code(self.code, self.message, retry_after_s=self.retry_after_s)
