"""Workers that a simulated gateway can be tested with: slots, a queue, one token a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from bench.sim.clock import Clock
from bench.sim.gateway import GatewaySettings, SimGateway
from bench.sim.requests import Served, SimRequest
from services.gateway.core.router import Assignment
from services.gateway.core.stream import StreamState
from shared.errors import BlitzError, Conflict, NoResponder, Overloaded, SentBack
from shared.messages.common import InstanceState
from shared.messages.load import QueueReport
from shared.messages.registry import Route
from tests.services.gateway.core.routing import route
from tests.services.monitor.core.reports import report

STEP_S = 0.125
SLOTS = 2
QUEUE = 2


@dataclass
class FakeWorker:
    """Steps take ``STEP_S``; tokens of a request are told at its end, ``run`` steps at a time."""

    rig: Rig
    route: Route
    run: int = 1
    running: dict[str, StreamState] = field(default_factory=dict)
    waiting: deque[StreamState] = field(default_factory=deque)
    stands: bool = False
    """Begins nothing."""

    def submit(self, assignment: Assignment, stream: StreamState) -> None:
        if self.route.state != "serving":
            raise Conflict("not serving")
        if not self.stands and len(self.running) < SLOTS:
            self._begin(stream)
        elif assignment.may_wait and len(self.waiting) < QUEUE:
            self.waiting.append(stream)
        else:
            raise Overloaded("full")

    def _begin(self, stream: StreamState) -> None:
        self.running[stream.request_id] = stream
        self._later(stream)

    def _later(self, stream: StreamState) -> None:
        steps = min(self.run, stream.sampling.max_tokens - len(stream.output_token_ids))
        now_s = self.rig.clock.now_s
        ends_s = [now_s + STEP_S * (step + 1) for step in range(steps)]
        self.rig.clock.at(ends_s[-1], self._step, stream, stream.attempt, ends_s)

    def _step(self, stream: StreamState, attempt: int, ends_s: list[float]) -> None:
        if self.running.get(stream.request_id) is not stream or stream.attempt != attempt:
            return  # killed, or sent back, in the meantime
        gateway, request_id = self.rig.gateway, stream.request_id
        key = request_id, attempt
        gateway.on_tokens([key], ends_s, worker=self.route.worker, instance_id=self.route.instance_id)
        if stream.ended() is None:
            self._later(stream)
            return
        del self.running[request_id]
        gateway.on_end(key)
        if self.waiting:
            self._begin(self.waiting.popleft())
        self.report()

    def report(self) -> None:
        self.rig.gateway.on_load(
            report(self.route.instance_id, queued_requests=len(self.waiting), running_requests=len(self.running))
        )

    def send_back(self) -> None:
        """All that it has."""
        had = [*self.running.values(), *self.waiting]
        self.running.clear()
        self.waiting.clear()
        for stream in had:
            self.rig.gateway.on_failed((stream.request_id, stream.attempt), SentBack("goes"))

    def cancel(self, request_id: str) -> None:
        self.running.pop(request_id, None)
        self.waiting = deque(stream for stream in self.waiting if stream.request_id != request_id)


@dataclass
class Rig:
    """A gateway, fake workers, and what becomes of requests."""

    settings: GatewaySettings = field(default_factory=GatewaySettings)
    clock: Clock = field(default_factory=Clock)
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    """By worker id."""
    served: list[Served] = field(default_factory=list)
    submits: list[tuple[str, str]] = field(default_factory=list)
    """Request and instance, those included that were refused."""
    reports: list[tuple[float, QueueReport]] = field(default_factory=list)
    num_requests: int = 0

    def __post_init__(self) -> None:
        self.gateway = SimGateway(
            self.clock,
            self._submit,
            self.served.append,
            on_queues=lambda said: self.reports.append((self.clock.now_s, said)),
            cancel=lambda worker_id, key: self.workers[worker_id].cancel(key[0]),
            settings=self.settings,
        )

    def _submit(self, assignment: Assignment, stream: StreamState) -> None:
        self.submits.append((stream.request_id, assignment.route.instance_id))
        worker = self.workers.get(assignment.route.worker_id)
        if worker is None:
            raise NoResponder("nobody is subscribed")
        worker.submit(assignment, stream)

    def start(self, name: str, *, run: int = 1, context: int = 0) -> FakeWorker:
        made = route(name, running=SLOTS, queued_tokens=100, context=context)
        worker = self.workers[made.worker_id] = FakeWorker(self, made, run)
        self.show()
        return worker

    def kill(self, worker: FakeWorker) -> None:
        del self.workers[worker.route.worker_id]
        worker.running.clear()
        self.gateway.on_worker_lost(worker.route.worker_id)
        self.show()

    def set_state(self, worker: FakeWorker, state: InstanceState) -> None:
        worker.route = route(worker.route.instance_id, running=SLOTS, queued_tokens=100, state=state)
        self.show()

    def show(self) -> None:
        self.gateway.routes_changed("m", [worker.route for worker in self.workers.values()])

    def ask(self, output: int = 1, prompt: int = 10, at_s: float | None = None) -> str:
        """A request comes now, or then; its id."""
        due_s = self.clock.now_s if at_s is None else at_s
        request = SimRequest(self.num_requests, due_s, "m", prompt, output)
        self.num_requests += 1
        self.clock.at(due_s, self.gateway.arrive, request)
        return f"r{request.index}"

    def fail(self, request_id: str, error: BlitzError, attempt: int = 1) -> None:
        self.gateway.on_failed((request_id, attempt), error)

    def run(self, for_s: float) -> None:
        self.clock.run(self.clock.now_s + for_s)
        self.gateway.check_conserved()

    def outcomes(self) -> dict[int, str]:
        return {served.request.index: served.failure or "finished" for served in self.served}
