"""What becomes of a request whose attempt failed.

Rules
- An error in the request itself goes to its client: another instance would say the same. So does the error of a
  request that an engine fails on while it computes others.
- A worker's death does not count as an attempt, unless a request is the cause (``stream.Deaths``). Neither does a
  worker that is gone when a request is sent to it.
- An instance that goes sends requests back: nothing has failed, and the instance gets no others.
- When all tokens have arrived and only the terminal part was lost, the request is complete.
- Any other failure sends the request back into its queue, until it has failed too often, and the instance gets no
  requests for a moment. A full instance is not a failure: the router decides how long to leave it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.gateway.core.router import Router, gone
from services.gateway.core.stream import MAX_OTHER_DEATHS, Deaths, Phase, StreamState
from shared.errors import (
    BadRequest,
    BlitzError,
    Conflict,
    DeadlineExceeded,
    EngineBroken,
    Internal,
    NoResponder,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    PoisonRequest,
    RequestFailed,
    SentBack,
    Unavailable,
)
from shared.messages.codec import MalformedMessage
from shared.messages.generation import FinishReason
from shared.messages.registry import Route

LossReason = Literal["closed", "gone", "silent"]
"""Why a worker counts as dead: its connection was closed and nothing is subscribed under its name; nothing is
subscribed; it gave no sign of life."""
SUSPECT_PAUSE_S = 1.0
"""How long an instance that did not answer gets no requests."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The instance refused the request for good: it holds nothing of it, the client gets the error."""

    error: BlitzError


@dataclass(frozen=True, slots=True)
class Complete:
    """Nothing is missing; the request ends with this reason."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Retry:
    """The request continues behind its last token, elsewhere if it can."""

    fault: bool
    """Whether this counts as a failed attempt."""
    pause_s: float
    """How long the instance takes nothing."""
    full: bool = False
    """The instance was full, but is healthy."""
    sent_back: bool = False
    """The instance asked for it: nothing failed."""
    deaths: Deaths | None = None
    """If the worker died: the request's deaths, including this one."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No other instance could do better: the client gets the error."""

    error: BlitzError
    pause_s: float


Outcome = Refuse | Complete | Retry | GiveUp


class WorkerLost(Unavailable):
    """A worker that had requests does not answer any more. Stays inside of this process."""

    def __init__(self, message: str, *, reason: LossReason) -> None:
        super().__init__(message)
        self.reason = reason


def after_failure(
    stream: StreamState, error: BlitzError, *, max_attempts: int, model_registered: bool, died: bool = False
) -> Outcome:
    """Judge the failure of a stream's current attempt. ``died``: its worker did, with it. Changes nothing."""
    if isinstance(error, MalformedMessage):
        error = Internal(f"the worker did not understand the request: {error.message}")
    elif isinstance(error, BadRequest | PayloadTooLarge | RequestFailed):
        return Refuse(error)
    ended = stream.ended()
    if ended is not None:
        return Complete(ended)
    pause_s = _pause_s(error)
    if not model_registered:
        return GiveUp(gone(stream.model), pause_s)
    if died:
        return _after_death(stream, pause_s)
    if isinstance(error, Overloaded):
        return Retry(fault=False, pause_s=pause_s, full=True)
    if isinstance(error, SentBack):
        return Retry(fault=False, pause_s=pause_s, sent_back=True)
    if isinstance(error, NoResponder | WorkerLost):
        return Retry(fault=False, pause_s=pause_s)
    failures = stream.failures + 1
    if failures >= max_attempts:
        return GiveUp(Unavailable(f"{failures} attempts failed, the last one: {error.message}"), pause_s)
    return Retry(fault=True, pause_s=pause_s)


def has_died(error: BlitzError, route: Route | None, *, settled: bool) -> bool:
    """Whether the worker of a failed attempt died with it: it did not leave on request, and it is not that the bus was
    away. ``route``: the present one to its instance. ``settled``: what is silent or unknown now is not so because of
    an outage of the bus."""
    if isinstance(error, EngineBroken):
        return True
    if not settled:
        return False
    if isinstance(error, NotFound):
        return route is None  # it does not know the request, and its instance is gone: the worker was restarted
    return isinstance(error, WorkerLost) and (route is None or route.state != "draining")


def leave_alone(router: Router, stream: StreamState, outcome: Retry | GiveUp, *, now_s: float) -> None:
    """Let the router know what the failure says about the stream's instance."""
    if isinstance(outcome, Retry) and outcome.full:
        if stream.may_wait:
            router.refused(stream.instance_id, now_s=now_s)
        else:
            router.slots_taken(stream.instance_id, now_s=now_s)
    elif outcome.pause_s:
        router.suspend(stream.instance_id, until_s=now_s + outcome.pause_s)


def requeue(
    router: Router, stream: StreamState, retry: Retry, *, deadline_s: float, queue_timeout_s: float, now_s: float
) -> float:
    """Give the stream's attempt up and put it back into its queue. Returns until when it may wait there; so far it was
    ``deadline_s``."""
    # A request that kept being sent to workers that were gone, or refused it because they go, has been waiting all
    # the time.
    waits_anew = retry.fault or retry.deaths is not None
    if waits_anew or stream.phase is Phase.RUNNING:
        deadline_s = max(deadline_s, now_s + queue_timeout_s)
    stream.requeued(fault=retry.fault, avoid=not retry.full, deaths=retry.deaths)
    router.requeue(stream, deadline_s=deadline_s)
    return deadline_s


def _after_death(stream: StreamState, pause_s: float) -> Outcome:
    deaths = stream.deaths_with_this()
    if deaths.poison:
        count = len(deaths.workers)
        why = f"this request was running in {count} workers that died, the last time alone: it is not retried"
        return GiveUp(PoisonRequest(why), pause_s)
    if deaths.others > MAX_OTHER_DEATHS:
        return GiveUp(Unavailable(f"{deaths.counted + deaths.others} workers that had this request died"), pause_s)
    return Retry(fault=False, pause_s=pause_s, deaths=deaths)


def _pause_s(error: BlitzError) -> float:
    return SUSPECT_PAUSE_S if isinstance(error, Unavailable | DeadlineExceeded | NotFound | Conflict) else 0.0
