"""Load is heard however it comes."""

from __future__ import annotations

import asyncio

from shared import subjects
from shared.load_feed import subscribe_load
from shared.messages.load import HostLoad, LoadReport
from tests.services.monitor.core.reports import report
from tests.shared.bus.memory import MemoryBroker


async def test_reports_come_one_by_one_and_together_in_their_order() -> None:
    broker = MemoryBroker()
    worker, reader = broker.bus("worker"), broker.bus("reader")
    got: list[LoadReport] = []
    subscriptions = await subscribe_load(reader, got.append)
    sent = [report(f"i{n}", queued_tokens=n) for n in range(4)]
    await worker.publish(subjects.load(), sent[0])
    await worker.publish(subjects.host_load(), HostLoad(host="h", reports=tuple(sent[1:])))
    await asyncio.sleep(0.01)
    assert got == sent
    for subscription in subscriptions:
        await subscription.close()
    await worker.publish(subjects.load(), sent[0])
    await worker.publish(subjects.host_load(), HostLoad(host="h", reports=tuple(sent)))
    await asyncio.sleep(0.01)
    assert got == sent


async def test_what_is_no_load_is_counted_and_dropped() -> None:
    broker = MemoryBroker()
    worker, reader = broker.bus("worker"), broker.bus("reader")
    got: list[LoadReport] = []
    await subscribe_load(reader, got.append)
    for subject in (subjects.load(), subjects.host_load()):
        broker.publish_raw(subject, b"\xc1 not msgpack")
    await worker.publish(subjects.host_load(), report())
    await worker.publish(subjects.load(), HostLoad(host="h", reports=(report(),)))
    await asyncio.sleep(0.01)
    assert got == []
