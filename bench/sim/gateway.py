"""A gateway in virtual time: the real one's core, without HTTP, bus and tokenizers.

Where a request goes, how long it waits, what a refusal or a failure leads to and what is said of queues is
``services.gateway.core``'s. What is left out: asking workers whether they live (who loses a worker says so), asking
for streams that have begun and are silent, cancelled requests, requests that are computed alone, and other gateways.

Whatever happens elsewhere is told when it happens; it is known here a message's latency later. Tokens are the
exception: they are kept at once, with the times at which they get here, so that the steps of a batch in which nothing
else happens can be told together, at their end. What follows from a first token happens when it gets here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import msgspec

from bench.sim.clock import Clock, Event
from bench.sim.latencies import LOCAL_NATS, Latencies
from bench.sim.requests import Failure, Served, SimRequest
from bench.sim.streams import Key
from services.gateway.core import failover
from services.gateway.core.queue_reports import LEAST_REPORT_S, QUEUE_REPORT_EVERY_S, Arrivals, QueueReports
from services.gateway.core.router import TICK_S, Assignment, Router
from services.gateway.core.stream import PartVerdict, Phase, StreamState
from shared.errors import BlitzError, DeadlineExceeded, Overloaded
from shared.messages.generation import DecodePlace, SamplingParams, StreamPart
from shared.messages.load import LoadReport, QueueReport
from shared.messages.registry import Route
from shared.subjects import Process

PRUNE_EVERY_S = 0.125
"""As often as the real one does with its default settings."""
_TOKENS = (0,) * 4096
"""Which tokens they are matters to nobody."""


class GatewaySettings(NamedTuple):
    """Of the real gateway's, those that matter here, with its defaults."""

    max_queued_requests: int = 1024
    """Requests waiting here per model."""
    queue_timeout_s: float = 120.0
    """Longest wait for an instance; then, longest wait in an instance's queue."""
    max_attempts: int = 5


class _Request:
    """One that has not ended."""

    __slots__ = ("deadline_s", "patience", "request", "stream", "times_s", "worker_id")

    def __init__(self, request: SimRequest, stream: StreamState, deadline_s: float) -> None:
        self.request = request
        self.stream = stream
        self.deadline_s = deadline_s
        self.times_s: array[float] = array("d")
        self.patience: Event | None = None
        """While it waits at an instance, when it has done so for too long."""
        self.worker_id = ""
        """Where its first token came from."""


