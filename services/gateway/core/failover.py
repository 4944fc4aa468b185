"""What becomes of a request whose attempt failed.

Rules
- What is wrong with the request itself is its client's error: another instance would say the same.
- When every token is here and only the terminal part was lost, the request is complete.
- Any other failure sends the request back into its queue, until it has failed too often, and the instance is left alone
  for a moment. A full instance is no failure: how long it is left alone, the router knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.core.stream import StreamState
from shared.errors import (
    BadRequest,
    BlitzError,
    Conflict,
    DeadlineExceeded,
    Internal,
    ModelNotFound,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from shared.messages.codec import MalformedMessage
from shared.messages.generation import FinishReason

SUSPECT_PAUSE_S = 1.0
"""How long an instance that did not answer is left alone."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The instance refused the request for good: it holds nothing of it, the client gets the error."""

    error: BlitzError


@dataclass(frozen=True, slots=True)
class Complete:
    """Nothing is missing: the request ends with this reason."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Retry:
    """The request continues behind its last token, elsewhere if it can."""

    fault: bool
    """Whether this counts as a failed attempt. If not, the instance was full."""
    pause_s: float
    """How long the instance takes nothing."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No instance could do better: the client gets the error."""

    error: BlitzError
    pause_s: float


Outcome = Refuse | Complete | Retry | GiveUp


def after_failure(stream: StreamState, error: BlitzError, *, max_attempts: int, model_registered: bool) -> Outcome:
    """Judge the failure of a stream's current attempt. Changes nothing."""
    if isinstance(error, MalformedMessage):
        error = Internal(f"the worker did not understand the request: {error.message}")
    elif isinstance(error, BadRequest | PayloadTooLarge):
        return Refuse(error)
    ended = stream.ended()
    if ended is not None:
        return Complete(ended)
    fault = not isinstance(error, Overloaded)
    pause_s = _pause_s(error)
    if not model_registered:
        return GiveUp(ModelNotFound(f"model {stream.model!r} was removed", param="model"), pause_s)
    failures = stream.failures + fault
    if failures >= max_attempts:
        return GiveUp(Unavailable(f"{failures} attempts failed, the last one: {error.message}"), pause_s)
    return Retry(fault, pause_s)


def _pause_s(error: BlitzError) -> float:
    return SUSPECT_PAUSE_S if isinstance(error, Unavailable | DeadlineExceeded | NotFound | Conflict) else 0.0
