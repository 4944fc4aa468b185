"""A recording of the services, played to fresh cores in virtual time, gives the same verdicts, plans and routes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path

import pytest

from bench.recording.player import play
from bench.recording.recorder import recording
from services.gateway.config import GatewayConfig
from services.gateway.core.router import Router
from services.gateway.core.stream import StreamState
from services.gateway.service import Gateway
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.watch import Figures, Watch, Wish
from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.operation import Operation
from services.planner.core.planner import Planner
from services.planner.core.rounds.moment import Moment
from services.planner.core.rounds.settings import PlanSettings
from services.worker.core.live import life
from services.worker.core.live.batch import Batch, Request
from services.worker.core.live.machine import Begin, HasLanded
from services.worker.core.live.target import TargetMachine
from services.worker.core.live.target_words import HandedOver, SourceAsks
from shared.errors import BlitzError
from shared.messages.generation import FinishReason, SamplingParams, TokenLogprobs
from shared.messages.live import Pull, Seal
from shared.messages.load import ModelQueue, QueueReport
from shared.registry_view import RegistryView
from tests.records import model, targets, worker_record
from tests.services.cluster import Cluster, running_cluster
from tests.services.fake_gateway import PROMPT
from tests.services.planner.core.live.some_pairs import assignment
from tests.wait_until import eventually

M = model("m", min_instances=0)


class Ended:
    """Where a request's tokens go: nowhere, but for the end."""

    def __init__(self) -> None:
        self.began = False
        self.reason: FinishReason | None = None

    def on_tokens(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: FinishReason | None,
        now_s: float,
    ) -> bool:
        self.began = True
        self.reason = finish_reason or self.reason
        return False

    def on_error(self, error: BlitzError) -> None:
        raise error


@asynccontextmanager
async def running_gateway(cluster: Cluster) -> AsyncIterator[Gateway]:
    """A real one that knows the model, without its HTTP server."""
    config = GatewayConfig(gateway_id="real")
    gateway = Gateway(cluster.broker.bus("gateway"), config)
    running = asyncio.create_task(gateway.run())
    await eventually(lambda: "m" in gateway.routes.models)
    try:
        yield gateway
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def send(gateway: Gateway, name: str, count: int) -> list[Ended]:
    """A burst."""
    known = gateway.find_model("m").record
    ends = [Ended() for _ in range(count)]
    for index, end in enumerate(ends):
        sampling = SamplingParams(max_tokens=12, seed=index)
        stream = StreamState(f"{name}-{index}", "m", PROMPT, sampling, arrived_at_s=0.0, model_hash=known.model_hash)
        gateway.dispatcher.start(stream, end)
    return ends


async def ended(ends: list[Ended]) -> None:
    await eventually(lambda: all(end.reason == "length" for end in ends))


