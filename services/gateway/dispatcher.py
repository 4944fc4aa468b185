"""Runs requests: binds them to instances, feeds their tokens to their sinks, moves them when an instance fails.

Everything here runs on the event loop. Decisions come from ``core``; what has to be said to a
worker goes through the ``Outbox`` or an owned task.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from services.gateway.core.router import Assignment, Router
from services.gateway.core.routes import RouteBook, RouteChanges
from services.gateway.core.stream import Phase, StreamState, Verdict
from services.gateway.metrics import GatewayMetrics
from services.gateway.outbox import Outbox
from shared import subjects
from shared.bus.base import Bus
from shared.errors import (
    BadRequest,
    BlitzError,
    Conflict,
    DeadlineExceeded,
    Internal,
    ModelNotFound,
    NoResponder,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from shared.messages.codec import MalformedMessage
from shared.messages.common import Ack
from shared.messages.generation import FinishReason, Resend, StreamPart, Submit, TokenBatch, TokenLogprobs

log = logging.getLogger(__name__)

FULL_PAUSE_S = 0.05
"""How long an instance that said "full" is left alone."""
SUSPECT_PAUSE_S = 1.0
"""How long an instance that did not answer is left alone."""
REASK_DELAY_S = 0.5
"""After a reconnection: time for tokens to come by themselves before they are asked for."""
MAX_MISSED_PROBES = 2


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
class Arrivals:
    """Counters of one model's admitted requests."""

    requests: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True)
class _Active:
    stream: StreamState
    sink: Sink
    context: contextvars.Context
    deadline_s: float
    progress_s: float = -math.inf
    submitting: bool = False
    """The instance has not answered the Submit yet: it need not know the stream."""
    asking: bool = False
    """A Resend of this stream is on its way."""
    asked: bool = False
    """The current silence was answered by a Resend already."""


