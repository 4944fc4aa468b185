from __future__ import annotations

import statistics

import pytest

from bench import stream_client
from bench.gateway import client
from bench.gateway.load import LoadResult, LoadSpec
from bench.gateway.measure import Point, as_json, run_client
from bench.stats import Summary
from shared.errors import Internal
from tests.bench.fake_server import fake_server
from tests.bench.loop_time import loop_time


def _spec(url: str, **changes: object) -> LoadSpec:
    values: dict[str, object] = {
        "mode": "throughput",
        "streams": 4,
        "prompt_tokens": 5,
        "output_tokens": 8,
        "warmup_s": 0.1,
        "measure_s": 0.4,
        "timeout_s": 60.0,
    }
    return LoadSpec(url=url, **(values | changes))  # type: ignore[arg-type]


async def _measure(spec: LoadSpec) -> LoadResult:
    """The measured time is so short that a busy machine might not run this process in it."""
    async with loop_time(client, stream_client):
        return await client.measure(spec)


async def test_streams_run_back_to_back_and_tokens_are_counted() -> None:
    async with fake_server(gap_s=0.005) as server:
        result = await _measure(_spec(server.url))
    assert server.most_running == 4
    assert server.connections <= 5
    assert 0 < result.tokens <= 4 * 8 * (1 + 0.4 / 0.04)
    assert result.faults == {}
    assert result.cpu_share > 0


async def test_first_tokens_are_paced_and_timed() -> None:
    async with fake_server(gap_s=0.001) as server:
        result = await _measure(_spec(server.url, mode="first_token", streams=2, interval_s=0.5, measure_s=2.0))
    assert 6 <= result.requests <= 9
    assert len(result.ttft_ms) == result.requests
    assert all(0 < ttft < 2500 for ttft in result.ttft_ms)
    assert statistics.median(result.ttft_ms) < 100


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [("short", "event_count"), ("429", "http_429"), ("error_event", "error_event"), ("cut", "disconnected")],
)
async def test_what_goes_wrong_is_counted(behaviour: str, kind: str) -> None:
    async with fake_server(lambda n: behaviour if n == 3 else "ok", gap_s=0.002) as server:
        result = await _measure(_spec(server.url))
    assert result.faults == {kind: 1}
    assert result.fault_example is not None
    assert kind in result.fault_example


async def test_runs_as_a_process_of_its_own() -> None:
    async with fake_server(gap_s=0.005) as server:
        result = await run_client(_spec(server.url, warmup_s=0.0, measure_s=5.0))
    assert result.tokens > 0


async def test_a_client_without_a_server_is_an_error() -> None:
    with pytest.raises(Internal, match="client process"):
        await run_client(_spec("http://127.0.0.1:1"))


def test_figures_are_keyed_by_number_of_streams() -> None:
    added = Summary(count=10, mean=2.0, p50=1.5, p99=4.0, max=5.0)
    stack = [Point(1, added, 900.0, {}, None, 0.1), Point(128, None, 15000.0, {"timeout": 2}, "timeout: x", 0.5)]
    bare = [Point(1, added, 1000.0, {}, None, 0.1), Point(128, added, 30000.0, {}, None, 0.6)]
    document = as_json(stack, bare, 8.0)
    assert document["added_ms_p50"] == {"1": 1.5, "128": None}
    assert document["added_ms_p99"] == {"1": 4.0, "128": None}
    assert document["tokens_per_s"] == {"1": 900.0, "128": 15000.0}
    assert document["sketch_tokens_per_s"] == {"1": 1000.0, "128": 30000.0}
    assert document["tokens_per_s_of_sketch"] == {"1": 0.9, "128": 0.5}
    assert document["faults"] == {"1": {}, "128": {"timeout": 2}}
    assert document["fault_examples"] == ["timeout: x"]
