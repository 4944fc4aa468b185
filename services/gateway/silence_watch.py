"""Asks workers that have gone silent, or whose connection has ended, for a stream's missing tokens, and thereby whether
they are alive.

A question is a ``Resend`` from the next offset. Its answer tells whether the worker, and the stream, still exist;
lost tokens then arrive again by themselves.

Rules
- If a worker's connection was closed and nothing is subscribed in its place, it is lost at once.
- A connection that the server ended (slow, stale), and an outage of the bus, say nothing about the worker: it may not
  be back yet. Then a missing subscription is just one more question without an answer.
- Several questions without an answer make a worker lost if it has given no sign of life in all that time: no token of
  any stream, no load report, no late answer.
- A worker that is wrongly considered lost is fenced: its attempts are cancelled, and its tokens belong to a past
  attempt.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.active_requests import ActiveRequest, ActiveRequests
from services.gateway.core.failover import LossReason, WorkerLost
from services.gateway.core.failure_detector import FailureDetector, OwnTime, Reaction
from services.gateway.core.stream import Phase
from services.gateway.metrics import GatewayMetrics
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus
from shared.bus.departures import CLOSED, DEPARTED_TIMEOUTS_S
from shared.errors import BlitzError, DeadlineExceeded, NoResponder, NotFound
from shared.messages.common import Ack
from shared.messages.generation import Resend
from shared.subjects import Process

log = logging.getLogger(__name__)

REMEMBERED_S = 300.0
"""How long a worker that counts as lost may take to show that it is alive."""
REASK_DELAY_S = 0.5
"""After a reconnection: time for tokens to arrive by themselves before the gateway asks for them."""


class Answer(enum.Enum):
    """The outcome of a question: an answer, none, or that the worker is lost."""

    GIVEN = "given"
    NONE = "none"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class _Loss:
    reason: LossReason
    at_s: float


class SilenceWatch:
    """When each worker was last heard. Calls ``on_failed`` for each request whose attempt is lost."""

    def __init__(
        self,
        bus: Bus,
        requests: ActiveRequests,
        metrics: GatewayMetrics,
        tasks: OwnedTasks,
        on_failed: Callable[[ActiveRequest, BlitzError], None],
        clock: Callable[[], float],
        own_time: OwnTime,
        *,
        detector: FailureDetector,
        probe_timeout_s: float,
    ) -> None:
        self._bus = bus
        self._requests = requests
        self._metrics = metrics
        self._tasks = tasks
        self._on_failed = on_failed
        self._clock = clock
        self._own_time = own_time
        self._detector = detector
        self._probe_timeout_s = probe_timeout_s
        self._probing: set[Process] = set()
        self._connected_since_s: float | None = None
        # All of these are by worker and in own time.
        self._spoke_s: dict[Process, float] = {}
        self._alive_s: dict[Process, float] = {}
        self._cut_s: dict[Process, float] = {}
        self._lost: dict[Process, _Loss] = {}
        self._up_since_s = 0.0
        self._reconnected = False

    @property
    def is_settled(self) -> bool:
        """The bus is up, and has been for so long that a process that was cut off with it would be back."""
        since_s, up_s = self._bus.connected_since_s, self._own_time.now_s - self._up_since_s
        return since_s is not None and since_s == self._connected_since_s and up_s >= self._detector.settle_s

    def spoke(self, worker: Process) -> None:
        """The worker sent tokens, or answered."""
        self._spoke_s[worker] = self._own_time.now_s
        self.alive(worker)

    def alive(self, worker: Process) -> None:
        """The worker gave a sign of life."""
        self._alive_s[worker] = self._own_time.now_s
        loss = self._lost.pop(worker, None)
        if loss is not None:
            log.warning("worker %s is alive: given up as %s, its requests continued elsewhere", worker, loss.reason)

    def departed(self, worker: Process, reason: str) -> None:
        """A connection of this worker has ended, for the reason that the server gives."""
        if reason in CLOSED:
            self._cut_s.pop(worker, None)
            if self._requests.at_worker(worker):
                self._tasks.start(self._ask_departed(worker))
            return
        self._cut_s[worker] = self._own_time.now_s
        for request in self._requests.at_worker(worker):
            self._probe(request)

    def check(self) -> None:
        """Look for silent streams and workers, and ask them. Does nothing while the bus is away."""
        since_s = self._bus.connected_since_s
        if since_s is None:
            return
        if since_s != self._connected_since_s:
            if self._connected_since_s is not None:
                self._reconnected = True
                self._tasks.start(self._ask_all_silent_since(self._own_time.now_s))
            self._connected_since_s = since_s
            self._up_since_s = self._own_time.now_s
        suspected: set[Process] = set()
        for request in self._requests.all():
            worker = request.stream.worker
            if worker is None or request.submitting:
                continue
            quiet_s = self._own_time.now_s - max(request.progress_s, self._up_since_s)
            self._react(request, quiet_s)
            worker_quiet_s = self._own_time.now_s - max(self._spoke_s.get(worker, 0.0), self._up_since_s)
            if worker not in suspected and self._detector.suspects_worker(quiet_s, worker_quiet_s):
                suspected.add(worker)
                self._probe(request)
        self._forget()

    def instances_lost(self, instance_ids: set[str]) -> None:
        """Ask about instances without a route: they may drain, or be dead; their workers know."""
        asked = set()
        for request in self._requests.all():
            stream = request.stream
            if stream.instance_id in instance_ids and not request.submitting and stream.worker not in asked:
                asked.add(stream.worker)
                self._probe(request)

    def ask(self, request: ActiveRequest) -> None:
        """Ask for the stream's tokens from its next offset, unless that is under way."""
        if not request.asking:
            self._tasks.start(self._ask_once(request))

    async def suspect(self, request: ActiveRequest, late: BlitzError) -> None:
        """A Submit was not answered in time: does the worker exist, and does it have the request nevertheless?"""
        stream = request.stream
        worker, attempt = stream.worker, stream.attempt
        if worker is None:
            return
        try:
            await self._question(request, worker, self._probe_timeout_s)
        except NoResponder:
            self._nobody_listens(worker)
        except BlitzError as error:
            held = stream.phase in (Phase.SUBMITTED, Phase.RUNNING) and stream.worker == worker
            if stream.attempt == attempt and held:
                self._on_failed(request, error if isinstance(error, NotFound) else late)
        else:
            self.spoke(worker)

    async def _question(self, request: ActiveRequest, worker: Process, timeout_s: float) -> None:
        """Whether a worker has it. Raises ``NoResponder``, ``DeadlineExceeded``, ``NotFound``."""
        stream = request.stream
        offset = len(stream.output_token_ids)
        message = Resend(
            request_id=stream.request_id, attempt=stream.attempt, offset=offset, prompt_offset=stream.prompt_offset
        )
        self._metrics.of(stream.model).resends += 1
        subject = subjects.worker_resend(worker)
        await self._bus.request(subject, message, Ack, timeout_s=timeout_s)

    def _react(self, request: ActiveRequest, quiet_s: float) -> None:
        reaction = self._detector.stream_reaction(request.stream.phase, quiet_s, asked=request.asked)
        if reaction is Reaction.GIVE_UP:
            self._on_failed(request, DeadlineExceeded(f"no token for {quiet_s:.1f} s"))
        elif reaction is Reaction.ASK:
            request.asked = True
            self.ask(request)

    def _probe(self, request: ActiveRequest) -> None:
        worker = request.stream.worker
        if worker is not None and not request.submitting and worker not in self._probing:
            self._probing.add(worker)
            self._tasks.start(self._probe_worker(worker))

    async def _probe_worker(self, worker: Process) -> None:
        """Ask repeatedly until there is a sign of life or the worker is lost."""
        missed = 0
        try:
            while self._bus.connected_since_s is not None and (request := self._any_at(worker)) is not None:
                asked_s, began_s = self._clock(), self._own_time.now_s
                answer = await self._ask(request, self._detector.question_s)
                if answer is not Answer.NONE:
                    return
                # A missing subscription is reported at once, and may be back in a moment.
                await asyncio.sleep(asked_s + self._detector.question_s - self._clock())
                if self._alive_s.get(worker, 0.0) > began_s:
                    return
                # A question counts only if this process could have received an answer.
                if self._own_time.now_s - began_s >= self._detector.question_s / 2:
                    missed += 1
                quiet_s = self._own_time.now_s - max(self._alive_s.get(worker, 0.0), self._up_since_s)
                if self._detector.is_dead(missed, quiet_s):
                    self._worker_lost(worker, "silent", f"no sign of life for {quiet_s:.1f} s")
        finally:
            self._probing.discard(worker)

    async def _ask_departed(self, worker: Process) -> None:
        for timeout_s in DEPARTED_TIMEOUTS_S:
            held = self._requests.at_worker(worker)
            if not held or await self._ask(held[0], timeout_s, closed=True) is not Answer.NONE:
                return

    def _any_at(self, worker: Process) -> ActiveRequest | None:
        return next((r for r in self._requests.at_worker(worker) if not r.submitting), None)

    async def _ask_all_silent_since(self, own_s: float) -> None:
        await asyncio.sleep(REASK_DELAY_S)
        for request in self._requests.all():
            if request.stream.worker is not None and request.progress_s <= own_s:
                await self._ask_once(request)

    async def _ask_once(self, request: ActiveRequest) -> None:
        """A stream's tokens are missing. If there is no answer, its worker is suspected."""
        if await self._ask(request, self._probe_timeout_s) is Answer.NONE:
            self._probe(request)

    async def _ask(self, request: ActiveRequest, timeout_s: float, *, closed: bool = False) -> Answer:
        """``closed``: the worker's connection is known to be closed."""
        stream = request.stream
        worker, attempt, submitting = stream.worker, stream.attempt, request.submitting
        if worker is None:
            return Answer.GIVEN
        request.asking = True
        try:
            await self._question(request, worker, timeout_s)
        except NoResponder:
            if closed:
                self._worker_lost(worker, "closed", "its connection was closed, nothing is subscribed in its place")
                return Answer.LOST
            return self._nobody_listens(worker)
        except DeadlineExceeded:
            return Answer.NONE
        except NotFound as error:
            self.spoke(worker)
            # Unless another worker has taken the stream over: then this one had to forget it. And the Submit may
            # have arrived after the question.
            held = stream.phase in (Phase.SUBMITTED, Phase.RUNNING) and stream.worker == worker
            if stream.attempt == attempt and held and not submitting:
                self._on_failed(request, error)
        except BlitzError as error:
            log.info("request %s: could not ask worker %s: %s", stream.request_id, worker, error)
        else:
            self.spoke(worker)
        finally:
            request.asking = False
        return Answer.GIVEN

    def _nobody_listens(self, worker: Process) -> Answer:
        """Lost, unless it may be on its way back to the server."""
        own_s = self._own_time.now_s
        away_s = max(self._cut_s.get(worker, -math.inf), self._up_since_s if self._reconnected else -math.inf)
        back = self._bus.connected_since_s == self._connected_since_s
        if not back or own_s - away_s < self._detector.settle_s:
            return Answer.NONE
        self._worker_lost(worker, "gone", "nothing is subscribed under its name")
        return Answer.LOST

    def _worker_lost(self, worker: Process, reason: LossReason, why: str) -> None:
        held = self._requests.at_worker(worker)
        if held:
            self._lost[worker] = _Loss(reason, self._own_time.now_s)
        lost = WorkerLost(f"worker {worker} is lost: {why}", reason=reason)
        for request in held:
            self._on_failed(request, lost)

    def _forget(self) -> None:
        own_s = self._own_time.now_s
        held = {request.stream.worker for request in self._requests.all()}
        self._spoke_s = {worker: at for worker, at in self._spoke_s.items() if worker in held}
        self._alive_s = {worker: at for worker, at in self._alive_s.items() if worker in held}
        self._cut_s = {worker: at for worker, at in self._cut_s.items() if own_s - at < self._detector.settle_s}
        self._lost = {worker: loss for worker, loss in self._lost.items() if own_s - loss.at_s < REMEMBERED_S}
