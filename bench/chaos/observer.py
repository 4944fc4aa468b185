"""Listens to the bus: which worker computes which stream, and where seats are free."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from bench.chaos.injected_fault import InjectedFault, now_s
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus
from shared.load_feed import subscribe_load
from shared.messages.generation import GatewayHeartbeat, TokenBatch
from shared.messages.load import LoadReport
from shared.subjects import Process

IN_FLIGHT_S = 0.3
"""What a killed worker had said may still come for so long."""


@dataclass(slots=True)
class _Seats:
    """What a worker had to give, at every change."""

    times_s: list[float] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    """The model of which it takes requests from then on; empty: none."""

    def note(self, at_s: float, model: str) -> None:
        if not self.models or self.models[-1] != model:
            self.times_s.append(at_s)
            self.models.append(model)

    def at(self, at_s: float) -> str:
        index = bisect_right(self.times_s, at_s) - 1
        return self.models[index] if index >= 0 else ""


@dataclass(frozen=True, slots=True)
class Holding:
    """From then on a worker's tokens come in a stream."""

    since_s: float
    worker: str


class Observer:
    """Event loop only. What it heard last holds until it hears something else: an outage of the bus frees no seat and
    takes none."""

    def __init__(self, max_running: int) -> None:
        """``max_running``: requests that an instance runs at once."""
        self._max_running = max_running
        self._seats: dict[str, _Seats] = {}
        self._holders: dict[str, list[Holding]] = {}
        self._faults: dict[str, InjectedFault] = {}
        self._struck: dict[str, str] = {}
        """By worker, the instance that it had when it, or its engine, was killed."""
        self._gateways: set[Process] = set()
        self._tasks = OwnedTasks()
        self._loads: dict[str, tuple[float, LoadReport]] = {}

    async def listen(self, bus: Bus) -> None:
        """Begin. Gateways are found by their heartbeats."""

        async def subscribe(gateway: Process) -> None:
            await bus.subscribe(subjects.tokens(gateway), TokenBatch, self.on_tokens)

        def on_gateway(heartbeat: GatewayHeartbeat) -> None:
            gateway = Process(heartbeat.gateway_id, heartbeat.incarnation)
            if gateway not in self._gateways:
                self._gateways.add(gateway)
                self._tasks.start(subscribe(gateway))

        await subscribe_load(bus, self.on_load)
        await bus.subscribe(subjects.gateway_heartbeat(), GatewayHeartbeat, on_gateway)

    def fault_injected(self, fault: InjectedFault) -> None:
        """A worker, or its engine, is killed, told to end or stopped: from now on it has no free seat."""
        if not fault.worker:
            return
        self._faults[fault.worker] = fault
        if fault.ends and not fault.drains and fault.worker in self._loads:
            self._struck[fault.worker] = self._loads[fault.worker][1].instance_id
        self._seats.setdefault(fault.worker, _Seats()).note(fault.at_s, "")

    def on_load(self, report: LoadReport) -> None:
        """A worker tells its load."""
        at_s = now_s()
        fault = self._faults.get(report.worker_id)
        if fault is not None and (fault.over_s is None or at_s < fault.over_s + IN_FLIGHT_S):
            return
        if self._struck.get(report.worker_id) == report.instance_id:
            return  # its worker has not seen yet that it has no engine
        self._loads[report.worker_id] = (at_s, report)
        takes = report.state == "serving" and report.role != "decode"
        full = report.running_requests + report.queued_requests >= self._max_running
        self._seats.setdefault(report.worker_id, _Seats()).note(at_s, report.model if takes and not full else "")

    def on_tokens(self, batch: TokenBatch) -> None:
        """A worker sends tokens."""
        at_s = now_s()
        for part in batch.parts:
            if not part.token_ids:
                continue
            holders = self._holders.setdefault(part.request_id.rpartition("-")[0], [])
            if not holders or holders[-1].worker != batch.worker_id:
                holders.append(Holding(at_s, batch.worker_id))

    def loads(self, *, within_s: float) -> list[LoadReport]:
        """The latest report of each worker that has reported within that time."""
        since_s = now_s() - within_s
        return [report for at_s, report in self._loads.values() if at_s >= since_s]

    def state_of(self, worker: str, *, within_s: float) -> str:
        """Of its instance, if it has said so within that time; empty: it has not."""
        at_s, report = self._loads.get(worker, (0.0, None))
        return report.state if report is not None and at_s >= now_s() - within_s else ""

    def at_a_gate(self, worker: str) -> bool:
        """Whether requests wait in its instance for weights. One that takes them and has not loaded may have been in
        vLLM's memory all the time: then it computes."""
        _, report = self._loads.get(worker, (0.0, None))
        if report is None or report.load_s or not self.state_of(worker, within_s=IN_FLIGHT_S):
            return False
        return report.queued_requests + report.running_requests > 0 and not report.prefill_tokens_total

    def holders(self, response_id: str) -> list[Holding]:
        """Who computed a request's tokens, in order."""
        return self._holders.get(response_id, [])

    def free_elsewhere(self, model: str, worker: str, at_s: float) -> bool:
        """Whether another worker than this one had a free seat for the model at that time."""
        return any(seats.at(at_s) == model for name, seats in self._seats.items() if name != worker)
