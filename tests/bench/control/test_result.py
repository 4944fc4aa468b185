from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from bench.control.histogram import buckets, quantile
from bench.control.orders import FleetResult, Served
from bench.control.result import MAX_MESSAGE_BYTES, Look, Result
from bench.control.scaler import Parked
from bench.control.setting import Setting
from bench.control.tap import TapResult

CPU = {"pool": 1.0, "monitor": 1.0, "planner": 1.0, "nats": 1.0, "redis": 1.0, "gateway-0": 1.0, "gateway-1": 1.0}


def look(at_s: float, cpu_s: dict[str, float]) -> Look:
    return Look(at_s, cpu_s, 1.0, {}, 0, 0, 0, Counter())


def result(**changes: object) -> Result:
    fleet = FleetResult(heartbeat_s=(0.001, 0.003), heartbeats_missed=0, served=(), report_late_s=0.0)
    made = Result(
        setting=Setting(workers=24, models=8),
        before=look(100.0, CPU),
        after=look(110.0, CPU | {"pool": 3.0, "gateway-0": 2.0, "gateway-1": 6.0}),
        fleets=(fleet,),
        parked=(),
        tap=TapResult({}, 0, 1.0),
        ttft_s=(),
        faults={},
        fault_example="",
        formed_s=1.0,
        restarts=0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_cores_are_cpu_seconds_per_second_and_of_gateways_the_busiest_counts() -> None:
    document = result().document()
    assert document["pool_cores"] == 0.2
    assert document["gateway_cores"] == 0.5
    assert document["monitor_cores"] == 0.0
    assert document["seconds"] == 10.0


def test_a_route_is_known_when_the_last_gateway_has_sent_a_request_there() -> None:
    served = (
        Served("probe-00", "before", 90.0, {"a": 90.0, "b": 90.0}),
        Served("probe-00", "i-1", 101.0, {"a": 101.010, "b": 101.040}),
        Served("probe-01", "i-2", 101.0, {"a": 101.010}),
    )
    fleet = FleetResult(heartbeat_s=(), heartbeats_missed=0, served=served, report_late_s=0.0)
    parked = (Parked("probe-00", 100.0, True), Parked("probe-01", 100.0, True), Parked("probe-02", 100.0, True))
    assert result(fleets=(fleet,), parked=parked).routes() == [pytest.approx(40.0)]


def test_prompts_are_no_control_messages() -> None:
    largest = {"blitz.v1.worker.*.live.hand_over": 900_000, "blitz.v1.pool.snapshot (answer)": 10}
    made = result(tap=TapResult(largest, 0, 1.0))
    assert made.largest_message() == ("blitz.v1.pool.snapshot (answer)", 10)
    assert made.problems() == []


def test_large_messages_failed_requests_and_deaths_are_problems() -> None:
    tap = TapResult({"blitz.v1.pool.snapshot (answer)": MAX_MESSAGE_BYTES + 1}, 0, 1.0)
    assert len(result(tap=tap, faults={"http_500": 2}, restarts=1).problems()) == 3


def test_aims_without_a_measurement_are_neither_met_nor_missed() -> None:
    aims = result().aims()
    assert aims["pool_cores"] is True
    assert aims["heartbeat_ms_p99"] is True
    assert aims["route_ms_p99"] is None


def test_percentiles_of_a_histogram_count_what_came_between_two_readings() -> None:
    before = buckets('x_bucket{le="0.1"} 5.0\nx_bucket{le="0.2"} 5.0\nx_bucket{le="+Inf"} 5.0\nx_sum 1\n', "x")
    after = buckets('x_bucket{le="0.1"} 5.0\nx_bucket{le="0.2"} 15.0\nx_bucket{le="+Inf"} 15.0\n', "x")
    assert before == {0.1: 5.0, 0.2: 5.0, math.inf: 5.0}
    assert quantile(before, after, 0.5) == pytest.approx(0.15)
    assert quantile(after, after, 0.5) is None
    assert quantile({}, {0.1: 0.0, math.inf: 4.0}, 0.99) == 0.1
