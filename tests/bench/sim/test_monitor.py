"""The monitor in virtual time: what reaches the planner when."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from bench.sim.clock import Clock
from bench.sim.latencies import LOCAL_NATS, Latencies
from bench.sim.monitor import SimMonitor
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.watch import Watch
from shared.messages.load import Demand, LoadReport, ModelQueue, QueueReport
from shared.messages.registry import ModelRecord, WorkerRecord
from shared.registry_view import RegistryView
from tests.records import model, worker_record
from tests.services.monitor.core.reports import report

POLICY = DemandPolicy(prefill_tokens_per_s=1000.0)
PD = model(min_instances=0, max_instances=9, serving="disaggregated")


@dataclass
class Rig:
    record: ModelRecord = field(default_factory=lambda: model(min_instances=0, max_instances=9))
    clock: Clock = field(default_factory=Clock)
    heard: list[tuple[float, Demand]] = field(default_factory=list)
    workers: tuple[WorkerRecord, ...] = ()
    latencies: Latencies = LOCAL_NATS
    num_views: int = 0
    arrived: int = 0

    def __post_init__(self) -> None:
        self.monitor = SimMonitor(
            self.clock,
            self._view,
            lambda *_: None,
            self._hear,
            policy=POLICY,
            connected_since_s=0.0,
            latencies=self.latencies,
        )

    def _view(self) -> RegistryView:
        self.num_views += 1
        return RegistryView({self.record.name: self.record}, self.workers, {})

    def _hear(self, demand: Demand) -> None:
        self.heard.append((self.clock.now_s, demand))

    def show(self, serving: int) -> None:
        self.workers = tuple(worker_record(f"w{i}", self.record, "serving") for i in range(serving))
        self.monitor.routes_changed()

    def queue(self, waiting: int) -> QueueReport:
        """So many more have come, of a hundred tokens; all wait."""
        self.arrived += waiting
        queue = ModelQueue(
            model="m",
            queued_requests=self.arrived,
            queued_tokens=100 * self.arrived,
            arrived_requests_total=self.arrived,
            arrived_prompt_tokens_total=100 * self.arrived,
            inflight_requests=0,
        )
        return QueueReport(gateway_id="gw", models=(queue,))

    def numbers(self) -> list[tuple[float, int, int, int]]:
        return [(at_s, demand.desired, demand.observed, demand.idle) for at_s, demand in self.heard]


def test_a_request_for_a_model_that_sleeps_is_heard_at_once_and_the_wish_is_repeated() -> None:
    rig = Rig()
    rig.clock.run(5.05)
    assert rig.heard == []
    rig.monitor.on_queues(rig.queue(1))
    rig.clock.run(6.5)
    rig.monitor.on_queues(rig.queue(0))
    rig.clock.run(7.5)
    first_s = 5.05 + LOCAL_NATS.queues_s + LOCAL_NATS.demand_s
    (at_s, demand), *repeats = rig.heard
    assert at_s == pytest.approx(first_s)
    assert (demand.model, demand.role, demand.desired, demand.observed) == ("m", "colocated", 1, 0)
    assert demand.triggered_ago_s == 0.0
    # With the first look a second later: it looks ten times a second.
    assert [at_s for at_s, _ in repeats] == pytest.approx([first_s + 1.0, first_s + 2.0], abs=0.11)
    assert [demand.sequence for _, demand in rig.heard] == [1, 2, 3]
    agos = [demand.triggered_ago_s for _, demand in rig.heard]
    assert agos == pytest.approx([at_s - first_s for at_s, _ in rig.heard])


def test_it_looks_at_the_registry_each_second_and_when_routes_change() -> None:
    rig = Rig()
    rig.clock.run(3.95)
    assert rig.num_views == 4
    rig.show(2)
    rig.clock.run(4.06)
    assert rig.num_views == 5
    rig.clock.run(4.95)
    assert rig.num_views == 5, "the next second began with that look"


def test_what_an_instance_said_last_is_heard_again_as_long_as_it_is_there() -> None:
    rig = Rig()
    rig.show(1)
    rig.clock.run(1.0)
    rig.monitor.on_load(report("i-w0", running_requests=9, kv_blocks_used=270))
    # Far longer than a report counts.
    rig.clock.run(20.0)
    assert {demand.desired for _, demand in rig.heard} == {3}
    assert len(rig.heard) == pytest.approx(19, abs=2)
    rig.show(0)
    rig.clock.run(20.5)
    rig.heard.clear()
    rig.clock.run(30.0)
    unmet = [(at_s, demand.desired) for at_s, demand in rig.heard if demand.desired != demand.observed]
    assert {desired for _, desired in unmet} <= {3}
    assert rig.heard[-1][0] < 20.5 + POLICY.report_ttl_s + 0.2, "a report of something gone is forgotten"


def test_what_an_instance_said_in_its_former_role_is_not_heard_again() -> None:
    rig = Rig(PD)
    rig.workers = (
        worker_record("w0", PD, "serving", role="decode"),
        worker_record("w1", PD, "serving", role="prefill"),
    )
    rig.clock.run(1.0)
    rig.monitor.on_load(report("i-w0", role="decode", running_requests=9, kv_blocks_used=270))
    rig.clock.run(2.5)
    assert rig.monitor.watch.figures["m", "decode"].desired == 3
    rig.workers = tuple(worker_record(f"w{i}", PD, "serving", role="prefill") for i in range(2))
    rig.monitor.routes_changed()
    rig.clock.run(6.0)
    assert rig.monitor.watch.figures["m", "decode"].desired == 0


def test_a_report_counts_once_it_is_here() -> None:
    rig = Rig(latencies=Latencies(load_s=0.35))
    rig.show(1)
    rig.clock.run(1.0)
    rig.monitor.on_load(report("i-w0", running_requests=9, kv_blocks_used=270))
    rig.clock.run(5.0)
    assert rig.heard[0][0] == pytest.approx(1.35, abs=0.11)


def test_it_stops() -> None:
    rig = Rig()
    rig.clock.run(1.0)
    rig.monitor.stop()
    rig.clock.run()
    assert rig.clock.now_s < 1.2


# --- against the service's loop ------------------------------------------------------------------

SCRIPT: list[tuple[float, LoadReport | int]] = [
    (0.33, report("i-w0", queued_requests=3, queued_tokens=900, running_requests=2, prefilling_requests=1)),
    (1.07, 12),
    (1.21, 5),
    (2.52, report("i-w0", running_requests=8, kv_blocks_used=95)),
    (2.54, report("i-w1", running_requests=2)),
    (6.01, 30),
    (9.02, report("i-w0")),
    (9.04, report("i-w1", running_requests=1, load_s=0.7)),
    (13.03, report("i-w1", load_s=0.7)),
]
END_S = 20.0
Said = list[tuple[float, int, int, int]]


def as_the_service(rig: Rig) -> Said:
    """What ``MonitorService.run`` makes of the script, where every instance repeats its report ten times a second."""
    heard: list[tuple[float, LoadReport | QueueReport]] = []
    for told_s, what in SCRIPT:
        if isinstance(what, int):
            heard.append((told_s + LOCAL_NATS.queues_s, rig.queue(what)))
        else:
            later = [at_s for at_s, other in SCRIPT if at_s > told_s and isinstance(other, LoadReport)
                     and other.instance_id == what.instance_id]  # fmt: skip
            until_s = min([END_S, *later])
            times_s = [told_s + 0.1 * i for i in range(1000) if told_s + 0.1 * i < until_s]
            heard += [(at_s + LOCAL_NATS.load_s, what) for at_s in times_s]
    heard.sort(key=lambda entry: entry[0], reverse=True)
    watch, said, now_s, next_snapshot_s = Watch(POLICY, repeat_s=1.0), Said(), 0.0, 0.0
    while True:
        if now_s >= next_snapshot_s:
            next_snapshot_s = now_s + 1.0
            now_s += LOCAL_NATS.snapshot_s
            watch.on_snapshot(RegistryView({"m": rig.record}, rig.workers, {}), lambda *_: None)
        while heard and heard[-1][0] <= now_s:
            at_s, message = heard.pop()
            if isinstance(message, LoadReport):
                watch.on_load(message, at_s)
            else:
                watch.on_queue(message, at_s)
        if now_s > END_S:
            return said
        for wish in watch.evaluate(now_s, connected_since_s=0.0, leads=True):
            said.append((pytest.approx(now_s + LOCAL_NATS.demand_s), wish.desired, wish.observed, wish.idle))
        now_s += 0.1


def test_it_says_what_the_service_would_and_needs_to_be_told_of_changes_alone() -> None:
    rig = Rig()
    rig.workers = tuple(worker_record(f"w{i}", rig.record, "serving") for i in range(2))
    for told_s, what in SCRIPT:
        rig.clock.run(told_s)
        if isinstance(what, int):
            rig.monitor.on_queues(rig.queue(what))
        else:
            rig.monitor.on_load(what)
    rig.clock.run(END_S)
    twin = Rig()
    twin.workers = rig.workers
    assert rig.numbers() == as_the_service(twin)
    assert len({desired for _, desired, *_ in rig.numbers()}) > 3, "the script has ups and downs"
