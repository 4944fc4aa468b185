"""Two prefill instances scale live together: whoever finishes a prompt ships its KV to the decode instance."""

from __future__ import annotations

import pytest

from shared.messages.common import LivePolicy
from shared.messages.generation import FinishReason
from tests.services.cluster import Cluster
from tests.services.worker.kv_transfer.fakes import outcomes_at
from tests.services.worker.late_workers import also_late
from tests.services.worker.live.burst import Burst, live_cluster
from tests.wait_until import eventually


@also_late("drawn")
@pytest.mark.parametrize("policy", ["zigzag", "best_effort", "overlap", "stop_the_world"])
async def test_a_burst_at_prefill_instances(redis_url: str, policy: LivePolicy) -> None:
    async with live_cluster(redis_url, policy, num_workers=3) as cluster:
        burst = Burst(cluster)
        is_known = list[bool]()

        def may_load() -> bool:
            return bool(is_known) and (policy != "zigzag" or burst.is_split())

        await burst.start(delay_s=0.2, role="prefill", max_tokens=8, until_split=may_load)
        await eventually(lambda: burst.live_target_of(burst.target) is not None)
        pair = burst.live_target_of(burst.target)
        assert pair is not None
        is_known.append(True)
        await burst.ends()
        await burst.clean()
        await eventually(lambda: cluster.live_reports)
        (report,) = cluster.live_reports
        assert report.outcome == "dissolved"
        assert report.batches
        assert await _senders(burst) == dict.fromkeys(burst.prompts, burst.decoder.worker_id)
        for worker in (burst.source, burst.target):
            assert outcomes_at(worker).keys() <= {"moved", "shared"}
        # What the target had begun when everything was loaded comes by way of the source.
        assert pair.shares is not None
        given = {g.batch_id for g in pair.shares.given}
        pulled = [b for b in report.batches if b.batch_id not in given]
        split = sum(b.num_requests for b in pulled if b.source_layers and b.target_layers)
        # Its KV went straight to the decode instance, unless that had not given room yet when the source pulled it.
        shared = outcomes_at(burst.target).get("shared", 0)
        assert shared <= split
        assert not outcomes_at(burst.source).get("shared")
        assert policy != "zigzag" or shared > 0


async def test_the_decode_worker_dies_while_two_prefill_instances_cooperate(redis_url: str) -> None:
    async with live_cluster(redis_url, num_workers=3) as cluster:
        burst = Burst(cluster)
        await burst.start(delay_s=0.02, role="prefill", max_tokens=8)
        await eventually(lambda: any(outcomes_at(w) for w in (burst.source, burst.target)))
        await burst.decoder.kill()
        # What it had taken over by then, or may have, is the gateway's to try again; the two that are left decode the
        # others.
        await burst.clean()
        moved, unknown = (
            int(sum(outcomes_at(w).get(how, 0) for w in (burst.source, burst.target))) for how in ("moved", "unknown")
        )
        assert moved < len(burst.prompts)
        await eventually(lambda: len(_ended(burst, "length")) >= len(burst.prompts) - moved - unknown)
        assert len(_ended(burst, "error")) == unknown


def _ended(burst: Burst, reason: FinishReason) -> set[str]:
    parts = [p for b in burst.cluster.gateway.batches for p in b.parts]
    assert all(p.finish_reason in (None, "length", "error") for p in parts)
    return {p.request_id for p in parts if p.finish_reason == reason}


async def _senders(burst: Burst) -> dict[str, str]:
    """Who sent each request's latest tokens."""
    cluster: Cluster = burst.cluster
    return {p.request_id: b.worker_id for b in cluster.gateway.batches for p in b.parts if p.token_ids}
