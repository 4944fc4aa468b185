"""Metrics of a service process, as scrapers ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import REGISTRY, Gauge, Histogram

from shared.health import HealthServer
from tests.plain_http import http_client

PLAIN = "text/plain;version=0.0.4"
OPENMETRICS = f"application/openmetrics-text;version=1.0.0,{PLAIN};q=0.5"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    gauge = Gauge("vllm:of_a_test", "With a colon.", registry=REGISTRY)
    histogram = Histogram("blitz_of_a_test_seconds", "With an exemplar.", registry=REGISTRY)
    histogram.observe(0.3, {"trace_id": "abc"})
    server = HealthServer(asyncio.get_running_loop(), lambda: True)
    server.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.port}/metrics"
    await asyncio.to_thread(server.stop)
    REGISTRY.unregister(gauge)
    REGISTRY.unregister(histogram)


@pytest.mark.parametrize("accept", [PLAIN, OPENMETRICS])
async def test_names_are_the_same_in_both_formats_and_exemplars_in_one(url: str, accept: str) -> None:
    async with http_client() as http:
        answer = await http.get(url, headers={"accept": accept})
    assert answer.headers["content-type"].startswith(accept.partition(";")[0])
    assert "\nvllm:of_a_test 0.0\n" in answer.text
    assert ('# {trace_id="abc"} 0.3' in answer.text) == (accept == OPENMETRICS)
    assert answer.text.endswith("# EOF\n") == (accept == OPENMETRICS)
