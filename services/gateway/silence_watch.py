"""Asks workers that have gone silent: for a stream's missing tokens, and thereby whether they live.

A question is a Resend from the next offset. Its answer tells whether the worker, and the stream, is
still there; tokens that were lost come again by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from services.gateway.active_requests import ActiveRequest, ActiveRequests
from services.gateway.core.failover import WorkerLost
from services.gateway.core.patience import MAX_MISSED_PROBES, Patience, Reaction
from services.gateway.core.stream import Phase
from services.gateway.metrics import GatewayMetrics
from services.gateway.owned_tasks import OwnedTasks
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, DeadlineExceeded, NoResponder, NotFound
from shared.messages.common import Ack
from shared.messages.generation import Resend

log = logging.getLogger(__name__)

REASK_DELAY_S = 0.5
"""After a reconnection: time for tokens to come by themselves before they are asked for."""


class SilenceWatch:
    """Who was heard when. Calls ``on_failed`` for each request whose attempt is lost."""

    def __init__(
        self,
        bus: Bus,
        requests: ActiveRequests,
        metrics: GatewayMetrics,
        tasks: OwnedTasks,
        on_failed: Callable[[ActiveRequest, BlitzError], None],
        clock: Callable[[], float],
        *,
        patience: Patience,
        probe_timeout_s: float,
    ) -> None:
        self._bus = bus
        self._requests = requests
        self._metrics = metrics
        self._tasks = tasks
        self._on_failed = on_failed
        self._clock = clock
        self._patience = patience
        self._probe_timeout_s = probe_timeout_s
        self._heard_s: dict[str, float] = {}
        self._probing: set[str] = set()
        self._missed_probes: dict[str, int] = {}
        self._connected_since_s: float | None = None

    def heard(self, worker_id: str, now_s: float) -> None:
        """The worker gave a sign of life."""
        self._heard_s[worker_id] = now_s
        self._missed_probes.pop(worker_id, None)

    def check(self, now_s: float) -> None:
        """Look for silent streams and workers, and ask them. Does nothing while the bus is away."""
        since_s = self._bus.connected_since_s
        if since_s is None:
            return
        if self._connected_since_s is not None and since_s != self._connected_since_s:
            self._tasks.start(self._ask_all_silent_since(since_s))
        self._connected_since_s = since_s
        doubted: set[str] = set()
        for request in self._requests.all():
            worker_id = request.stream.worker_id
            if not worker_id or request.submitting:
                continue
            quiet_s = now_s - max(request.progress_s, since_s)
            self._react(request, quiet_s)
            worker_quiet_s = now_s - max(self._heard_s.get(worker_id, -math.inf), since_s)
            if worker_id not in doubted and self._patience.doubts_worker(quiet_s, worker_quiet_s):
                doubted.add(worker_id)
                self._probe(request)
        held = {request.stream.worker_id for request in self._requests.all()}
        self._heard_s = {worker: at for worker, at in self._heard_s.items() if worker in held}

    def instances_lost(self, instance_ids: set[str]) -> None:
        """Ask about instances without a route: they may drain, or be dead; their workers know."""
        asked = set()
        for request in self._requests.all():
            stream = request.stream
            if stream.instance_id in instance_ids and not request.submitting and stream.worker_id not in asked:
                asked.add(stream.worker_id)
                self._probe(request)

    def ask(self, request: ActiveRequest) -> None:
        """Ask for the stream's tokens from its next offset, unless that is under way."""
        if not request.asking:
            self._tasks.start(self._ask(request))

    async def doubt(self, request: ActiveRequest, late: BlitzError) -> None:
        """A Submit was not answered in time: is the worker there, and does it have the request all the same?"""
        stream = request.stream
        worker_id, attempt = stream.worker_id, stream.attempt
        try:
            await self._question(request)
        except NoResponder as error:
            self._worker_lost(worker_id, error)
        except BlitzError as error:
            held = stream.phase in (Phase.SUBMITTED, Phase.RUNNING) and stream.worker_id == worker_id
            if stream.attempt == attempt and held:
                self._on_failed(request, error if isinstance(error, NotFound) else late)
        else:
            self.heard(worker_id, self._clock())

    async def _question(self, request: ActiveRequest) -> None:
        """Whether its worker has it. Raises ``NoResponder``, ``DeadlineExceeded``, ``NotFound``."""
        stream = request.stream
        offset = len(stream.output_token_ids)
        message = Resend(request_id=stream.request_id, attempt=stream.attempt, offset=offset)
        self._metrics.of(stream.model).resends += 1
        subject = subjects.worker_resend(stream.worker_id)
        await self._bus.request(subject, message, Ack, timeout_s=self._probe_timeout_s)

    def _react(self, request: ActiveRequest, quiet_s: float) -> None:
        reaction = self._patience.with_stream(request.stream.phase, quiet_s, asked=request.asked)
        if reaction is Reaction.GIVE_UP:
            self._on_failed(request, DeadlineExceeded(f"no token for {quiet_s:.1f} s"))
        elif reaction is Reaction.ASK:
            request.asked = True
            self.ask(request)

    def _probe(self, request: ActiveRequest) -> None:
        worker_id = request.stream.worker_id
        if worker_id and not request.submitting and worker_id not in self._probing:
            self._probing.add(worker_id)
            self._tasks.start(self._probe_worker(worker_id, request))

    async def _probe_worker(self, worker_id: str, request: ActiveRequest) -> None:
        try:
            await self._ask(request)
        finally:
            self._probing.discard(worker_id)

    async def _ask_all_silent_since(self, since_s: float) -> None:
        await asyncio.sleep(REASK_DELAY_S)
        for request in self._requests.all():
            if request.stream.worker_id and request.progress_s < since_s:
                await self._ask(request)

    async def _ask(self, request: ActiveRequest) -> None:
        stream = request.stream
        worker_id, attempt = stream.worker_id, stream.attempt
        request.asking = True
        try:
            await self._question(request)
        except NoResponder as error:
            self._worker_lost(worker_id, error)
        except DeadlineExceeded as error:
            missed = self._missed_probes[worker_id] = self._missed_probes.get(worker_id, 0) + 1
            if missed >= MAX_MISSED_PROBES and self._bus.connected_since_s is not None:
                self._worker_lost(worker_id, error)
        except NotFound as error:
            # Unless another worker took the stream over meanwhile: then this one had to forget it.
            held = stream.phase in (Phase.SUBMITTED, Phase.RUNNING) and stream.worker_id == worker_id
            if stream.attempt == attempt and held:
                self._on_failed(request, error)
        except BlitzError as error:
            log.info("request %s: could not ask worker %s: %s", stream.request_id, worker_id, error)
        else:
            self.heard(worker_id, self._clock())
        finally:
            request.asking = False

    def _worker_lost(self, worker_id: str, error: BlitzError) -> None:
        self._missed_probes.pop(worker_id, None)
        lost = WorkerLost(f"worker {worker_id} is lost: {error.message}")
        for request in self._requests.at_worker(worker_id):
            self._on_failed(request, lost)
