"""The monitor's shell: reports and snapshots in, demand out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.monitor import service as monitor_service
from services.monitor.core.policy import DemandPolicy
from services.monitor.service import MonitorService
from shared import subjects
from shared.errors import Unavailable
from shared.leading import Leader
from shared.messages.common import Role
from shared.messages.load import Demand, QueueReport
from shared.messages.registry import GoneRoute, ModelRecord, RouteChanges
from shared.profile import PrefillPoint, write_profile
from tests.records import model, profile, worker_record
from tests.services.fake_pool import FakePool
from tests.services.monitor.core.reports import queue, report
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import eventually

POLICY = DemandPolicy(rate_window_s=0.2, down_window_s=0.1, report_ttl_s=1.0, prefill_tokens_per_s=1000.0, slack_s=1.0)
REPEAT_S = 0.1


@dataclass
class Rig:
    """A monitor between a registry double and whoever listens to demand."""

    broker: MemoryBroker = field(default_factory=MemoryBroker)
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    profiles: Path | None = None
    demands: list[Demand] = field(default_factory=list)
    heard_s: list[float] = field(default_factory=list)
    """When each of them came (monotonic)."""

    def __post_init__(self) -> None:
        self.pool = FakePool(self.broker)
        self.client = self.broker.bus("client")
        self.stopping = asyncio.Event()
        self._sequence = 0

    async def start(self, interval_s: float = 0.01) -> None:
        await self.pool.start()
        await self.client.subscribe(subjects.demand(), Demand, self._on_demand)
        self.monitor = MonitorService(
            self.broker.bus("monitor"),
            POLICY,
            interval_s=interval_s,
            repeat_s=REPEAT_S,
            profiles=self.profiles,
            metrics=self.metrics,
        )
        self.task = asyncio.create_task(self.monitor.run(self.stopping))

    def _on_demand(self, demand: Demand) -> None:
        self.demands.append(demand)
        self.heard_s.append(time.monotonic())

    async def show(self, record: ModelRecord | None, *, serving: int = 0) -> None:
        """Let the registry show this many serving instances, and wait until the monitor has looked."""
        self.pool.models = () if record is None else (record,)
        self.pool.workers = tuple(worker_record(f"w{i}", record, "serving") for i in range(serving)) if record else ()
        known = self.pool.num_snapshots
        await eventually(lambda: self.pool.num_snapshots >= known + 2)

    async def told(self, record: ModelRecord) -> None:
        """The registry says that a model is new, or has other settings."""
        self._sequence += 1
        event = RouteChanges(publisher="pool", sequence=self._sequence, models=(record,))
        await self.client.publish(subjects.route_changes(), event)

    async def gone(self, *instance_ids: str) -> None:
        """The registry says that instances are gone."""
        self._sequence += 1
        gone = tuple(GoneRoute(model="m", instance_id=instance_id) for instance_id in instance_ids)
        event = RouteChanges(publisher="pool", sequence=self._sequence, gone=gone)
        await self.client.publish(subjects.route_changes(), event)

    async def queue(self, tokens: int, gateway_id: str = "gw") -> None:
        """A gateway reports this many waiting prompt tokens, in prompts of a hundred."""
        waiting = queue(tokens, tokens)
        message = QueueReport(gateway_id=gateway_id, models=(waiting,))
        await self.client.publish(subjects.queue(), message)

    async def wanted(self, desired: int) -> Demand:
        """Wait for a demand of this number that is not older than now."""
        known = len(self.demands)
        await eventually(lambda: any(d.desired == desired for d in self.demands[known:]))
        return next(d for d in self.demands[known:] if d.desired == desired)

    async def quiet(self) -> None:
        """Nothing is demanded for several repeats."""
        known = len(self.demands)
        await asyncio.sleep(3 * REPEAT_S)
        assert self.demands[known:] == []

    def gauge(self, role: Role = "colocated") -> float | None:
        return self.metrics.get_sample_value("blitz_monitor_desired_instances", {"model": "m", "role": role})


@contextlib.asynccontextmanager
async def running(*models: ModelRecord, interval_s: float = 0.01, profiles: Path | None = None) -> AsyncIterator[Rig]:
    rig = Rig(profiles=profiles)
    rig.pool.models = models
    await rig.start(interval_s)
    yield rig
    rig.stopping.set()
    await rig.task


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """A monitor that looks at the registry often."""
    monkeypatch.setattr(monitor_service, "SNAPSHOT_INTERVAL_S", 0.02)
    monkeypatch.setattr(monitor_service, "SNAPSHOT_TIMEOUT_S", 0.1)
    async with running() as made:
        yield made


async def test_an_unmet_demand_is_repeated_until_it_is_met(rig: Rig) -> None:
    await rig.show(model(min_instances=2))
    await eventually(lambda: len(rig.demands) >= 3)
    assert {(d.model, d.desired, d.observed) for d in rig.demands} == {("m", 2, 0)}
    assert len({d.publisher for d in rig.demands}) == 1
    assert [d.sequence for d in rig.demands] == list(range(1, len(rig.demands) + 1))
    agos = [d.triggered_ago_s for d in rig.demands]
    assert agos == sorted(agos), "a repeat is the same wish"
    gaps = [b - a for a, b in itertools.pairwise(rig.heard_s)]
    assert min(gaps) > 0.8 * REPEAT_S
    await rig.show(model(min_instances=2), serving=2)
    await rig.quiet()
    assert rig.gauge() == 2


async def test_whether_it_leads_is_a_metric_and_a_silent_pool_is_said_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="services.monitor.service")
    await rig.show(model())
    await eventually(lambda: rig.metrics.get_sample_value("blitz_monitor_leads") == 1)
    rig.pool.errors["snapshot"] = [Unavailable("Redis is away")] * 5
    await eventually(lambda: "the pool answers again" in caplog.text)
    assert caplog.text.count("deciding on the last one") == 1
    rig.pool.leader = "another"
    await eventually(lambda: rig.metrics.get_sample_value("blitz_monitor_leads") == 0)


async def test_an_instance_can_do_what_its_profile_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_service, "SNAPSHOT_INTERVAL_S", 0.02)
    (tmp_path / "broken.json").write_bytes(b"{")
    async with running(profiles=tmp_path) as rig:
        await rig.show(model(), serving=1)
        async with busy(rig, 4000):
            await eventually(lambda: any("computes 1000 tokens/s" in demand.reason for demand in rig.demands))
            point = PrefillPoint(prompt_tokens=100, seconds=0.2, repetitions=1)
            write_profile(tmp_path / "m.json", profile(model(), prefill=(point,)))
            await eventually(lambda: any("computes 500 tokens/s" in demand.reason for demand in rig.demands))


@pytest.mark.parametrize(
    ("before", "after", "desired"),
    [
        (model(min_instances=1), model(min_instances=2), 2),
        (model(min_instances=3), model(min_instances=1, max_instances=1), 1),
    ],
    ids=["a raised minimum", "a lowered maximum"],
)
async def test_new_settings_of_a_known_model_count_at_once(
    monkeypatch: pytest.MonkeyPatch, before: ModelRecord, after: ModelRecord, desired: int
) -> None:
    monkeypatch.setattr(monitor_service, "SNAPSHOT_INTERVAL_S", 60.0)
    async with running() as rig:
        serving = before.min_instances
        rig.pool.models = (before,)
        rig.pool.workers = tuple(worker_record(f"w{i}", before, "serving") for i in range(serving))
        await rig.told(before)
        await eventually(lambda: rig.gauge() == serving)
        rig.pool.models = (after,)
        known = rig.pool.num_snapshots
        await rig.told(after)
        assert (await rig.wanted(desired)).observed == serving
        assert rig.pool.num_snapshots == known + 1, "it heard of them, and did not wait for its turn to look"


async def test_a_removed_model_is_forgotten(rig: Rig) -> None:
    await rig.show(model(min_instances=2))
    await rig.wanted(2)
    await rig.show(None)
    await rig.quiet()
    assert rig.gauge() is None, "its last figure is not shown for ever"


async def test_an_outage_of_the_registry_leaves_the_last_picture(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    await rig.show(model(min_instances=2), serving=1)
    rig.pool.errors["snapshot"] = [Unavailable("Redis is away")] * 10_000
    await eventually(lambda: "deciding on the last one" in caplog.text)
    assert (await rig.wanted(2)).observed == 1
    rig.pool.errors["snapshot"].clear()
    await rig.show(model(min_instances=2), serving=2)
    await rig.quiet()


async def test_changed_routes_are_looked_at_without_waiting_for_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor_service, "SNAPSHOT_INTERVAL_S", 3600.0)
    async with running() as rig:
        await eventually(lambda: rig.pool.num_snapshots == 1)
        rig.pool.models = (model(min_instances=1),)
        await rig.quiet()
        event = RouteChanges(publisher="p", sequence=1, models=(model(),))
        await rig.client.publish(subjects.route_changes(), event)
        await rig.wanted(1)


async def test_a_request_for_a_model_that_sleeps_does_not_wait_for_the_next_look() -> None:
    async with running(model(min_instances=0), interval_s=3600.0) as rig:
        await eventually(lambda: rig.pool.num_snapshots == 1)
        await rig.queue(100)
        await eventually(lambda: [d.desired for d in rig.demands] == [1])


async def test_what_instances_report_is_heard(rig: Rig) -> None:
    await rig.show(model(min_instances=0, max_instances=5), serving=1)
    said = report("i-w0", running_requests=9, kv_blocks_used=270)
    await rig.client.publish(subjects.load(), said)
    assert (await rig.wanted(3)).observed == 1


@contextlib.asynccontextmanager
async def busy(rig: Rig, tokens: int) -> AsyncIterator[None]:
    """A gateway reports so many waiting tokens, again and again."""

    async def keep_reporting() -> None:
        while True:
            await rig.queue(tokens)
            await asyncio.sleep(0.02)

    reporting = asyncio.create_task(keep_reporting())
    yield
    reporting.cancel()


async def test_no_demand_that_was_made_in_an_outage_is_heard_after_it(rig: Rig) -> None:
    await rig.show(model(min_instances=2), serving=1)
    await rig.wanted(2)
    rig.broker.disconnect("monitor")
    await asyncio.sleep(4 * REPEAT_S)
    known = len(rig.demands)
    rig.broker.reconnect("monitor")
    await asyncio.sleep(0)
    assert len(rig.demands) == known, "what was kept would be sent at once"
    await eventually(lambda: len(rig.demands) > known + 1)
    assert not rig.task.done()


async def test_an_outage_makes_nobody_ask_for_fewer(rig: Rig) -> None:
    record = model(min_instances=1, max_instances=4)
    async with busy(rig, 20_000):
        await rig.show(record, serving=4)
        await rig.quiet()
    rig.broker.disconnect()
    await asyncio.sleep(2 * POLICY.report_ttl_s)
    rig.broker.reconnect()
    # The others are heard a moment later.
    await asyncio.sleep(POLICY.report_ttl_s / 2)
    async with busy(rig, 20_000):
        await rig.quiet()
        # More are asked for as ever.
        await rig.show(record, serving=3)
        assert (await rig.wanted(4)).observed == 3
    assert {d.desired for d in rig.demands} == {4}
    # Without the load, and with a window of silence, fewer are.
    await rig.wanted(1)


async def test_of_several_monitors_one_speaks_with_its_term_and_the_next_is_ready_at_once(rig: Rig) -> None:
    twin = Rig(broker=rig.broker)
    other = MonitorService(
        rig.broker.bus("twin"), POLICY, interval_s=0.01, repeat_s=REPEAT_S, metrics=CollectorRegistry()
    )
    task = asyncio.create_task(other.run(twin.stopping))
    await rig.show(model(min_instances=2))
    demand = await rig.wanted(2)
    assert demand.term == rig.pool.term
    await asyncio.sleep(3 * REPEAT_S)
    assert len({d.publisher for d in rig.demands}) == 1
    rig.stopping.set()
    await rig.task
    known = len(rig.demands)
    await eventually(lambda: len(rig.demands) > known)
    assert rig.demands[-1].publisher != demand.publisher
    assert rig.demands[-1].term > demand.term
    twin.stopping.set()
    await task


async def test_a_monitor_that_cannot_lead_any_more_ends_instead_of_following_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Leader, "hold", breaks)
    # It loses the lead, and wins it again.
    rig.pool.leader = "another"
    await eventually(lambda: not rig.metrics.get_sample_value("blitz_monitor_leads"))
    rig.pool.leader = ""
    async with asyncio.timeout(10.0):
        with pytest.raises(ZeroDivisionError):
            await rig.task
    rig.task = asyncio.create_task(asyncio.sleep(0))


# --- disaggregated -------------------------------------------------------------------------------------

PD = model(min_instances=0, serving="disaggregated")


async def test_a_disaggregated_model_that_sleeps_is_woken_with_one_of_each_at_once() -> None:
    async with running(interval_s=5.0) as rig:
        rig.pool.models = (PD,)
        await rig.told(PD)
        await eventually(lambda: rig.pool.num_snapshots >= 1)
        await asyncio.sleep(0.05)
        await rig.queue(100)
        await eventually(lambda: len(rig.demands) >= 2)
        assert {(d.role, d.desired, d.observed) for d in rig.demands} == {("prefill", 1, 0), ("decode", 1, 0)}
        assert rig.gauge("decode") == 1


async def test_a_model_that_loses_its_last_instance_is_looked_at_at_once() -> None:
    record, rig = model(min_instances=0), Rig()
    rig.pool.models = (record,)
    rig.pool.workers = (worker_record("w0", record, "serving"), worker_record("w1", record, "serving"))
    await rig.start(interval_s=3600.0)
    await eventually(lambda: rig.pool.num_snapshots == 1)
    rig.pool.models = (model(min_instances=1),)
    rig.pool.workers = ()
    await rig.gone("i-w1")
    await rig.gone("i-w0")
    await eventually(lambda: rig.demands)
    assert [(d.desired, d.observed) for d in rig.demands if d.desired] == [(1, 0)]
    assert rig.pool.num_snapshots == 2, "the first one left another: that waits for the next turn"
    rig.stopping.set()
    await rig.gone("i-w0")
    await rig.task
