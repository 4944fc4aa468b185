"""The dispatcher between its calls, where HTTP tests cannot look."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.core.routes import RouteDiff, RouteView
from services.gateway.core.stream import StreamState
from services.gateway.dispatcher import Dispatcher
from services.gateway.metrics import GatewayMetrics
from shared import subjects
from shared.errors import BlitzError
from shared.messages.generation import FinishReason, SamplingParams, StreamPart, TokenBatch, TokenLogprobs
from shared.messages.load import QueueReport
from shared.messages.registry import ModelRoute, RouteChanges
from tests.moved_clock import MovedClock
from tests.processes import INCARNATION, process
from tests.services.gateway.checkpoint import model_record
from tests.services.gateway.cluster import FakeWorker
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import eventually


class Ends:
    """A sink that keeps how the request ended."""

    def __init__(self) -> None:
        self.reason: FinishReason | None = None
        self.errors: list[BlitzError] = []

    def on_tokens(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: FinishReason | None,
        now_s: float,
    ) -> bool:
        self.reason = finish_reason
        return False

    def on_error(self, error: BlitzError) -> None:
        self.errors.append(error)


def dispatcher(broker: MemoryBroker, *workers: FakeWorker, routes: RouteView | None = None) -> Dispatcher:
    routes = routes or RouteView()
    made = Dispatcher(
        broker.bus("gateway"),
        routes,
        GatewayMetrics(routes),
        GatewayConfig(
            gateway_id="gw-test",
            max_queued_requests=10,
            queue_timeout_s=5.0,
            submit_timeout_s=1.0,
            stall_s=1.0,
            probe_s=0.5,
            max_attempts=3,
        ),
        incarnation=INCARNATION,
    )
    made.router.set_routes("m", "", [worker.route() for worker in workers])
    return made


def request(name: str) -> StreamState:
    return StreamState(
        request_id=name,
        model="m",
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=4, seed=0),
        arrived_at_s=0.0,
    )


async def test_a_worker_is_not_asked_for_a_stream_before_it_can_know_it() -> None:
    broker = MemoryBroker()
    worker = FakeWorker(broker, "w0", pause_after=0)
    await worker.start()
    running = dispatcher(broker, worker)
    running.start(request("r"), Ends())
    # The submit is made, but not a step of it has run: the worker would deny that it has the stream.
    running.routes_changed(RouteDiff(lost_instances={worker.instance_id}))
    await asyncio.sleep(0.05)
    assert (len(worker.submits), worker.resends) == (1, [])
    running.routes_changed(RouteDiff(lost_instances={worker.instance_id}))
    await asyncio.sleep(0.05)
    assert len(worker.resends) == 1
    await running.close()
    await worker.stop()


async def test_a_request_that_is_taken_over_gets_fresh_patience_and_makes_room_at_once() -> None:
    broker = MemoryBroker()
    worker = FakeWorker(broker, "w0", pause_after=0, max_running=1)
    await worker.start()
    running = dispatcher(broker, worker)
    running.start(request("first"), Ends())
    running.start(request("second"), Ends())
    taken = running.requests["first"]
    taken.asked, taken.progress_s = True, -60.0
    part = StreamPart(request_id="first", attempt=1, offset=0)
    running.on_batch(TokenBatch(worker_id="w1", incarnation=INCARNATION, instance_id="w1-i", parts=(part,)))
    assert (taken.stream.worker.id, taken.progress_s, taken.asked, taken.submitting) == ("w1", 0.0, False, False)
    # Nobody has ticked.
    assert running.requests["second"].stream.worker.id == "w0"
    await running.close()
    await worker.stop()


async def test_closing_ends_every_request_once_and_leaves_no_task() -> None:
    broker = MemoryBroker()
    worker = FakeWorker(broker, "w0", pause_after=0, max_running=1)
    await worker.start()
    running = dispatcher(broker, worker)
    before = asyncio.all_tasks()
    ends = [Ends() for _ in range(3)]
    for index, end in enumerate(ends):
        running.start(request(str(index)), end)
    await asyncio.sleep(0.05)
    await running.close()
    await asyncio.wait_for(running.requests.wait_idle(), 1)
    assert [[error.code for error in end.errors] for end in ends] == [["unavailable"]] * 3
    await worker.stop()
    assert asyncio.all_tasks() <= before


async def test_streams_are_asked_for_what_an_outage_took_from_them_by_a_gateway_that_stood_still_in_it(
    moved_clock: MovedClock,
) -> None:
    broker = MemoryBroker()
    worker = FakeWorker(broker, "w0", pause_after=0)
    await worker.start()
    running = dispatcher(broker, worker)
    running.start(request("r"), Ends())
    await eventually(lambda: worker.submits)
    running.on_queues(QueueReport(gateway_id="gw-test", models=()))
    running.tick()
    part = StreamPart(request_id="r", attempt=1, offset=0, token_ids=(1,))
    running.on_batch(TokenBatch(worker_id="w0", incarnation=INCARNATION, instance_id=worker.instance_id, parts=(part,)))
    broker.disconnect("gateway")
    moved_clock.move(0.5)  # the gateway, too, is as if it were stopped
    broker.reconnect("gateway")
    running.tick()
    await eventually(lambda: worker.resends)
    await running.close()
    await worker.stop()


@pytest.mark.parametrize("stands_still", [False, True])
async def test_a_worker_that_is_silent_since_the_bus_was_away_did_not_die(
    checkpoint: Path, moved_clock: MovedClock, stands_still: bool
) -> None:
    broker, routes, record = MemoryBroker(), RouteView(), model_record(checkpoint, "m")
    holder, other = workers = FakeWorker(broker, "w0", pause_after=0), FakeWorker(broker, "w1")
    for worker in workers:
        await worker.start()
    running = dispatcher(broker, routes=routes)
    found = tuple(ModelRoute(model="m", route=worker.route()) for worker in workers)
    running.routes_changed(
        routes.apply_changes(RouteChanges(publisher="pool", sequence=1, models=(record,), routes=found))
    )

    async def tick() -> None:
        while True:
            running.tick()
            await asyncio.sleep(0.05)

    await broker.bus("gateway").subscribe(subjects.tokens(process("gw-test")), TokenBatch, running.on_batch)
    ticking = asyncio.create_task(tick())
    await eventually(lambda: running.silence_watch.is_settled)
    stream, end = request("r"), Ends()
    stream.model_hash = record.model_hash
    running.start(stream, end)
    await eventually(lambda: holder.submits)
    await holder.stop()
    broker.disconnect()
    broker.reconnect()
    if stands_still:
        await asyncio.sleep(0.2)
        moved_clock.move(2.1)  # the gateway, too, is as if it were stopped: for longer than it takes to settle
    running.silence_watch.ask(running.requests["r"])
    await eventually(lambda: stream.attempt == 2)
    assert stream.deaths.counted == stream.failures == 0
    await eventually(lambda: end.reason)
    assert (end.reason, end.errors, len(other.submits)) == ("length", [], 1)
    ticking.cancel()
    await running.close()
    await other.stop()
