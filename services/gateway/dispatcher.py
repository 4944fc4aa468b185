"""Runs requests: binds them to instances, feeds their tokens to their sinks, moves them when an instance fails.

Everything here runs on the event loop. Decisions come from ``core``; messages to workers go through the ``Outbox`` or
the ``SilenceWatch``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable

from services.gateway.active_requests import ActiveRequest, ActiveRequests, Sink
from services.gateway.config import GatewayConfig
from services.gateway.core import failover
from services.gateway.core.capacity import Capacity, WorkerSize
from services.gateway.core.failover import WorkerLost
from services.gateway.core.failure_detector import FailureDetector, OwnTime
from services.gateway.core.lateness import no_room_timeout_s
from services.gateway.core.moves import MoveCounts
from services.gateway.core.router import AffinityPolicy, Assignment, Router, gone
from services.gateway.core.routes import ModelRoutes, RouteDiff, RouteView
from services.gateway.core.stream import PartVerdict, Phase, StreamState
from services.gateway.late_requests import LOOK_EVERY_S, LateRequests
from services.gateway.metrics import GatewayMetrics
from services.gateway.outbox import Outbox
from services.gateway.silence_watch import SilenceWatch
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus
from shared.bus.departures import Departure
from shared.errors import (
    BlitzError,
    DeadlineExceeded,
    PoisonRequest,
    Unavailable,
    Unservable,
)
from shared.messages.generation import DecodePlace, FinishReason, StreamPart, TokenBatch
from shared.messages.load import LoadReport, QueueReport
from shared.subjects import Process

log = logging.getLogger(__name__)

MAX_PROBE_TIMEOUT_S = 2.0


class Dispatcher:
    """The requests of one gateway. Each ends in exactly one of: a finish reason, an error, ``cancel``."""

    def __init__(
        self,
        bus: Bus,
        routes: RouteView,
        metrics: GatewayMetrics,
        config: GatewayConfig,
        *,
        incarnation: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._routes = routes
        self._metrics = metrics
        self._config = config
        self._clock = clock
        self.requests = ActiveRequests()
        self.router = Router(
            max_queued_requests=config.max_queued_requests,
            gateway_id=config.gateway_id,
            affinity=AffinityPolicy(
                choices=config.affinity_choices, imbalance=config.affinity_imbalance, secret=config.affinity_secret
            ),
        )
        self.outbox = Outbox(bus, clock, config, incarnation)
        self.tasks = OwnedTasks()
        """What is under way for requests."""
        self.move_counts = MoveCounts()
        self.held = asyncio.Event()
        """Set when the first request waits for a model that sleeps."""
        self._detector = FailureDetector(config.stall_s, config.probe_s, config.queue_timeout_s)
        self._own_time = OwnTime()
        self.capacity = Capacity()
        """What the registered workers could hold."""
        self._late = LateRequests(
            bus,
            self.requests,
            routes,
            self.capacity,
            self.tasks,
            self._fail,
            self._give_up,
            queue_timeout_s=config.queue_timeout_s,
            default_no_room_timeout_s=config.no_room_timeout_s,
        )
        self.silence_watch = SilenceWatch(
            bus,
            self.requests,
            metrics,
            self.tasks,
            self._attempt_failed,
            clock,
            self._own_time,
            detector=self._detector,
            probe_timeout_s=min(MAX_PROBE_TIMEOUT_S, config.submit_timeout_s),
        )
        self._next_check_s = -math.inf
        self._next_look_s = -math.inf

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self.requests)

    def start(self, stream: StreamState, sink: Sink) -> None:
        """Take a request. Raises ``Overloaded`` when its model's queue is full, ``Unservable`` when nothing that is
        registered can ever serve its model, ``ModelNotFound`` when its weights are not registered any more."""
        self._refuse_unservable(stream.model)
        deadline_s = self._clock() + self._config.queue_timeout_s
        self.router.enqueue(stream, deadline_s=deadline_s, retry_after_s=1.0)
        self.requests.add(ActiveRequest(stream, sink, deadline_s))
        self.pump(stream.model)
        if self.router.wakes(stream.model):
            self.held.set()

    def cancel(self, request_id: str) -> None:
        """The client left: free everything the request holds. Unknown ids are ignored."""
        request = self.requests.find(request_id)
        if request is not None:
            self._cancel_attempt(request)
            self._end(request)

    def on_batch(self, batch: TokenBatch) -> None:
        """One engine step's tokens. Of a worker that could not be answered nothing is taken."""
        if not subjects.is_process(batch.worker):
            return
        now_s = self._clock()
        self.silence_watch.spoke(batch.worker)
        for part in batch.parts:
            self._on_part(batch, part, now_s)

    def on_load(self, report: LoadReport) -> None:
        """Take an instance's load report: its worker is alive, and may have capacity again."""
        self.silence_watch.alive(report.worker)
        self.router.reported(report, now_s=self._clock())
        if self.router.queued(report.model)[0]:
            self.pump(report.model)

    def on_queues(self, report: QueueReport) -> None:
        """Take a gateway's queue report."""
        if report.gateway_id == self._config.gateway_id:
            self._own_time.echoed(self._clock())
        self.router.others_reported(report, now_s=self._clock())

    def on_departure(self, departure: Departure) -> None:
        """A connection of some process has ended."""
        if departure.kind == "worker":
            self.silence_watch.departed(Process(departure.id, departure.incarnation), departure.reason)

    def routes_changed(self, changes: RouteDiff) -> None:
        """React to a new view: bind waiting requests, refuse those of weights that are gone, ask lost instances."""
        left: list[StreamState] = []
        for name in sorted(changes.removed):
            left += self.router.remove_model(name)
            self.requests.arrivals.forget(name)
            self._metrics.forget(name)
        for name in sorted(changes.models):
            model = self._routes.models.get(name)
            if model is not None:
                left += self.router.set_routes(name, model.record.model_hash, model.routes.values())
                self.pump(name)
        for stream in left:
            self._fail(self.requests[stream.request_id], gone(stream.model))
        if changes.lost_instances:
            self.silence_watch.instances_lost(changes.lost_instances)

    def pump(self, model: str) -> None:
        """Bind the model's waiting requests as far as its instances take them."""
        dispatched = self.router.dispatch(model, now_s=self._clock())
        for assignment in dispatched.assignments:
            self._submit(self.requests[assignment.request_id], assignment)
        for request_id, error in dispatched.refused:
            self._fail(self.requests[request_id], error)

    def tick(self) -> None:
        """Do what is due by now; call it about every 50 ms."""
        now_s = self._clock()
        self._own_time.tick(now_s)
        for stream in self.router.expired(now_s=now_s):
            too_long = self.router.too_long(stream)
            if too_long is not None:
                self._fail(self.requests[stream.request_id], too_long)
            else:
                self._late.end(self.requests[stream.request_id])
        for name in self.router.waiting():
            self.pump(name)
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_EVERY_S
            self._late.look(self.router.held(due_s=self._patient_until_s))
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + self._detector.check_every_s
            self.silence_watch.check()
            self.outbox.forget_strays(now_s)
            self.router.prune(now_s=now_s)

    def workers_changed(self, sizes: Iterable[WorkerSize]) -> None:
        """These workers are registered now: refuse the waiting requests that none of them can ever serve. Call it
        regularly, as it is a matter of time, too."""
        self.capacity.put(sizes, self._clock())
        for name in self.router.waiting():
            try:
                self._refuse_unservable(name)
            except Unservable as error:
                for stream in self.router.clear(name):
                    self._fail(self.requests[stream.request_id], error)

    def _patient_until_s(self, name: str) -> float:
        """The deadline of the model's requests that have waited for as long as they do where there is no room."""
        timeout_s = no_room_timeout_s(self._routes.models.get(name), self._config.no_room_timeout_s)
        return self._clock() + self._config.queue_timeout_s - timeout_s

    def _give_up(self, name: str, error: BlitzError) -> None:
        if self.router.sleeps(name):
            for stream in self.router.give_up(name, due_s=self._patient_until_s(name)):
                self._fail(self.requests[stream.request_id], error)

    def _refuse_unservable(self, name: str) -> None:
        """Raises ``Unservable``."""
        model = self._routes.models.get(name)
        if model is None or not self.router.sleeps(name):
            return
        refusal = self.capacity.refusal(model.record, self._clock())
        if refusal is not None:
            raise refusal

    def context_tokens(self, model: ModelRoutes) -> int:
        """The longest prompt plus output that the model's instances hold; where there are none, that the largest
        worker could."""
        if model.has_limits:
            return model.context_tokens
        return self.capacity.context_tokens(model.record, self._clock())

    def end_all(self) -> None:
        """End what still runs with an error."""
        for request in self.requests.all():
            self._cancel_attempt(request)
            self._fail(request, Unavailable("the gateway is shutting down"))

    async def close(self) -> None:
        """End what still runs with an error, flush the outbox."""
        self.end_all()
        await self.tasks.close()
        await self.outbox.flush()

    def _submit(self, request: ActiveRequest, assignment: Assignment) -> None:
        """Begin the next attempt at its assigned instance."""
        stream, route, decode = request.stream, assignment.route, assignment.decode
        decode_at = (
            DecodePlace(worker_id=decode.worker_id, incarnation=decode.incarnation, instance_id=decode.instance_id)
            if decode is not None
            else None
        )
        stream.submitted_to(
            route.instance_id, route.worker, decode_at, may_wait=assignment.may_wait, now_s=self._clock()
        )
        request.progressed(self._own_time.now_s)
        request.submitting = True
        self.tasks.start(self._submitting(request, route.worker, stream.attempt), request.context)

    async def _submitting(self, request: ActiveRequest, worker: Process, attempt: int) -> None:
        stream = request.stream
        try:
            await self.outbox.submit(stream, worker, attempt)
        except BlitzError as error:
            # Tokens, and another worker that took over, prove acceptance even when the answer was lost; a later
            # attempt is none of ours.
            if stream.attempt == attempt and stream.phase is Phase.SUBMITTED and stream.worker == worker:
                if isinstance(error, DeadlineExceeded):
                    await self.silence_watch.suspect(request, error)
                else:
                    self._attempt_failed(request, error)
        else:
            self.silence_watch.spoke(worker)
            if stream.attempt == attempt and stream.worker == worker:
                self.router.bookings.accepted(stream.request_id)
        finally:
            if stream.attempt == attempt:
                request.submitting = False

    def _on_part(self, batch: TokenBatch, part: StreamPart, now_s: float) -> None:
        request = self.requests.find(part.request_id)
        if request is None:
            self._on_stray(batch, part)
            return
        stream = request.stream
        was = stream.phase
        verdict, skip = stream.accept(part)
        if verdict is PartVerdict.FOREIGN:
            self._on_stray(batch, part)
            return
        came_from = stream.worker
        if stream.taken_over(part, verdict, instance_id=batch.instance_id, worker=batch.worker):
            self._moved(request, came_from, batch.worker)
        if verdict is PartVerdict.GAP:
            self.silence_watch.ask(request)
            return
        if verdict is PartVerdict.DUPLICATE:
            return
        request.progressed(self._own_time.now_s)
        reason = part.finish_reason
        if was is Phase.SUBMITTED:
            self.router.bookings.started(stream.request_id)
            self.pump(stream.model)
        if reason is not None:
            self.outbox.acknowledge(batch.worker, part.request_id, part.attempt)
        if reason in ("error", "cancelled"):
            error = part.error.as_error() if part.error is not None else Unavailable(f"the attempt ended: {reason}")
            if part.token_ids[skip:] and self._deliver(request, part, skip, None, now_s):
                return
            self._attempt_failed(request, error)
            return
        self._deliver(request, part, skip, reason, now_s)

    def _moved(self, request: ActiveRequest, source: Process | None, target: Process) -> None:
        """Another instance took the request over: from now on count it there, and send questions and cancels there."""
        stream = request.stream
        self._metrics.of(stream.model).moves += 1
        planned = stream.decode_at is not None and stream.decode_at.worker_id == target.id
        if source is not None and not planned:
            self.move_counts.moved(stream.model, source.id, target.id)
        self.router.bookings.moved(stream.request_id, stream.instance_id)
        # The new holder knows the stream, whatever happens to the Submit to the old one, and its silence starts now.
        request.submitting = False
        request.progressed(self._own_time.now_s)
        self.pump(stream.model)

    def _deliver(
        self, request: ActiveRequest, part: StreamPart, skip: int, reason: FinishReason | None, now_s: float
    ) -> bool:
        """Hand tokens to the sink. Returns whether the request has ended."""
        token_ids, logprobs = part.token_ids, part.logprobs
        if skip:
            token_ids = token_ids[skip:]
            logprobs = logprobs[skip:] if logprobs is not None else None
        stopped = request.sink.on_tokens(token_ids, logprobs, reason, now_s)
        if reason is None and not stopped:
            return False
        if reason is None:
            self._cancel_attempt(request)
        self._end(request)
        return True

    def _on_stray(self, batch: TokenBatch, part: StreamPart) -> None:
        # The worker must not keep tokens that no request needs: repeat a lost Cancel or AckTerminal.
        if part.finish_reason is not None:
            self.outbox.acknowledge(batch.worker, part.request_id, part.attempt)
        else:
            self.outbox.cancel_stray(batch.worker, part.request_id, part.attempt)

    def _attempt_failed(self, request: ActiveRequest, error: BlitzError) -> None:
        """Continue elsewhere, or end."""
        stream = request.stream
        model = self._routes.models.get(stream.model)
        route = model.routes.get(stream.instance_id) if model is not None else None
        outcome = failover.after_failure(
            stream,
            error,
            max_attempts=self._config.max_attempts,
            model_registered=model is not None and model.record.model_hash == stream.model_hash,
            died=failover.has_died(error, route, settled=self.silence_watch.is_settled),
        )
        if isinstance(outcome, failover.Refuse):
            self._fail(request, outcome.error)
            return
        self._cancel_attempt(request)
        if isinstance(outcome, failover.Complete):
            request.sink.on_tokens((), None, outcome.reason, self._clock())
            self._end(request)
            return
        now_s = self._clock()
        failover.leave_alone(self.router, stream, outcome, now_s=now_s)
        if isinstance(outcome, failover.GiveUp):
            if isinstance(outcome.error, PoisonRequest):
                workers = ", ".join(stream.deaths_with_this().workers)
                log.error("request %s is ended: it was running in %s when they died", stream.request_id, workers)
            self._fail(request, outcome.error)
            return
        if outcome.full:
            self._metrics.of(stream.model).refusals += 1
        elif outcome.sent_back:
            self._metrics.of(stream.model).sent_back += 1
        else:
            log.warning(
                "request %s: attempt %d on %s failed: %s", stream.request_id, stream.attempt, stream.instance_id, error
            )
            self._metrics.of(stream.model).failovers += 1
            self._metrics.resubmissions[error.reason if isinstance(error, WorkerLost) else error.code] += 1
        if outcome.deaths is not None and outcome.deaths.suspected:
            workers = ", ".join(outcome.deaths.workers)
            log.warning("request %s is computed alone: it was running in %s when they died", stream.request_id, workers)
        request.deadline_s = failover.requeue(
            self.router,
            stream,
            outcome,
            deadline_s=request.deadline_s,
            queue_timeout_s=self._config.queue_timeout_s,
            now_s=now_s,
        )
        self.pump(stream.model)

    def _cancel_attempt(self, request: ActiveRequest) -> None:
        stream = request.stream
        if stream.worker is not None:
            self.outbox.cancel(stream.worker, stream.request_id, stream.attempt)

    def _fail(self, request: ActiveRequest, error: BlitzError) -> None:
        self._end(request)
        request.sink.on_error(error)

    def _end(self, request: ActiveRequest) -> None:
        stream = request.stream
        self.router.finish(stream.request_id, stream.model)
        stream.finished()
        self.requests.remove(stream.request_id)
        if self.router.queued(stream.model)[0]:
            self.pump(stream.model)
