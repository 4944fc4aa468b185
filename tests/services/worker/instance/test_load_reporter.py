"""What a worker says of its load."""

from __future__ import annotations

import asyncio
import time
import uuid

import msgspec
import pytest

from services.worker.engine.mock.settings import MockTiming
from services.worker.instance.host_group import HostGroup, group_name
from shared import subjects
from shared.messages.codec import decode, encode
from shared.messages.load import HostLoad, LoadReport
from tests.services.monitor.core.reports import report
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.wait_until import eventually

SPEED = ("prefill_tokens_per_s", "decode_tokens_per_s", "decode_base_s", "decode_request_s")


async def reports_of(alone: LoneWorker) -> list[LoadReport]:
    reports: list[LoadReport] = []
    await alone.planner.subscribe(subjects.load(), LoadReport, reports.append)
    return reports


async def test_a_spare_worker_reports_nothing_and_an_idle_instance_no_speed(alone: LoneWorker) -> None:
    reports = await reports_of(alone)
    await alone.serve()
    await eventually(lambda: len(reports) >= 3)
    assert {(r.state, r.prefill_tokens_per_s, r.decode_base_s) for r in reports} == {("serving", 0.0, 0.0)}


async def test_the_share_of_kv_in_use_is_shown_under_vllms_name_while_there_is_an_instance(alone: LoneWorker) -> None:
    def shown() -> float | None:
        return alone.worker.metrics.get_sample_value("vllm:kv_cache_usage_perc", {"model_name": "m"})

    assert shown() is None
    await alone.serve()
    await eventually(lambda: shown() == 0)


async def test_the_speed_that_was_measured_is_reported() -> None:
    timing = MockTiming(layer_base_s=5e-3, layer_per_token_s=50e-6)
    async with lone_worker(mock=timing) as alone:
        reports = await reports_of(alone)
        instance_id = await alone.serve()
        for index in range(3):
            await alone.submit(instance_id, f"r{index}", max_tokens=20)
        for index in range(3):
            await alone.gateway.end_of(f"r{index}")
        speed = (await alone.stats()).speed
        assert speed.prefill_tokens_per_s > 0
        await eventually(lambda: reports and all(getattr(reports[-1], name) == getattr(speed, name) for name in SPEED))
        last = reports[-1]
        # The engine sleeps at least this long per step, but for the millisecond at most that the step before it was
        # late; a slow machine only adds to it.
        assert last.decode_base_s + 3 * last.decode_request_s > alone.model.spec.num_layers * 5e-3 - 1e-3


@pytest.mark.parametrize(
    "name", ["prefilling_requests", "prefill_tokens_per_s", "decode_base_s", "decode_request_s", "head_blocks"]
)
async def test_a_report_of_a_worker_that_measures_nothing_is_read(alone: LoneWorker, name: str) -> None:
    reports = await reports_of(alone)
    await alone.serve()
    await eventually(lambda: reports)
    document = msgspec.msgpack.decode(encode(reports[0]))
    del document[name]
    assert getattr(decode(msgspec.msgpack.encode(document), LoadReport), name) == 0


async def test_nothing_that_was_reported_in_an_outage_is_heard_after_it(alone: LoneWorker) -> None:
    reports = await reports_of(alone)
    await alone.serve()
    await eventually(lambda: reports)
    alone.broker.disconnect("w0")
    alone.worker.serving.drain()  # only reports of the outage say so
    await asyncio.sleep(0.3)
    assert alone.worker.serving.revive()
    known = len(reports)
    alone.broker.reconnect("w0")
    await eventually(lambda: len(reports) > known)
    assert {r.state for r in reports} == {"serving"}


async def test_a_worker_takes_its_place_among_those_of_its_host_while_it_has_an_instance() -> None:
    url, interval_s = f"nats://{uuid.uuid4().hex}:4222", 0.05
    other = HostGroup(group_name(url, "h"), "h", interval_s=interval_s)
    async with lone_worker(nats_url=url, host="h", report_interval_s=interval_s) as alone:
        together: list[HostLoad] = []
        await alone.planner.subscribe(subjects.host_load(), HostLoad, together.append)
        instance_id = await alone.serve()

        async def other_reports() -> None:
            while True:
                mine = report("i9", worker_id="w9")
                said = other.exchange(mine, time.monotonic())
                together.extend(message for message in said if isinstance(message, HostLoad))
                await asyncio.sleep(interval_s)

        reporting = asyncio.create_task(other_reports())
        await eventually(lambda: any({r.worker_id for r in load.reports} == {"w0", "w9"} for load in together))
        await alone.drain(instance_id)
        await alone.reported("drain-1", "spare")
        await eventually(lambda: other.gathers)
        reporting.cancel()
    other.leave()
