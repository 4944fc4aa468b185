from __future__ import annotations

import pytest

from bench.gateway.load import LoadSpec
from bench.gateway.measure import run_client
from bench.gateway.servers import sketch


@pytest.mark.stack
async def test_the_sketch_streams_one_event_per_token() -> None:
    async with sketch() as url:
        result = await run_client(
            LoadSpec(
                url=url, mode="throughput", streams=8, prompt_tokens=4, output_tokens=20, warmup_s=0.2, measure_s=5.0
            )
        )
    assert result.faults == {}
    assert result.tokens > 8 * 20
