"""Every request that comes ends once, whatever comes, wherever, in whichever system, and whoever dies.

``BLITZ_TEST_EXAMPLES`` says how many runs of each kind are drawn.
"""

from __future__ import annotations

import math
import os

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.replay.plan import PlannedRequest, Shape, plan_requests
from bench.replay.record import RequestRecord
from bench.sim.cluster import Cluster, known_cluster
from bench.sim.faults import Fault
from bench.sim.models import known_model
from bench.sim.run import Simulation
from bench.sim.setup import Frame, Setup, WorkerSettings
from bench.systems import SYSTEMS, Split
from bench.traces.request import Trace, TraceRequest

NAMES = sorted(SYSTEMS)
WITH_FAULTS = sorted(name for name, system in SYSTEMS.items() if not system.pipelines)
MODELS = [("llama3-8b", 1), ("mistral-24b", 2)]
"""With the GPUs of an instance."""
EXAMPLES = int(os.environ.get("BLITZ_TEST_EXAMPLES", "8"))


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


@st.composite
def bursts(draw: st.DrawFn) -> tuple[Trace, tuple[Fault, ...]]:
    """Long prompts close upon each other, and workers that die soon after one has come, together and one after another.
    All are soon back, or some late and some never."""
    count = draw(st.integers(10, 40))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.2]), min_size=count, max_size=count))
    prompts = draw(st.lists(st.sampled_from([16, 700, 3000, 8000]), min_size=count, max_size=count))
    outputs = draw(st.lists(st.sampled_from([2, 33, 400]), min_size=count, max_size=count))
    at_s, requests = 0.0, []
    for gap, prompt, output in zip(gaps, prompts, outputs, strict=True):
        at_s += gap
        requests.append(TraceRequest(at_s, prompt, output))
    backs = draw(st.sampled_from([(0.1, 0.7, 3.0), (0.1, 0.7, 3.0, 30.0, math.inf)]))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        after_s = draw(st.sampled_from([0.0007, 0.02, 0.11, 0.26, 0.5, 1.3, 2.5]))
        number = draw(st.sampled_from([None, None, None, 0, 1]))
        found.append(Fault(draw(st.sampled_from(requests)).arrival_s + after_s, number, draw(st.sampled_from(backs))))
    return Trace("drawn", tuple(requests)), tuple(found)


def run(
    trace: Trace,
    cluster: Cluster,
    name: str,
    kv_blocks: int,
    struck: tuple[Fault, ...] = (),
    of: tuple[str, int] = MODELS[0],
) -> tuple[RequestRecord, ...]:
    """What became of the requests; nothing of them is left."""
    model, system = known_model(of[0], "a100", degree=of[1]), SYSTEMS[name]
    worker = WorkerSettings(kv_bytes=16 * kv_blocks * model.kv_bytes_per_token)
    setup = Setup(cluster=cluster, model=model, worker=worker, patience_s=300.0)
    requests = plan_requests(trace, Shape(context_tokens=8192))
    half = setup.num_workers // 2
    split = colocated = None
    if not system.scales and system.serving == "colocated":
        colocated = half
    elif not system.scales:
        split = Split(half, setup.num_workers - half)
    simulation = Simulation(setup, system, requests, split=split, colocated=colocated, frame=Frame(faults=struck))
    records = simulation.run().records
    check_ended_once(records, requests)
    if not any(record.failure is not None and record.failure.kind == "unfinished" for record in records):
        simulation.check_nothing_held()
    return records


def check_ended_once(records: tuple[RequestRecord, ...], requests: tuple[PlannedRequest, ...]) -> None:
    assert [record.index for record in records] == list(range(len(requests)))
    for record, request in zip(records, requests, strict=True):
        assert record.output_tokens <= request.output_tokens
        assert record.failure is not None or record.output_tokens == request.output_tokens
        assert list(record.gaps_s) == pytest.approx([abs(gap) for gap in record.gaps_s])


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trace=traces(),
    cluster=clusters(),
    name=st.sampled_from(NAMES),
    kv_blocks=st.sampled_from([600, 2000, 100_000]),
    of=st.sampled_from(MODELS),
)
def test_every_request_ends_once(
    trace: Trace, cluster: Cluster, name: str, kv_blocks: int, of: tuple[str, int]
) -> None:
    records = run(trace, cluster, name, kv_blocks, of=of if of[1] <= cluster.gpus_per_domain else MODELS[0])
    assert not [record.failure for record in records if record.failure is not None]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=bursts(),
    cluster=clusters(),
    name=st.sampled_from(WITH_FAULTS),
    kv_blocks=st.sampled_from([600, 2000, 100_000]),
)
def test_every_request_ends_once_whoever_dies(
    drawn: tuple[Trace, tuple[Fault, ...]], cluster: Cluster, name: str, kv_blocks: int
) -> None:
    trace, struck = drawn
    records = run(trace, cluster, name, kv_blocks, struck)
    failed = {record.failure.kind for record in records if record.failure is not None}
    if cluster.nic_gbps >= 100 and all(fault.back_s <= 3.0 for fault in struck):
        assert not failed  # there are workers soon, and they load soon
    assert failed <= {"timeout", "gave_up", "unfinished"}
