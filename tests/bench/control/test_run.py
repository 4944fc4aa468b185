"""The benchmark of the control plane in small: real services, 24 simulated workers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.control.result import MAX_MESSAGE_BYTES, Result
from bench.control.run import run
from bench.control.setting import Setting

CONTRACT = {
    "pool_cores", "gateway_cores", "monitor_cores", "planner_cores", "nats_cores", "redis_cores", "bench_cores",
    "heartbeat_ms_p99", "route_ms_p99", "round_ms_p99", "message_bytes_max", "message_subject", "failed",
    "workers", "models", "hosts", "seconds", "requests_per_s", "scales_per_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def result() -> Iterator[Result]:
    # Long enough for operations to end in it also where the machine stands still for a while.
    setting = Setting(workers=24, models=8, seconds=8.0, rate=20.0, scales=2.0, fleets=1, out_s=1.0)
    with tempfile.TemporaryDirectory(prefix="blitz-control-") as folder, pytest.MonkeyPatch.context() as environ:
        environ.setenv("BLITZ_LEASE_S", "10")  # or a heartbeat is missed then
        yield asyncio.run(run(setting, Path(folder)))


@pytest.mark.stack
def test_every_request_is_answered_and_every_figure_is_there(result: Result) -> None:
    document = result.document()
    assert document.keys() >= CONTRACT
    assert document["failed"] == 0, document["faults"]
    assert document["requests"] > 0
    assert document["heartbeats"] > 0
    assert document["heartbeats_missed"] == 0
    assert document["routes"] > 0
    assert document["rounds"] > 0
    assert {"out", "in"} <= document["scales"].keys()
    assert all(value is not None for value in document.values())


@pytest.mark.stack
def test_no_control_message_is_large_and_load_comes_by_host(result: Result) -> None:
    subject, size = result.largest_message()
    assert subject
    assert 0 < size <= MAX_MESSAGE_BYTES
    assert "blitz.v1.load.hosts" in result.tap.largest
    assert result.problems() == []