class Dispatcher:
    """The requests of one gateway. Each ends in exactly one of: a finish reason, an error, ``cancel``."""

    def __init__(
        self,
        bus: Bus,
        book: RouteBook,
        metrics: GatewayMetrics,
        *,
        gateway_id: str,
        max_queued_requests: int,
        queue_timeout_s: float,
        submit_timeout_s: float,
        stall_s: float,
        probe_s: float,
        max_attempts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._book = book
        self._metrics = metrics
        self._gateway_id = gateway_id
        self._queue_timeout_s = queue_timeout_s
        self._submit_timeout_s = submit_timeout_s
        self._stall_s = stall_s
        self._probe_s = probe_s
        self._probe_timeout_s = min(2.0, submit_timeout_s)
        self._max_attempts = max_attempts
        self._clock = clock
        self.router = Router(max_queued_requests=max_queued_requests)
        self.outbox = Outbox(bus, clock)
        self._active: dict[str, _Active] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._arrivals: dict[str, Arrivals] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._seen_s: dict[str, float] = {}
        self._probing: set[str] = set()
        self._missed_probes: dict[str, int] = {}
        self._connected_since_s: float | None = None
        self._next_check_s = -math.inf

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

    async def wait_idle(self) -> None:
        """Until no request is left."""
        await self._idle.wait()

    def inflight_by_model(self) -> dict[str, int]:
        """Requests that are at instances."""
        counts: dict[str, int] = {}
        for active in self._active.values():
            if active.stream.phase is not Phase.QUEUED:
                counts[active.stream.model] = counts.get(active.stream.model, 0) + 1
        return counts

    def arrived(self, model: str) -> Arrivals:
        """What has arrived for a model since this gateway started."""
        return self._arrivals.setdefault(model, Arrivals())

    def start(self, stream: StreamState, sink: Sink) -> None:
        """Take a request. Raises ``Overloaded`` when its model's queue is full."""
        deadline_s = self._clock() + self._queue_timeout_s
        self.router.enqueue(stream, deadline_s=deadline_s, retry_after_s=1.0)
        arrivals = self.arrived(stream.model)
        arrivals.requests += 1
        arrivals.prompt_tokens += len(stream.prompt_token_ids)
        self._idle.clear()
        self._active[stream.request_id] = _Active(stream, sink, contextvars.copy_context(), deadline_s)
        self.pump(stream.model)

    def cancel(self, request_id: str) -> None:
        """The client left: free everything the request holds. Unknown ids are ignored."""
        active = self._active.get(request_id)
        if active is not None:
            self._cancel_attempt(active)
            self._end(active)

    def on_batch(self, batch: TokenBatch) -> None:
        """One engine step's tokens."""
        now_s = self._clock()
        self._seen_s[batch.worker_id] = now_s
        self._missed_probes.pop(batch.worker_id, None)
        for part in batch.parts:
            self._on_part(batch, part, now_s)

    def routes_changed(self, changes: RouteChanges) -> None:
        """React to a new view: bind waiting requests, refuse those of removed models, check on lost instances."""
        for name in sorted(changes.removed):
            for stream in self.router.remove_model(name):
                self._fail(self._active[stream.request_id], ModelNotFound(f"model {name!r} was removed", param="model"))
        for name in sorted(changes.models):
            model = self._book.find(name)
            if model is not None:
                self.router.set_routes(name, model.routes.values())
                self.pump(name)
        # An instance without a route may drain, or be dead: its worker knows.
        asked = set()
        for active in list(self._active.values()):
            stream = active.stream
            if stream.instance_id not in changes.lost_instances or active.submitting:
                continue
            if stream.worker_id not in asked:
                asked.add(stream.worker_id)
                self._probe(active)

    def pump(self, model: str) -> None:
        """Bind the model's waiting requests as far as its instances take them."""
        for assignment in self.router.dispatch(model, now_s=self._clock()):
            self._submit(assignment)

    def tick(self) -> None:
        """Do what time asks for; call it every 50 ms or so."""
        now_s = self._clock()
        for stream in self.router.expired(now_s=now_s):
            self._fail(
                self._active[stream.request_id],
                Unavailable(
                    f"no instance of model {stream.model!r} took the request within {self._queue_timeout_s:g} s",
                    retry_after_s=1.0,
                ),
            )
        for name in list(self._book.models):
            self.pump(name)
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + min(0.25, self._probe_s / 4)
            self._check_silence(now_s)
            self.outbox.forget_strays(now_s)
            self.router.prune()

    async def close(self) -> None:
        """End what still runs with an error, flush the outbox."""
        for active in list(self._active.values()):
            self._cancel_attempt(active)
            self._fail(active, Unavailable("the gateway is shutting down"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.outbox.flush()

    def _on_part(self, batch: TokenBatch, part: StreamPart, now_s: float) -> None:
        active = self._active.get(part.request_id)
        if active is None:
            self._on_stray(batch, part)
            return
        stream = active.stream
        was = stream.phase
        verdict, skip = stream.accept(part)
        if verdict is Verdict.FOREIGN:
            self._on_stray(batch, part)
            return
        if verdict is Verdict.GAP:
            self._ask(active)
            return
        if verdict is Verdict.DUPLICATE:
            return
        active.progress_s = now_s
        active.asked = False
        reason = part.finish_reason
        if was is Phase.SUBMITTED:
            self.router.started(stream.request_id)
            self.pump(stream.model)
        if batch.worker_id != stream.worker_id:
            # A cooperating instance took the request over; it is the one to cancel or to ask now.
            stream.worker_id, stream.instance_id = batch.worker_id, batch.instance_id
        if reason is not None:
            self.outbox.acknowledge(batch.worker_id, part.request_id, part.attempt)
        if reason in ("error", "cancelled"):
            error = part.error.as_error() if part.error is not None else Unavailable(f"the attempt ended: {reason}")
            if part.token_ids[skip:] and self._deliver(active, part, skip, None, now_s):
                return
            self._attempt_failed(active, error)
            return
        self._deliver(active, part, skip, reason, now_s)

    def _deliver(self, active: _Active, part: StreamPart, skip: int, reason: FinishReason | None, now_s: float) -> bool:
        """Hand tokens to the sink. Returns whether the request is over."""
        token_ids, logprobs = part.token_ids, part.logprobs
        if skip:
            token_ids = token_ids[skip:]
            logprobs = logprobs[skip:] if logprobs is not None else None
        stopped = active.sink.on_tokens(token_ids, logprobs, reason, now_s)
        if reason is None and not stopped:
            return False
        if reason is None:
            self._cancel_attempt(active)
        self._end(active)
        return True

    def _on_stray(self, batch: TokenBatch, part: StreamPart) -> None:
        # The worker must not keep what nobody wants: a lost Cancel or AckTerminal is said again.
        if part.finish_reason is not None:
            self.outbox.acknowledge(batch.worker_id, part.request_id, part.attempt)
        else:
            self.outbox.cancel_stray(batch.worker_id, part.request_id, part.attempt)

    def _submit(self, assignment: Assignment) -> None:
        active = self._active[assignment.request_id]
        route = assignment.route
        active.stream.submitted_to(route.instance_id, route.worker_id)
        active.progress_s = self._clock()
        active.asked = False
        self._own(self._submit_attempt(active, active.stream.attempt), active.context)

    async def _submit_attempt(self, active: _Active, attempt: int) -> None:
        stream = active.stream
        message = Submit(
            request_id=stream.request_id,
            attempt=attempt,
            gateway_id=self._gateway_id,
            instance_id=stream.instance_id,
            model=stream.model,
            prompt_token_ids=stream.prompt_token_ids,
            sampling=stream.sampling,
            output_token_ids=tuple(stream.output_token_ids),
            arrived_at_s=stream.arrived_at_s,
        )
        worker_id = stream.worker_id
        active.submitting = True
        try:
            await self._bus.request(subjects.worker_submit(worker_id), message, Ack, timeout_s=self._submit_timeout_s)
        except BlitzError as error:
            # Tokens prove acceptance even when the answer was lost; a later attempt is none of ours.
            if stream.attempt == attempt and stream.phase is Phase.SUBMITTED:
                self._attempt_failed(active, error)
        else:
            self._seen_s[worker_id] = self._clock()
        finally:
            if stream.attempt == attempt:
                active.submitting = False

    def _attempt_failed(self, active: _Active, error: BlitzError) -> None:
        """Continue elsewhere, or end with the error when no other instance could do better."""
        stream = active.stream
        if isinstance(error, MalformedMessage):
            error = Internal(f"the worker did not understand the request: {error.message}")
        elif isinstance(error, BadRequest | PayloadTooLarge):
            self._fail(active, error)
            return
        ended = stream.ended()
        self._cancel_attempt(active)
        if ended is not None:
            active.sink.on_tokens((), None, ended, self._clock())
            self._end(active)
            return
        instance_id = stream.instance_id
        now_s = self._clock()
        fault = not isinstance(error, Overloaded)
        if isinstance(error, Overloaded):
            self.router.suspend(instance_id, until_s=now_s + FULL_PAUSE_S)
        elif isinstance(error, Unavailable | DeadlineExceeded | NotFound | Conflict):
            self.router.suspend(instance_id, until_s=now_s + SUSPECT_PAUSE_S)
        stream.requeued(fault=fault)
        if stream.model not in self._book.models:
            self._fail(active, ModelNotFound(f"model {stream.model!r} was removed", param="model"))
            return
        if stream.failures >= self._max_attempts:
            self._fail(active, Unavailable(f"{stream.failures} attempts failed, the last one: {error.message}"))
            return
        if fault:
            log.warning(
                "request %s: attempt %d on %s failed: %s", stream.request_id, stream.attempt, instance_id, error
            )
            self._metrics.of(stream.model).failovers += 1
            active.deadline_s = max(active.deadline_s, now_s + self._queue_timeout_s)
        self.router.requeue(stream, deadline_s=active.deadline_s)
        self.pump(stream.model)

    def _worker_lost(self, worker_id: str, error: BlitzError) -> None:
        self._missed_probes.pop(worker_id, None)
        for active in self._at(worker_id):
            self._attempt_failed(active, error)

    def _at(self, worker_id: str) -> list[_Active]:
        return [a for a in self._active.values() if a.stream.worker_id == worker_id]

    def _check_silence(self, now_s: float) -> None:
        since_s = self._bus.connected_since_s
        if since_s is None:
            return
        if self._connected_since_s is not None and since_s != self._connected_since_s:
            self._own(self._reask_all(since_s))
        self._connected_since_s = since_s
        silent: set[str] = set()
        for active in list(self._active.values()):
            stream = active.stream
            worker_id = stream.worker_id
            if not worker_id or active.submitting:
                continue
            quiet_s = now_s - max(active.progress_s, since_s)
            if quiet_s >= self._stall_s:
                self._on_stall(active, quiet_s)
            if worker_id not in silent and quiet_s >= self._probe_s:
                worker_quiet_s = now_s - max(self._seen_s.get(worker_id, -math.inf), since_s)
                if worker_quiet_s >= self._probe_s:
                    silent.add(worker_id)
                    self._probe(active)
        held = {a.stream.worker_id for a in self._active.values()}
        self._seen_s = {w: s for w, s in self._seen_s.items() if w in held}

    def _on_stall(self, active: _Active, quiet_s: float) -> None:
        stream = active.stream
        # A request in an instance's queue waits for its turn; one that runs has no such excuse.
        limit_s = 2 * self._stall_s if stream.phase is Phase.RUNNING else self._queue_timeout_s
        if quiet_s >= limit_s:
            self._attempt_failed(active, DeadlineExceeded(f"no token for {quiet_s:.1f} s"))
        elif not active.asked:
            active.asked = True
            self._ask(active)

    async def _reask_all(self, since_s: float) -> None:
        await asyncio.sleep(REASK_DELAY_S)
        for active in list(self._active.values()):
            if active.stream.worker_id and active.progress_s < since_s:
                await self._ask_worker(active)

    def _probe(self, active: _Active) -> None:
        worker_id = active.stream.worker_id
        if worker_id and not active.submitting and worker_id not in self._probing:
            self._probing.add(worker_id)
            self._own(self._probe_worker(worker_id, active))

    async def _probe_worker(self, worker_id: str, active: _Active) -> None:
        try:
            await self._ask_worker(active)
        finally:
            self._probing.discard(worker_id)

    def _ask(self, active: _Active) -> None:
        if not active.asking:
            self._own(self._ask_worker(active))

    async def _ask_worker(self, active: _Active) -> None:
        """Resend from the next offset; what the worker answers tells whether it, and the stream, live."""
        stream = active.stream
        worker_id, attempt = stream.worker_id, stream.attempt
        message = Resend(request_id=stream.request_id, attempt=attempt, offset=len(stream.output_token_ids))
        active.asking = True
        self._metrics.of(stream.model).resends += 1
        try:
            await self._bus.request(subjects.worker_resend(worker_id), message, Ack, timeout_s=self._probe_timeout_s)
        except NoResponder as error:
            self._worker_lost(worker_id, error)
        except DeadlineExceeded as error:
            missed = self._missed_probes[worker_id] = self._missed_probes.get(worker_id, 0) + 1
            if missed >= MAX_MISSED_PROBES and self._bus.connected_since_s is not None:
                self._worker_lost(worker_id, error)
        except NotFound as error:
            if stream.attempt == attempt and stream.phase in (Phase.SUBMITTED, Phase.RUNNING):
                self._attempt_failed(active, error)
        except BlitzError as error:
            log.info("request %s: could not ask worker %s: %s", stream.request_id, worker_id, error)
        else:
            self._seen_s[worker_id] = self._clock()
            self._missed_probes.pop(worker_id, None)
        finally:
            active.asking = False

    def _cancel_attempt(self, active: _Active) -> None:
        stream = active.stream
        if stream.worker_id:
            self.outbox.cancel(stream.worker_id, stream.request_id, stream.attempt)

    def _fail(self, active: _Active, error: BlitzError) -> None:
        self._end(active)
        active.sink.on_error(error)

    def _end(self, active: _Active) -> None:
        stream = active.stream
        self.router.finish(stream.request_id, stream.model)
        stream.finished()
        self._active.pop(stream.request_id, None)
        if not self._active:
            self._idle.set()
        if self.router.queued(stream.model)[0]:
            self.pump(stream.model)

    def _own(self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None) -> None:
        task = asyncio.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
