"""Every request that comes ends once, whatever comes, wherever, in whichever system."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.replay.plan import Shape, plan_requests
from bench.sim.cluster import Cluster, known_cluster
from bench.sim.models import known_model
from bench.sim.run import Setup, WorkerSettings, simulate
from bench.systems import SYSTEMS, Split
from bench.traces.request import Trace, TraceRequest

NAMES = sorted(name for name, system in SYSTEMS.items() if not system.simulated_only)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Bursts, gaps and lengths that one would not ask for."""
    count = draw(st.integers(1, 40))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.4, 3.0]), min_size=count, max_size=count))
    prompts = draw(st.lists(st.sampled_from([1, 15, 16, 700, 8000]), min_size=count, max_size=count))
    outputs = draw(st.lists(st.sampled_from([1, 2, 33, 400]), min_size=count, max_size=count))
    at_s, requests = 0.0, []
    for gap, prompt, output in zip(gaps, prompts, outputs, strict=True):
        at_s += gap
        requests.append(TraceRequest(at_s, prompt, output))
    return Trace("drawn", tuple(requests))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Few GPUs, in hosts with and without a scale-up network."""
    gpus = draw(st.sampled_from([1, 2, 4]))
    joined = gpus > 1 and draw(st.booleans())
    return msgspec.structs.replace(
        known_cluster("b"),
        hosts=draw(st.integers(2, 3)),
        gpus_per_host=gpus,
        gpus_per_domain=gpus if joined else 1,
        scale_up_gbps=256.0 if joined else None,
        nics_per_host=1,
        nic_gbps=draw(st.sampled_from([1.0, 100.0])),
        ssds_per_host=1,
        hosts_per_leaf=2,
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trace=traces(), cluster=clusters(), name=st.sampled_from(NAMES), kv_blocks=st.sampled_from([600, 2000, 100_000]))
def test_every_request_ends_once(trace: Trace, cluster: Cluster, name: str, kv_blocks: int) -> None:
    model, system = known_model("llama3-8b", "a100"), SYSTEMS[name]
    worker = WorkerSettings(kv_bytes=16 * kv_blocks * model.kv_bytes_per_token)
    setup = Setup(cluster=cluster, model=model, worker=worker, patience_s=300.0)
    requests = plan_requests(trace, Shape(context_tokens=8192))
    half = setup.num_workers // 2
    if system.scales:
        outcome = simulate(setup, system, requests)
    elif system.serving == "colocated":
        outcome = simulate(setup, system, requests, colocated=half)
    else:
        outcome = simulate(setup, system, requests, split=Split(half, setup.num_workers - half))
    assert [record.index for record in outcome.records] == list(range(len(requests)))
    wanted = {request.index: request.output_tokens for request in requests}
    for record in outcome.records:
        assert record.failure is not None or record.output_tokens == wanted[record.index]
        assert list(record.gaps_s) == pytest.approx([abs(gap) for gap in record.gaps_s])
    assert not [record.failure for record in outcome.records if record.failure is not None]
