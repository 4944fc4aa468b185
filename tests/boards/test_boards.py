"""The dashboard and the alerts against a stack that serves and scales: no question is wrong, none has no answer.

Needs Debian's Prometheus: ``make test-boards``.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from compose.boards.files import write_boards
from compose.boards.panels import GPU_SECONDS, KEY_GPU_SECONDS, OTHER_GPU_SECONDS, ROWS
from compose.ports import free_port
from compose.stack import Stack
from services.pool.core.gpu_time import SHOW_EVERY_S
from tests.boards.prometheus import Prometheus, program, running
from tests.otlp import OtlpReceiver
from tests.plain_http import openai_client
from tests.stack.client import complete, scale
from tests.stack.conftest import MODEL, NO_DEMAND, READY_S, mock_config
from tests.wait_until import WAIT_S, eventually

KEYS = ("sk-a", "sk-b")
RATE_OVER_S = 20
VARIABLES = {"$model": ".+", "$__rate_interval": "30s", "$__range": "1h"}


LATENCIES = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
LENGTHS = ("request_prompt_tokens", "request_generation_tokens")
SUMS = (
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_max_num_generation_tokens",
)  # fmt: skip
COUNTERS = ("prompt_tokens_total", "generation_tokens_total")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def of_vllms_dashboard() -> Iterator[str]:
    """What vLLM's own dashboard (``grafana.json`` of its examples, in November 2026) asks for."""
    chosen, over = f'{{model_name="{MODEL}"}}', f'{{model_name="{MODEL}"}}[30s]'
    for name in LATENCIES:
        for share in (0.5, 0.9, 0.95, 0.99):
            yield f"histogram_quantile({share}, sum by(le) (rate(vllm:{name}_bucket{over})))"
        yield f"rate(vllm:{name}_sum{over}) / rate(vllm:{name}_count{over})"
    for name in LENGTHS:
        yield f"sum by(le) (increase(vllm:{name}_bucket{over}))"
    for name in SUMS:
        yield f"rate(vllm:{name}_sum{over})"
    for name in COUNTERS:
        yield f"rate(vllm:{name}{over})"
    for name in GAUGES:
        yield f"vllm:{name}{chosen}"
    yield f"sum by(finished_reason) (increase(vllm:request_success_total{over}))"


def filled(expr: str) -> str:
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def test_promtool_takes_the_files_and_every_alert_fires_when_it_should_and_else_not(tmp_path: Path) -> None:
    write_boards(tmp_path, force=False)
    for arguments in (
        ["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"],
    ):  # fmt: skip
        ended = subprocess.run([program("promtool"), *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr


@asynccontextmanager
async def scraped(stack: Stack, folder: Path) -> AsyncIterator[Prometheus]:
    write_boards(folder, force=False)
    config = folder / "prometheus.yml"
    config.write_text(
        config.read_text().replace("interval: 5s", "interval: 1s").replace("interval: 15s", "interval: 1s")
    )
    first = stack.config.first_health_port
    ports = range(first, first + stack.config.num_health_ports)
    addresses = [stack.url.removeprefix("http://"), *(f"127.0.0.1:{port}" for port in ports)]
    (folder / "targets.yml").write_text("- targets:\n" + "".join(f'    - "{address}"\n' for address in addresses))
    with running(config, folder) as url:
        prometheus = Prometheus(url)
        try:
            yield prometheus
        finally:
            await prometheus.close()


async def test_every_panel_has_an_answer_while_a_stack_serves_and_scales(
    tmp_path: Path, otlp_receiver: OtlpReceiver
) -> None:
    config = mock_config(
        tmp_path / "stack",
        workers=3,
        BLITZ_HEALTH_PORT=str(free_port()),
        BLITZ_API_KEYS=",".join(KEYS),
        BLITZ_POOL_GPU_HOUR_COST="3600",
        OTEL_EXPORTER_OTLP_ENDPOINT=otlp_receiver.endpoint,
        **NO_DEMAND,
    )
    async with Stack(config) as stack, scraped(stack, tmp_path / "boards") as prometheus:
        await stack.wait_ready(READY_S)
        await eventually(lambda: _all_up(prometheus, 1 + config.num_health_ports))
        over = asyncio.Event()
        asking = [asyncio.create_task(keep_asking(stack.url, key, over)) for key in KEYS]
        try:
            for instances in (2, 1, 2):
                assert (await scale(stack, MODEL, instances)).status == "done"
            for panel in itertools.chain.from_iterable(row.panels for row in ROWS):
                for query in panel.queries:
                    await eventually(partial(prometheus.values, filled(query.expr)))
            for expr in of_vllms_dashboard():
                await eventually(partial(prometheus.values, expr))
            await check_cost(prometheus)
            await check_exemplars(prometheus, otlp_receiver)
            rules = (await prometheus.ask("/api/v1/rules"))["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        finally:
            over.set()
            await asyncio.gather(*asking)


async def keep_asking(url: str, key: str, over: asyncio.Event) -> None:
    async with openai_client(url) as client:
        mine = client.with_options(api_key=key)
        while not over.is_set():
            await complete(mine, MODEL)


async def _all_up(prometheus: Prometheus, number: int) -> bool:
    return await prometheus.values("sum(up)") == {"[]": number}


async def check_cost(prometheus: Prometheus) -> None:
    """What keys cost, and what no key used, is what all GPUs cost; and that is the time of all workers."""
    used, other, all_ = (f"sum({filled(expr)})" for expr in (KEY_GPU_SECONDS, OTHER_GPU_SECONDS, GPU_SECONDS))
    share = await prometheus.values(f"({used} + {other}) / {all_}")
    assert share == {"[]": pytest.approx(1.0, abs=1e-6)}
    at_once = f"sum(rate(blitz_gpu_seconds_total[{RATE_OVER_S}s])) / sum(blitz_pool_workers)"
    # Shown once in SHOW_EVERY_S, so either end of the rate is up to that old.
    off = 1.5 * SHOW_EVERY_S / RATE_OVER_S

    async def counts_all() -> bool:
        found = await prometheus.values(at_once)
        return found == {"[]": pytest.approx(1.0, abs=off)}

    await eventually(counts_all)


async def check_exemplars(prometheus: Prometheus, receiver: OtlpReceiver) -> None:
    """Traces that the collector has, of requests and of scaling."""
    for metric, name in (
        ("vllm:time_to_first_token_seconds_bucket", f"text_completion {MODEL}"),
        ("blitz_scale_seconds_bucket", "planner.plan"),
    ):

        async def shown(metric: str = metric) -> set[str]:
            found = await prometheus.ask("/api/v1/query_exemplars", query=metric, start="0", end="4102444800")
            return {each["labels"]["trace_id"] for series in found for each in series["exemplars"]}

        await eventually(shown)
        trace_ids = await shown()
        receiver.wait_for(
            lambda spans, name=name, ids=trace_ids: any(s.name == name and s.trace_id in ids for s in spans), WAIT_S
        )