async def test_cores_that_hear_what_was_recorded_decide_as_those_of_the_services_did(
    redis_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "recording"
    with recording(file):
        async with running_cluster(redis_url, 3) as cluster:
            await cluster.add_model()
            async with running_gateway(cluster) as gateway:
                await ended(send(gateway, "wakes", 8))
                await cluster.scale(2)
                await ended(send(gateway, "burst", 40))
                await cluster.scale(1)
                await cluster.scale(2)
                victim = cluster.workers[(await cluster.serving(2))[0].worker.worker_id]
                ends = send(gateway, "fails", 16)
                await eventually(lambda: any(end.began for end in ends))
                # If these have ended by now, as they may on a busy machine, it has some of the others.
                ends += send(gateway, "fails-too", 4)
                await victim.kill()
                await ended(ends)
    played = play(file)
    assert played.difference is None, str(played.difference)[:4000]
    for call in (
        "Watch.evaluate", "Planner.on_demand", "Rounds.granted", "PlanWriter.begin", "Tracker.on_progress",
        "Router.dispatch", "failover.after_failure", "Registry.take", "Placer.look",
    ):  # fmt: skip
        assert played.num_calls[call] > 0


def watched() -> tuple[Watch, list[Wish]]:
    """A monitor's core that wakes a model."""
    watch = Watch(DemandPolicy(down_window_s=0.0), repeat_s=1.0)
    watch.on_snapshot(RegistryView({"m": M}, (worker_record("w0"),), {}), lambda record, worker: None)
    queue = ModelQueue(
        model="m",
        queued_requests=1,
        queued_tokens=100,
        arrived_requests_total=1,
        arrived_prompt_tokens_total=100,
        inflight_requests=0,
    )
    assert watch.on_queue(QueueReport(gateway_id="gw", models=(queue,)), 1.0)
    return watch, watch.evaluate(1.1, connected_since_s=0.0, leads=True)


def test_a_core_that_decides_by_more_than_it_was_told_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recording"
    with recording(file):
        watched()
    assert play(file).difference is None
    evaluate = Watch.evaluate
    monkeypatch.setattr(
        Watch, "evaluate", lambda *a, **rest: [w._replace(triggered_ago_s=7.0) for w in evaluate(*a, **rest)]
    )
    difference = play(file).difference
    assert difference is not None
    assert "evaluate" in difference.call
    assert "0.0, 0, None" in str(difference.recorded)
    assert "7.0, 0, None" in str(difference.played)


def test_what_a_shell_does_behind_the_back_of_a_core_is_found(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    with recording(file):
        watch, _ = watched()
        watch.figures["m", "decode"] = Figures(1, 1.0)  # type: ignore[index]
    difference = play(file).difference
    assert difference is not None
    assert "in the end" in difference.call
    assert "_figures" in difference.recorded


def test_an_attribute_that_a_shell_sets_is_part_of_the_recording(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    with recording(file):
        router = Router(max_queued_requests=1)
        router.bookings.load_of("i").refusals = 3
    played = play(file)
    assert played.difference is None
    assert played.num_calls["InstanceLoad.__setattr__"] == 1


def test_a_part_that_a_shell_takes_from_a_core_is_found_again(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    with recording(file):
        operation = Operation(
            plan_id="p",
            model="m",
            direction="out",
            desired=1,
            reason="load",
            triggered_s=1.0,
            targets=targets(("w1", "i1")),
            assignments=(assignment(),),
        )
        for pair in operation.pairs.values():
            pair.fail("its source is gone")
        assert operation.record().live[0].outcome == "failed"
    played = play(file)
    assert played.difference is None, str(played.difference)
    assert played.num_calls["LivePair.fail"] == 1


def test_a_core_is_given_the_ids_that_were_made(tmp_path: Path) -> None:
    file, made = tmp_path / "recording", iter(("plan-1", "plan-2"))
    with recording(file):
        planner = Planner(PlanSettings(), lambda kind: next(made), lambda **_: None)
        asked = planner.rounds.ask(ScaleRequest("m", 3, 5.0, "by hand"), Moment(5.0, 5.0))
        planner.writer.nothing_to_do(asked.request, Moment(5.0, 5.0))
    assert play(file).difference is None
    assert next(made) == "plan-2"


def test_calls_of_several_threads_are_recorded_in_the_order_in_which_they_happened(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    with recording(file), ThreadPoolExecutor() as threads, often_switching():
        machine = TargetMachine(assignment(), 4, part_tokens=8, limit_tokens=64)
        machine.handle(Begin(), 0.0)
        machine.handle(SourceAsks(0, Seal(pair_id="p", count=0)), 0.0)

        def look(_: int) -> tuple[object, ...]:
            """As a worker's event loop does, with no lock."""
            return machine.due_s, machine.queued, machine.life.state, machine.num_requests

        looks = threads.map(look, range(2000))
        for i in range(300):
            batch = Batch(f"b{i}", (Request((f"r{i}", 0), 8),), 0.1)
            (reserve,) = machine.handle(HandedOver(i, batch, i, behind_seal=True), i)
            machine.handle(HasLanded(reserve, True), i)
            machine.handle(SourceAsks(i, Pull(pair_id="p", claim_id=f"c{i}", serial=i, wait_s=1.0)), i)
        assert len({requests for _, _, _, requests in looks}) > 1
    played = play(file)
    assert played.difference is None, str(played.difference)[:4000]
    assert played.num_calls["TargetMachine.handle"] == 902
    assert played.num_calls["TargetMachine.due_s"] == 2000


@contextmanager
def often_switching() -> Iterator[None]:
    """From one thread to the other."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


def test_an_iterator_without_an_end_is_played_as_far_as_it_was_read(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    with recording(file):
        pauses = life.offer_pauses()
        first = [*islice(pauses, 3)]
    assert first[0] < first[1] < first[2]
    played = play(file)
    assert played.difference is None, str(played.difference)
    assert played.num_calls["generator.__next__"] == 3


def test_what_a_process_that_died_wrote_last_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    with recording(file):
        watched()
    whole = play(file).total
    file.write_bytes(file.read_bytes()[:-1000])
    cut = play(file)
    assert cut.difference is None
    assert 0 < cut.total <= whole


def test_nothing_stands_between_once_it_is_over(tmp_path: Path) -> None:
    before = {kind: dict(vars(kind)) for kind in (Watch, Router, Planner, StreamState)}
    with recording(tmp_path / "recording"):
        assert Watch.evaluate is not before[Watch]["evaluate"]
    assert {kind: dict(vars(kind)) for kind in before} == before
