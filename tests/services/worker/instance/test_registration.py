"""A worker's standing with the registry."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from services.worker import service
from services.worker.instance import registration
from services.worker.instance.registration import ClockSkew
from shared.errors import Unavailable
from shared.messages.registry import HeartbeatAck
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.wait_until import WAIT_S, eventually


async def with_lease(alone: LoneWorker, lease_s: float) -> None:
    """Return once the worker has it, and waits half of it for an answer."""
    alone.pool.ack = HeartbeatAck(lease_s=lease_s, planner_term=1)
    assert await alone.worker.service.parts.registration.confirmed(WAIT_S)


async def test_reports_carry_growing_sequences_of_one_incarnation(alone: LoneWorker) -> None:
    alone.pool.ack = HeartbeatAck(lease_s=0.1, planner_term=1)
    await alone.serve()
    await eventually(lambda: len(alone.pool.heartbeats) >= 6)
    sequences = [h.sequence for h in alone.pool.heartbeats]
    assert sequences == sorted(set(sequences))
    assert len({h.worker.incarnation for h in alone.pool.heartbeats}) == 1


async def test_every_change_of_state_is_reported_at_once(alone: LoneWorker) -> None:
    await with_lease(alone, 3600.0)
    instance_id = await alone.serve()
    await eventually(lambda: alone.pool.heartbeats[-1].state == "serving")
    await alone.drain(instance_id)
    await eventually(lambda: alone.pool.heartbeats[-1].state == "spare")
    states = [h.state for h in alone.pool.heartbeats]
    assert "loading" in states
    assert alone.pool.heartbeats[-1].instance is None


async def test_refused_reports_are_repeated_soon(alone: LoneWorker) -> None:
    alone.pool.errors["heartbeat"] = [Unavailable("Redis is away")] * 3
    known = len(alone.pool.heartbeats)
    await eventually(lambda: len(alone.pool.heartbeats) > known)
    assert alone.pool.errors["heartbeat"] == []


async def test_a_pool_that_is_away_is_said_once_and_that_it_is_back(
    alone: LoneWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="services.worker.instance.registration")
    await with_lease(alone, 60.0)  # else a slow answer may be the first thing that is said
    caplog.clear()
    alone.pool.errors["heartbeat"] = [Unavailable("Redis is away")] * 5
    alone.worker.service.parts.registration.changed()
    await eventually(lambda: "the pool takes our reports again" in caplog.text)
    assert caplog.text.count("the pool did not take our report: Redis is away") == 1


async def test_a_changed_objective_reaches_the_running_instance(alone: LoneWorker) -> None:
    def objective_s() -> float:
        return alone.worker.serving.engine.loop.scheduler.budgets.slo_tbt_s

    alone.pool.ack = HeartbeatAck(lease_s=0.1, planner_term=1)
    await alone.serve()
    assert objective_s() == alone.worker.config.slo_tbt_s  # the model has none of its own
    alone.pool.ack = HeartbeatAck(lease_s=0.1, slo_tbt_s=0.03, planner_term=1)
    await eventually(lambda: objective_s() == 0.03)
    alone.pool.ack = HeartbeatAck(lease_s=0.1, planner_term=1)  # as from a pool that does not say
    known = len(alone.pool.heartbeats)
    await eventually(lambda: len(alone.pool.heartbeats) > known + 2)
    assert objective_s() == 0.03
    alone.pool.ack = HeartbeatAck(lease_s=0.1, slo_tbt_s=0.0, planner_term=1)
    await eventually(lambda: objective_s() == alone.worker.config.slo_tbt_s)


async def test_an_instance_begins_with_its_models_objective(alone: LoneWorker) -> None:
    alone.model = msgspec.structs.replace(alone.model, slo_tbt_s=0.02)
    await alone.serve()
    assert alone.worker.serving.engine.loop.scheduler.budgets.slo_tbt_s == 0.02


async def test_a_registry_that_lost_the_model_gets_it_back(alone: LoneWorker) -> None:
    alone.pool.ack = HeartbeatAck(lease_s=0.6, wants_model=True, planner_term=1)
    known = len(alone.pool.heartbeats)
    await eventually(lambda: len(alone.pool.heartbeats) > known)
    assert alone.pool.restored == [], "a spare worker has none to give"
    await alone.serve()
    await eventually(lambda: alone.pool.restored)
    assert alone.pool.restored[0] == alone.model


@pytest.mark.parametrize("ticks", range(6))
async def test_it_ends_when_it_is_stopped_just_as_something_changes(alone: LoneWorker, ticks: int) -> None:
    alone.pool.ack = HeartbeatAck(lease_s=3600.0, planner_term=1)
    registration = alone.worker.service.parts.registration
    known = len(alone.pool.heartbeats)
    parts = alone.worker.service.parts
    work = registration.run(
        parts.scaling.on_stop_instance, parts.orders.planner_term, parts.scaling.on_slo_tbt, parts.scaling.on_prepare
    )
    reporting = asyncio.create_task(work)
    await eventually(lambda: len(alone.pool.heartbeats) > known)
    await asyncio.sleep(0.01)  # it waits again
    registration.changed()
    for _ in range(ticks):
        await asyncio.sleep(0)
    reporting.cancel()
    ended, _ = await asyncio.wait({reporting}, timeout=60)
    assert ended


async def test_the_last_report_says_goodbye() -> None:
    async with lone_worker() as alone:
        await alone.worker.stop()
        assert [h.leaving for h in alone.pool.heartbeats][-2:] == [False, True]


async def test_a_worker_can_leave_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "JOIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(registration, "POOL_SILENT_S", 0.5)
    async with lone_worker() as alone:
        await alone.serve()
        await alone.pool.bus.close()
        await alone.worker.stop()
        assert not alone.pool.heartbeats[-1].leaving


# --- clocks ----------------------------------------------------------------------------------------


def test_a_clock_that_differs_is_told_once_and_again_when_it_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    metrics = CollectorRegistry()
    skew = ClockSkew(1.0, metrics)
    for _ in range(3):
        skew.measured(1030.0, 1030.2, 1000.1)
    assert skew.told_s == 30.0
    said = [record for record in caplog.records if record.name == registration.__name__]
    assert [record.getMessage() for record in said] == ["the clock of this host is 30.0 s ahead of the pool's: set it"]
    assert metrics.get_sample_value("blitz_worker_clock_ahead_seconds") == pytest.approx(30.0)
    skew.measured(995.0, 995.0, 1000.0)
    assert skew.told_s == -5.0
    assert "5.0 s behind" in caplog.text
    skew.measured(1000.0, 1000.0, 1000.0)
    assert skew.told_s == 0.0


def test_an_answer_that_took_long_says_nothing_of_clocks() -> None:
    skew = ClockSkew(1.0)
    skew.measured(1000.0, 1010.0, 1000.0)
    assert skew.told_s == 0.0


@pytest.mark.parametrize("shift_s", [-30.0, 30.0])
async def test_a_workers_reports_say_how_far_its_clock_is_off(
    alone: LoneWorker, shift_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    alone.pool.ack = HeartbeatAck(lease_s=0.3, planner_term=1, unix_s=real() + shift_s)
    await eventually(lambda: alone.pool.heartbeats[-1].clock_ahead_s * shift_s < 0)