class SimGateway:
    """One gateway. Request ids are ``r`` and the index."""

    def __init__(
        self,
        clock: Clock,
        submit: Callable[[Assignment, StreamState], None],
        on_served: Callable[[Served], None],
        *,
        on_queues: Callable[[QueueReport], None] = lambda _report: None,
        cancel: Callable[[str, Key], None] = lambda _worker_id, _key: None,
        settings: GatewaySettings = GatewaySettings(),
        latencies: Latencies = LOCAL_NATS,
    ) -> None:
        """``submit``: called when a request reaches its instance's worker; raises what that would answer, as
        ``Overloaded`` or ``Conflict``. ``on_served``: called once per request. ``on_queues``: called when a report is
        sent. ``cancel(worker_id, key)``: called when a request that waits at an instance for too long is taken from it,
        or when it tells of an attempt that was given up."""
        self._clock = clock
        self._submit_to = submit
        self._on_served = on_served
        self._on_queues = on_queues
        self._cancel = cancel
        self._settings = settings
        self._latencies = latencies
        self.router = Router(max_queued_requests=settings.max_queued_requests, gateway_id="gateway")
        self._arrivals = Arrivals()
        self._reports = QueueReports("gateway", self.router, self._arrivals)
        self._requests: dict[str, _Request] = {}
        self._routes: dict[str, dict[str, Route]] = {}
        self._inflight: dict[str, int] = {}
        """By model, requests that are at instances."""
        self._ticking: Event | None = None
        self._num_ticks = 0
        """Up to the next one, had there always been any."""
        self._prune_s = 0.0
        self._reporting: Event | None = None
        self._reported_s = 0.0
        self.num_arrived = 0
        self.num_finished = 0
        self.num_failed = 0
        """Those that were unfinished at the end included."""

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    # --- what happens elsewhere --------------------------------------------------------------

    def arrive(self, request: SimRequest) -> None:
        """A client's request is here."""
        now_s = self._clock.now_s
        self.num_arrived += 1
        stream = StreamState(
            request_id=f"r{request.index}",
            model=request.model,
            # Of a prompt the core asks for nothing but its length.
            prompt_token_ids=cast(tuple[int, ...], range(request.prompt_tokens)),
            sampling=SamplingParams(max_tokens=request.output_tokens, seed=0, ignore_eos=True),
            arrived_at_s=now_s,
        )
        if request.model not in self._routes:
            self._take_routes(request.model, ())
        it = _Request(request, stream, now_s + self._settings.queue_timeout_s)
        try:
            self.router.enqueue(stream, deadline_s=it.deadline_s, retry_after_s=1.0)
        except Overloaded:
            self.num_failed += 1
            self._on_served(Served(request, it.times_s, now_s, 0, "overloaded"))
            return
        self._requests[stream.request_id] = it
        self._arrivals.count(request.model, request.prompt_tokens)
        self._pump(request.model)
        if self.router.wakes(request.model):
            self._report_by(max(now_s, self._reported_s + LEAST_REPORT_S))
        else:
            self._report_by(self._next_report_s())

    def routes_changed(self, model: str, routes: Iterable[Route]) -> None:
        """These are all instances of a model now."""
        self._clock.after(self._latencies.routes_s, self._take_routes, model, tuple(routes))

    def on_load(self, report: LoadReport) -> None:
        """An instance reports."""
        # A gateway that is alone knows what its instances have. A report tells it something new about one that has
        # refused a request; and it is an occasion to look at those that wait.
        load = self.router.bookings.load_of(report.instance_id)
        if load.refusals or load.slots_taken or self.router.queued(report.model)[0]:
            self._clock.after(self._latencies.load_s, self._hear_load, report)

    def on_tokens(self, keys: Sequence[Key], ends_s: Sequence[float], *, worker: Process, instance_id: str) -> None:
        """Each of these attempts got one token at each of these times, in rising order and not after the present one.

        Tell it before anything else happens to any of them. Raises ``ValueError`` for an attempt that never was.
        """
        latency_s = self._latencies.tokens_s
        times_s = array("d", [end_s + latency_s for end_s in ends_s])
        tokens = _TOKENS[: len(ends_s)] if len(ends_s) <= len(_TOKENS) else (0,) * len(ends_s)
        for key in keys:
            it = self._current(key, worker)
            if it is None:
                continue
            was, part = it.stream.phase, self._part(it.stream, tokens)
            verdict = self._accept(it, part, worker, instance_id)
            if verdict is not PartVerdict.NEW or len(it.stream.output_token_ids) > it.request.output_tokens:
                raise ValueError(f"{len(ends_s)} tokens of {key[0]} from {worker}: {verdict.value}, {it.stream}")
            if not it.times_s:
                it.worker_id = worker.id
            it.times_s.extend(times_s)
            if was is Phase.SUBMITTED:
                self._wait_no_more(it)
                self._clock.after(latency_s, self._started, it, it.stream.attempt)

    def on_taken_over(self, key: Key, *, worker: Process, instance_id: str) -> None:
        """Another instance has the request now, before it has a token to show for it."""
        it = self._current(key, worker)
        if it is not None:
            self._accept(it, self._part(it.stream, ()), worker, instance_id)

    def on_end(self, key: Key) -> None:
        """It has got all of its tokens. Raises ``ValueError`` if they were not told."""
        it = self._current(key)
        if it is None:
            return
        if it.stream.ended() is None:
            raise ValueError(f"{key[0]} cannot end: {it.stream}")
        self._clock.after(self._latencies.tokens_s, self._said_ended, it, key[1])

    def on_failed(self, key: Key, error: BlitzError) -> None:
        """The attempt is over, as its instance says: sent back, or refused after all. The request continues behind its
        last token."""
        it = self._current(key)
        if it is not None:
            self._clock.after(self._latencies.tokens_s, self._said_failed, it, key[1], error)

    def on_worker_lost(self, worker_id: str) -> None:
        """A worker is gone, with all that it had."""
        for it in self._requests.values():
            if it.stream.worker is not None and it.stream.worker.id == worker_id:
                error = failover.WorkerLost(f"worker {worker_id} is gone", reason="gone")
                self._clock.after(self._latencies.tokens_s, self._attempt_failed, it, it.stream.attempt, error)

    def end(self) -> None:
        """The simulation is over: what has not ended is unfinished."""
        for event in (self._ticking, self._reporting):
            if event is not None:
                self._clock.cancel(event)
        for it in list(self._requests.values()):
            self._settle(it, "unfinished")

    def check_conserved(self) -> None:
        """Raises ``AssertionError`` unless each request that came has ended once, or is in one place."""
        ended = self.num_finished + self.num_failed
        if self.num_arrived != ended + len(self._requests):
            raise AssertionError(f"{self.num_arrived} came, {ended} ended, and {len(self._requests)} have not")
        waiting = sum([self.router.queued(model)[0] for model in self._routes])
        booked = sum([request_id in self.router.bookings for request_id in self._requests])
        inflight = sum([it.stream.phase is not Phase.QUEUED for it in self._requests.values()])
        if not waiting + booked == len(self._requests) == waiting + inflight:
            raise AssertionError(
                f"{len(self._requests)} have not ended: {waiting} wait, {booked} are booked, {inflight} at instances"
            )
        if inflight != sum(self._inflight.values()):
            raise AssertionError(f"{inflight} are at instances, and {self._inflight} is reported")

    # --- binding -----------------------------------------------------------------------------

    def _take_routes(self, model: str, routes: tuple[Route, ...]) -> None:
        self._routes[model] = {route.instance_id: route for route in routes}
        self.router.set_routes(model, "", routes)
        self._pump(model)

    def _hear_load(self, report: LoadReport) -> None:
        self.router.reported(report, now_s=self._clock.now_s)
        self._pump(report.model)

    def _pump(self, model: str) -> None:
        if not self.router.queued(model)[0]:
            return
        dispatched = self.router.dispatch(model, now_s=self._clock.now_s)
        for assignment in dispatched.assignments:
            self._submit(self._requests[assignment.request_id], assignment)
        for request_id, _error in dispatched.refused:
            self._end(self._requests[request_id], "too_long")
        if self._ticking is None and self.router.queued(model)[0]:
            # Rounding must not make it the same one again.
            self._num_ticks = max(self._num_ticks, math.floor(self._clock.now_s / TICK_S)) + 1
            self._ticking = self._clock.at(self._num_ticks * TICK_S, self._tick)

    def _tick(self) -> None:
        """What is due while requests wait."""
        self._ticking = None
        now_s = self._clock.now_s
        for stream in self.router.expired(now_s=now_s):
            too_long = self.router.too_long(stream) is not None
            self._end(self._requests[stream.request_id], "too_long" if too_long else "timeout")
        for model in self._routes:
            self._pump(model)
        if now_s >= self._prune_s:
            self._prune_s = now_s + PRUNE_EVERY_S
            self.router.prune(now_s=now_s)

    def _submit(self, it: _Request, assignment: Assignment) -> None:
        stream, route, decode = it.stream, assignment.route, assignment.decode
        decode_at = (
            DecodePlace(worker_id=decode.worker_id, incarnation=decode.incarnation, instance_id=decode.instance_id)
            if decode is not None
            else None
        )
        stream.submitted_to(route.instance_id, route.worker, decode_at, may_wait=assignment.may_wait)
        self._inflight[stream.model] = self._inflight.get(stream.model, 0) + 1
        it.patience = self._clock.after(self._settings.queue_timeout_s, self._waited, it)
        self._clock.after(self._latencies.submit_s, self._reach, it, stream.attempt, assignment)

    def _reach(self, it: _Request, attempt: int, assignment: Assignment) -> None:
        """The request gets to the worker."""
        if not self._is_at(it, attempt):
            return  # its worker was lost in the meantime
        answer_s = self._latencies.answer_s
        try:
            self._submit_to(assignment, it.stream)
        except BlitzError as error:
            self._clock.after(answer_s, self._attempt_failed, it, attempt, error)
        else:
            self._clock.after(answer_s, self._accepted, it, attempt)

    def _accepted(self, it: _Request, attempt: int) -> None:
        if self._is_at(it, attempt):
            self.router.bookings.accepted(it.stream.request_id)

    def _waited(self, it: _Request) -> None:
        """For as long as a request may wait at an instance."""
        if it.stream.worker is not None:
            self._cancel(it.stream.worker.id, (it.stream.request_id, it.stream.attempt))
        error = DeadlineExceeded(f"no token for {self._settings.queue_timeout_s:g} s")
        self._attempt_failed(it, it.stream.attempt, error)

    def _wait_no_more(self, it: _Request) -> None:
        if it.patience is not None:
            self._clock.cancel(it.patience)
            it.patience = None

    # --- attempts ----------------------------------------------------------------------------

    def _current(self, key: Key, worker: Process | None = None) -> _Request | None:
        """The request of an attempt under way. None for one that was given up: that worker, if there is one, is told to
        drop it. Raises ``ValueError`` for an attempt that never was."""
        request_id, attempt = key
        it = self._requests.get(request_id)
        if it is not None and self._is_at(it, attempt):
            return it
        if attempt < 1 or (it is not None and attempt > it.stream.attempt):
            raise ValueError(f"there was no attempt {attempt} of {request_id}: {it and it.stream}")
        if worker is not None:
            self._clock.after(self._latencies.submit_s, self._cancel, worker.id, key)
        return None

    def _is_at(self, it: _Request, attempt: int) -> bool:
        """Whether that attempt is under way."""
        return it.stream.attempt == attempt and it.stream.phase in (Phase.SUBMITTED, Phase.RUNNING)

    @staticmethod
    def _part(stream: StreamState, tokens: tuple[int, ...]) -> StreamPart:
        return StreamPart(
            request_id=stream.request_id,
            attempt=stream.attempt,
            offset=len(stream.output_token_ids),
            token_ids=tokens,
        )

    def _accept(self, it: _Request, part: StreamPart, worker: Process, instance_id: str) -> PartVerdict:
        stream = it.stream
        verdict, _ = stream.accept(part)
        if stream.taken_over(part, verdict, instance_id=instance_id, worker=worker):
            self._clock.after(self._latencies.tokens_s, self._moved, it, stream.attempt, instance_id)
        return verdict

    def _started(self, it: _Request, attempt: int) -> None:
        if self._is_at(it, attempt):
            self.router.bookings.started(it.stream.request_id)
            self._pump(it.stream.model)

    def _moved(self, it: _Request, attempt: int, instance_id: str) -> None:
        if self._is_at(it, attempt):
            self.router.bookings.moved(it.stream.request_id, instance_id)
            self._pump(it.stream.model)

    def _said_ended(self, it: _Request, attempt: int) -> None:
        if self._is_at(it, attempt):
            self._end(it, None)

    def _said_failed(self, it: _Request, attempt: int, error: BlitzError) -> None:
        """Its instance says so: as with the real one, in a part, which may be the attempt's first."""
        if not self._is_at(it, attempt):
            return
        stream = it.stream
        was = stream.phase
        stream.accept(msgspec.structs.replace(self._part(stream, ()), finish_reason="error"))
        if was is Phase.SUBMITTED:
            self._started(it, attempt)
        self._attempt_failed(it, attempt, error)

    def _attempt_failed(self, it: _Request, attempt: int, error: BlitzError) -> None:
        """Continue elsewhere, or end."""
        if not self._is_at(it, attempt):
            return
        self._wait_no_more(it)
        stream, now_s = it.stream, self._clock.now_s
        route = self._routes[stream.model].get(stream.instance_id)
        outcome = failover.after_failure(
            stream,
            error,
            max_attempts=self._settings.max_attempts,
            model_registered=True,
            died=failover.has_died(error, route, settled=True),
        )
        if isinstance(outcome, failover.Complete):
            self._end(it, None)
            return
        if isinstance(outcome, failover.Refuse):
            self._end(it, "gave_up")
            return
        failover.leave_alone(self.router, stream, outcome, now_s=now_s)
        if isinstance(outcome, failover.GiveUp):
            self._end(it, "gave_up")
            return
        it.deadline_s = failover.requeue(
            self.router,
            stream,
            outcome,
            deadline_s=it.deadline_s,
            queue_timeout_s=self._settings.queue_timeout_s,
            now_s=now_s,
        )
        self._inflight[stream.model] -= 1
        self._pump(stream.model)

    def _end(self, it: _Request, failure: Failure | None) -> None:
        self._settle(it, failure)
        self._pump(it.stream.model)

    def _settle(self, it: _Request, failure: Failure | None) -> None:
        stream = it.stream
        del self._requests[stream.request_id]
        self._wait_no_more(it)
        self.router.finish(stream.request_id, stream.model)
        if stream.phase is not Phase.QUEUED:
            self._inflight[stream.model] -= 1
        stream.finished()
        self.num_finished += failure is None
        self.num_failed += failure is not None
        self._on_served(Served(it.request, it.times_s, self._clock.now_s, stream.attempt, failure, it.worker_id))

    # --- queue reports -----------------------------------------------------------------------

    def _next_report_s(self) -> float:
        """When the regular report is due: those since the last one, which would have been empty, were not made."""
        passed_s = self._clock.now_s - self._reported_s
        return self._reported_s + max(1.0, math.ceil(passed_s / QUEUE_REPORT_EVERY_S)) * QUEUE_REPORT_EVERY_S

    def _report_by(self, at_s: float) -> None:
        if self._reporting is not None:
            if self._reporting.time_s <= at_s:
                return
            self._clock.cancel(self._reporting)
        self._reporting = self._clock.at(max(at_s, self._clock.now_s), self._report)

    def _report(self) -> None:
        now_s = self._clock.now_s
        self._reporting, self._reported_s = None, now_s
        report = self._reports.report(self._routes, inflight=self._inflight)
        if report.models:
            self._on_queues(report)
        if report.models or self._requests:
            self._report_by(now_s + QUEUE_REPORT_EVERY_S)
