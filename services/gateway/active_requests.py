"""The requests that this gateway has accepted and that have not ended, and where their tokens go."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway.core.queue_reports import Arrivals
from services.gateway.core.stream import Phase, StreamState
from shared.errors import BlitzError
from shared.messages.generation import FinishReason, TokenLogprobs
from shared.subjects import Process


class Sink(Protocol):
    """Where one request's tokens go. Called inline: must be quick and must not raise."""

    def on_tokens(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: FinishReason | None,
        now_s: float,
    ) -> bool:
        """New tokens in order; a finish reason ends the request. True ends it early (a stop string)."""

    def on_error(self, error: BlitzError) -> None:
        """The request ended without a finish reason."""


@dataclass(slots=True)
class ActiveRequest:
    """One accepted request."""

    stream: StreamState
    sink: Sink
    deadline_s: float
    """Until then (monotonic) it may wait for an instance."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The caller's trace: submits are made in it."""
    progress_s: float = -math.inf
    """When the current attempt began, or when its latest new token arrived, in this process's own time."""
    submitting: bool = False
    """The instance has not answered the Submit yet, so it may not know the stream."""
    asking: bool = False
    """A Resend of this stream is on its way."""
    asked: bool = False
    """The gateway has already reacted to the current silence with a Resend."""

    def progressed(self, own_s: float) -> None:
        """Its silence begins anew."""
        self.progress_s = own_s
        self.asked = False


class ActiveRequests:
    """The active requests by id, and what has arrived so far."""

    def __init__(self) -> None:
        self._by_id: dict[str, ActiveRequest] = {}
        self.arrivals = Arrivals()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: ActiveRequest) -> None:
        """Keep a request that was just accepted, and count it as arrived."""
        stream = request.stream
        self.arrivals.count(stream.model, len(stream.prompt_token_ids))
        self._idle.clear()
        self._by_id[stream.request_id] = request

    def remove(self, request_id: str) -> None:
        """Forget a request that ended. Unknown ids are ignored."""
        self._by_id.pop(request_id, None)
        if not self._by_id:
            self._idle.set()

    def find(self, request_id: str) -> ActiveRequest | None:
        """The request of that id; None if it has ended or never existed."""
        return self._by_id.get(request_id)

    def __getitem__(self, request_id: str) -> ActiveRequest:
        """The request of that id, which must be active."""
        return self._by_id[request_id]

    def all(self) -> list[ActiveRequest]:
        """A copy: safe to walk while requests end."""
        return list(self._by_id.values())

    def at_worker(self, worker: Process) -> list[ActiveRequest]:
        """The requests whose current attempt is at a worker."""
        return [request for request in self._by_id.values() if request.stream.worker == worker]

    def inflight_by_model(self) -> dict[str, int]:
        """Requests that are at instances."""
        return self._count(Phase.SUBMITTED, Phase.RUNNING)

    def running_by_model(self) -> dict[str, int]:
        """Of these, the ones that have had a sign from their instance that it computes them."""
        return self._count(Phase.RUNNING)

    def _count(self, *phases: Phase) -> dict[str, int]:
        return dict(Counter(r.stream.model for r in self._by_id.values() if r.stream.phase in phases))

    async def wait_idle(self) -> None:
        """Until no request is left."""
        await self._idle.wait()
