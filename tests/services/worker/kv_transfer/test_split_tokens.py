"""What a real engine puts out for prompts that are computed in chunks, or in layers by two instances, and decoded by a
third: the tokens of one instance that does it all."""

from __future__ import annotations

import random

import pytest

from tests.services.worker.kv_transfer.fakes import outcomes_at
from tests.services.worker.late_workers import also_late
from tests.services.worker.live.burst import Burst, live_cluster
from tests.wait_until import eventually

LENGTHS = (20, 48, 150, 31, 97, 5, 120, 64, 33, 140, 12, 80)
"""Chunks are of 48 tokens."""
PROMPTS = {f"r{i}": tuple(random.Random(i).choices(range(3, 200), k=n)) for i, n in enumerate(LENGTHS)}
MAX_TOKENS = 12


@also_late("drawn")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_tokens_are_those_of_one_instance(redis_url: str, temperature: float) -> None:
    async with live_cluster(redis_url, num_workers=3, engine="torch", mock=None, kv_bytes=16 << 20) as cluster:
        burst, gateway = Burst(cluster), cluster.gateway
        burst.temperature = temperature
        alone: dict[str, tuple[int, ...]] = {}

        async def before() -> None:
            """One instance does it all, one request after the other; then they go the long way without a pair."""
            decoder = burst.decoder
            for name, prompt in PROMPTS.items():
                await gateway.submit(
                    decoder.worker_id,
                    decoder.serving.instance_id,
                    f"alone-{name}",
                    prompt=prompt,
                    max_tokens=MAX_TOKENS,
                    temperature=temperature,
                )
                await gateway.end_of(f"alone-{name}")
                alone[name] = gateway.tokens(f"alone-{name}")
            for name, prompt in PROMPTS.items():
                await burst.submit(f"chunks-{name}", prompt)
            await same("chunks-")

        async def same(prefix: str) -> None:
            for name, tokens in alone.items():
                end = await gateway.end_of(f"{prefix}{name}")
                assert end.finish_reason == "length", end
                assert gateway.tokens(f"{prefix}{name}", repeats=True) == tokens

        await burst.start(
            delay_s=0.4, role="prefill", max_tokens=MAX_TOKENS, prompts=PROMPTS, before=before, until_split=True
        )
        assert outcomes_at(burst.source) == {"moved": len(PROMPTS)}, "in chunks"
        await same("")
        await eventually(lambda: cluster.live_reports)
        await eventually(lambda: outcomes_at(burst.target).get("shared", 0) > 0)  # a premise: both ran layers
        await burst.clean()
        (report,) = cluster.live_reports
        assert report.outcome == "dissolved"
