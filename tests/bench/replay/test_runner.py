from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench import stream_client
from bench.replay import runner
from bench.replay.plan import PlannedRequest, Shape, plan_requests
from bench.replay.record import Collector, Result
from bench.replay.runner import Bodies, SendOptions, choose_model, send_all
from bench.stream_client import Endpoint, StreamClient
from bench.traces.request import Trace, TraceRequest
from shared.errors import ModelNotFound, Unavailable
from tests.bench.fake_server import FakeServer, fake_server
from tests.bench.loop_time import loop_time
from tests.wait_until import eventually


def _trace(count: int, every_s: float = 0.0, output_tokens: int = 4) -> Trace:
    return Trace("t", tuple(TraceRequest(index * every_s, 6, output_tokens) for index in range(count)))


async def _replay(server: FakeServer, trace: Trace, **options: Any) -> tuple[Result, Collector]:
    client = StreamClient(Endpoint.of(server.url))
    requests = plan_requests(trace, Shape())
    collector = Collector(planned=len(requests))
    try:
        send = SendOptions(model="fake", **options)
        await send_all(client, Bodies(requests, send), send, collector)
    finally:
        client.close()
    return Result.of(collector), collector


async def test_measures_times_and_counts_tokens() -> None:
    async with fake_server(gap_s=0.1) as server:
        result, collector = await _replay(server, _trace(5, every_s=0.05))
    assert (result.completed, result.failed, result.unfinished) == (5, 0, 0)
    assert (result.input_tokens, result.output_tokens) == (30, 20)
    assert result.tbt_s is not None
    assert result.tbt_s.count == 15
    assert result.e2e_s is not None
    assert 0.08 < result.tbt_s.p50 < result.e2e_s.p50
    assert result.ttft_s is not None
    assert result.ttft_s.max < result.e2e_s.max
    assert result.e2e_s.p50 > 0.3
    assert result.duration_s > 0.2
    body = server.bodies[0]
    assert body["max_tokens"] == body["min_tokens"] == 4
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["temperature"] == 0
    assert len(body["prompt"]) == 6
    assert len(collector.records) == 5


async def test_requests_are_sent_on_time_however_late_the_answers_are() -> None:
    answers = asyncio.Event()
    async with fake_server(answers=answers) as server:
        replay = asyncio.create_task(_replay(server, _trace(10, every_s=0.02, output_tokens=1), timeout_s=600.0))
        await eventually(lambda: server.running == 10)
        answers.set()
        result, _ = await replay
    assert result.completed == 10
    assert server.most_running == 10


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        ("429", "http_429"),
        ("error_event", "error_event"),
        ("cut", "disconnected"),
        ("silent", "timeout"),
        ("short", "short_output"),
        ("garbage", "protocol"),
    ],
)
async def test_failures_are_counted_by_kind_and_do_not_spoil_the_rest(behaviour: str, kind: str) -> None:
    # Who stands still for longer than the time limit has none in time.
    async with fake_server(lambda n: behaviour if n == 1 else "ok") as server, loop_time(stream_client, runner):
        result, _ = await _replay(server, _trace(4, every_s=0.03), timeout_s=1.5)
    assert result.failures == {kind: 1}
    assert result.completed == 3
    assert result.failure_examples[kind]


async def test_a_slow_stream_that_keeps_talking_is_no_timeout() -> None:
    async with fake_server(gap_s=0.5) as server, loop_time(stream_client, runner):
        result, _ = await _replay(server, _trace(1, output_tokens=6), timeout_s=2.0)
    assert result.completed == 1


async def test_an_answer_in_small_pieces_reads_the_same() -> None:
    async with fake_server(split=True) as server:
        result, collector = await _replay(server, _trace(2, every_s=0.05), sample_outputs=2)
    assert result.completed == 2
    assert collector.samples[0].text == "t0 t1 t2 t3 "


async def test_events_are_counted_where_the_server_gives_no_usage() -> None:
    async with fake_server(lambda n: "no_usage") as server:
        result, _ = await _replay(server, _trace(1))
    assert (result.completed, result.output_tokens) == (1, 4)


async def test_samples_keep_prompt_and_output() -> None:
    async with fake_server() as server:
        _, collector = await _replay(server, _trace(3), sample_outputs=1)
    (sample,) = collector.samples
    assert sample.index == 0
    assert list(sample.prompt_token_ids) in [body["prompt"] for body in server.bodies]
    assert (sample.text, sample.finish_reason) == ("t0 t1 t2 t3 ", "length")


async def test_a_concurrency_limit_holds_and_its_wait_counts_into_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_client, "IDLE_S", 600.0)
    async with fake_server(gap_s=0.03) as server:
        result, _ = await _replay(server, _trace(4), concurrency_limit=1)
    assert server.most_running == 1
    assert server.connections == 1
    assert result.ttft_s is not None
    assert result.ttft_s.max > 0.3


async def test_cancelling_keeps_what_was_measured() -> None:
    async with fake_server(lambda n: "ok" if n == 0 else "silent") as server:
        client = StreamClient(Endpoint.of(server.url))
        requests = plan_requests(_trace(3, every_s=0.05), Shape())
        collector, send = Collector(planned=3), SendOptions(model="fake")
        task = asyncio.create_task(send_all(client, Bodies(requests, send), send, collector))
        await eventually(lambda: len(server.bodies) == 3 and collector.records)
        await asyncio.sleep(0.4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        client.close()
    result = Result.of(collector)
    assert (result.completed, result.unfinished) == (1, 2)
    assert result.duration_s > 0.3


async def test_an_endpoint_that_dies_fails_what_it_had_and_what_comes_after() -> None:
    # Who stands still meanwhile sends all of them before it dies.
    async with fake_server(lambda n: "die" if n == 4 else "ok") as server, loop_time(stream_client, runner):
        result, _ = await _replay(server, _trace(10, every_s=0.1), timeout_s=2.0)
    assert (result.completed + result.failed, result.unfinished) == (10, 0)
    assert result.completed >= 1
    assert set(result.failures) <= {"disconnected", "connect"}
    assert result.failures["connect"] >= 1


def test_bodies_are_made_ahead_within_a_bound_and_come_in_order() -> None:
    requests, made = plan_requests(_trace(10), Shape()), []

    class Counting(SendOptions):
        def body(self, request: PlannedRequest) -> bytes:
            made.append(request.index)
            return b"12345"

    bodies = Bodies(requests, Counting(model="m"), max_bytes=12)
    assert made == [0, 1, 2]
    assert not bodies.make_one()
    assert [request.index for request, _ in bodies] == list(range(10)) == made


async def test_choosing_a_model() -> None:
    async with fake_server(max_model_len=512) as server:
        client = StreamClient(Endpoint.of(server.url + "/v1/"))
        card = await choose_model(client, None, timeout_s=60)
        assert (card.id, card.max_model_len) == ("fake", 512)
        with pytest.raises(ModelNotFound, match="it has: fake"):
            await choose_model(client, "other", timeout_s=60)
        client.close()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await choose_model(StreamClient(Endpoint.of("http://127.0.0.1:1")), None, timeout_s=60)
