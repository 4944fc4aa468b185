"""Whole runs: every system serves every request once, and the same command gives the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from bench.replay.objectives import Slo
from bench.replay.plan import PlannedRequest, Shape, plan_requests
from bench.sim.arrivals import Arrivals, Reservation
from bench.sim.cluster import known_cluster
from bench.sim.gateway import SimGateway
from bench.sim.models import known_model
from bench.sim.planner import SimPlanner
from bench.sim.run import simulate
from bench.sim.run_result import RunResult, figures
from bench.sim.setup import Setup
from bench.systems import SYSTEMS, Split
from bench.traces.request import Trace, TraceRequest
from bench.traces.synthetic import synthesise
from shared.messages.operations import ScaleRecord
from shared.messages.registry import Route

SLO = Slo(0.45, 0.15)
SCALING = [name for name, system in SYSTEMS.items() if system.scales]


def setup() -> Setup:
    """Cluster B of the paper, with 8B."""
    return Setup(cluster=known_cluster("b"), model=known_model("llama3-8b", "a100"))


@cache
def requests() -> tuple[PlannedRequest, ...]:
    """A minute of code completion, with a burst."""
    return plan_requests(synthesise("azure-code", seed=0, duration_s=20.0), Shape(context_tokens=8192))


@cache
def result_of(name: str) -> RunResult:
    return simulate(setup(), SYSTEMS[name], requests())


@pytest.mark.parametrize("name", SCALING)
def test_every_scaling_system_serves_all_requests_and_scales(name: str) -> None:
    result = result_of(name)
    row = figures(result, SLO, SLO)
    assert (row.requests, row.failed, row.unfinished) == (len(requests()), 0, 0)
    assert [record.output_tokens for record in result.records] == [r.output_tokens for r in requests()]
    assert all(min(record.gaps_s, default=0.0) >= 0.0 for record in result.records)
    assert row.scale_outs > 0
    assert 0 < row.gpu_seconds < 16 * (result.cluster.end_s - result.cluster.begin_s)
    assert all(operation.status != "failed" for operation in result.cluster.operations)


def test_requests_of_instances_that_drain_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other requests begin at colocated instances with their KV."""
    begun: list[str] = []
    begin = Arrivals.begin

    def told(arrivals: Arrivals, reservation: Reservation, answer: Callable[[bool], object]) -> None:
        begun.append(reservation.sequence.request_id)
        begin(arrivals, reservation, answer)

    monkeypatch.setattr(Arrivals, "begin", told)
    conversations = plan_requests(synthesise("azure-conv", seed=0, duration_s=60.0), Shape(context_tokens=8192))
    result = simulate(replace(setup(), give_back_s=1.0), SYSTEMS["blitz-colocated"], conversations)
    assert len(begun) > 5
    assert [record.output_tokens for record in result.records] == [r.output_tokens for r in conversations]


def test_loads_take_what_the_planner_predicts_once_it_has_seen_some(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[ScaleRecord] = []
    all_records = SimPlanner.all_records

    def kept(planner: SimPlanner) -> list[ScaleRecord]:
        records[:] = all_records(planner)
        return records

    monkeypatch.setattr(SimPlanner, "all_records", kept)
    conversations = plan_requests(synthesise("azure-conv", seed=0, duration_s=60.0), Shape(context_tokens=8192))
    simulate(replace(setup(), give_back_s=1.0), SYSTEMS["blitz-nolive"], conversations)
    loads = [(r.predicted_loaded_ms, r.trigger_to_loaded_ms) for r in records if r.predicted_loaded_ms is not None]
    assert len(loads) > 4
    for predicted_ms, loaded_ms in loads[2:]:
        assert predicted_ms == pytest.approx(loaded_ms, rel=0.001)


def test_a_trace_may_begin_at_any_time() -> None:
    (first, *_) = requests()
    result = simulate(setup(), SYSTEMS["blitz-nolive"], (replace(first, due_s=0.01),))  # 2 + 0.01 - 0.01 is below 2
    assert figures(result, SLO, SLO).failed == 0


def test_live_scaling_gives_first_tokens_earlier_than_loading_first() -> None:
    def mean_ttft_s(name: str) -> float:
        return figures(result_of(name), SLO, SLO).ttft_mean_s or 0.0

    assert max(mean_ttft_s("blitz"), mean_ttft_s("overlap")) < mean_ttft_s("blitz-nolive")


def test_a_pairs_source_takes_the_queue_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[int]] = {}
    tell = SimGateway.routes_changed

    def listen(gateway: SimGateway, model: str, routes: Iterable[Route]) -> None:
        routes = tuple(routes)
        for route in routes:
            told.setdefault(route.instance_id, []).append(route.max_queued_tokens)
        tell(gateway, model, routes)

    monkeypatch.setattr(SimGateway, "routes_changed", listen)
    simulate(setup(), SYSTEMS["blitz"], requests())
    one = setup().worker.max_queued_tokens
    lent = [said for said in told.values() if 2 * one in said]
    assert lent
    assert all(said[-1] == one for said in lent)  # the pair is over


def test_one_host_copy_in_the_cluster_or_one_for_each_host() -> None:
    num_bytes = setup().model.record.weights_bytes
    assert result_of("blitz").cluster.host_cache_max_bytes == num_bytes
    assert result_of("allcache").cluster.host_cache_max_bytes == 2 * num_bytes
    # Each of eight workers offers its part of the host's memory.
    small = msgspec.structs.replace(known_cluster("b"), host_memory_gib=8 * num_bytes / 2**30 - 1)
    for name in ("allcache", "sllm", "blitz"):
        result = simulate(replace(setup(), cluster=small), SYSTEMS[name], requests()[:20])
        assert result.cluster.host_cache_max_bytes == 0


def test_weights_cross_the_network_only_where_the_system_has_them_do_so() -> None:
    for name in ("sllm", "allcache"):
        sent = result_of(name).cluster.nic_bytes
        assert sent is not None
        assert sent["weights"] == 0
        assert sent["kv"] > 0
    # Where each host has one GPU there is no other way.
    apart = msgspec.structs.replace(
        known_cluster("b"), hosts=16, gpus_per_host=1, gpus_per_domain=1, nics_per_host=1, ssds_per_host=1,
        hosts_per_leaf=16, scale_up_gbps=None,
    )  # fmt: skip
    sent = simulate(replace(setup(), cluster=apart), SYSTEMS["blitz"], requests()).cluster.nic_bytes
    assert sent is not None
    assert sent["weights"] > 0


def test_what_does_not_scale_keeps_its_instances() -> None:
    split = simulate(setup(), SYSTEMS["static-full"], requests(), split=Split(12, 4))
    assert [point.instances for point in split.cluster.instances][-1] == {"decode/serving": 4, "prefill/serving": 12}
    assert split.mean_instances == pytest.approx(16)
    colocated = simulate(setup(), SYSTEMS["static-colocated-half"], requests(), colocated=3)
    assert colocated.mean_instances == pytest.approx(3)
    for result in (split, colocated):
        assert result.cluster.operations == ()
        assert len(result.records) == len(requests())


def test_a_tensor_parallel_instance_counts_all_its_gpus() -> None:
    model = known_model("qwen2.5-72b", "a100")
    few = requests()[:20]
    result = simulate(Setup(cluster=known_cluster("a"), model=model), SYSTEMS["static-full"], few, split=Split(4, 4))
    assert result.mean_instances == pytest.approx(32)


def test_slower_gpus_serve_later() -> None:
    slower = Setup(cluster=known_cluster("b"), model=known_model("llama3-8b", "a100"), compute_scale=1.25)
    alone = plan_requests(Trace("one", (TraceRequest(0.0, 4096, 64),)), Shape())
    fast, slow = (simulate(one, SYSTEMS["static-full"], alone, split=Split(8, 8)) for one in (setup(), slower))
    (a,), (b,) = fast.records, slow.records
    assert a.ttft_s is not None
    assert b.ttft_s is not None
    assert b.ttft_s / a.ttft_s == pytest.approx(1.25, rel=0.03)
    assert sum(b.gaps_s) / sum(a.gaps_s) == pytest.approx(1.25, rel=0.05)


def rows(names: tuple[str, ...]) -> bytes:
    """What a few systems come to in some seconds."""
    few = requests()[:60]
    return msgspec.json.encode([figures(simulate(setup(), SYSTEMS[name], few), SLO, SLO) for name in names])


def test_what_has_not_ended_when_the_simulation_does_is_neither_completed_nor_failed() -> None:
    result = simulate(replace(setup(), patience_s=0.0), SYSTEMS["blitz"], requests())
    row = figures(result, SLO, SLO)
    completed = sum(record.failure is None for record in result.records)
    assert row.unfinished > 0
    assert (row.requests, row.failed) == (completed + row.unfinished, 0)


def test_the_same_command_gives_the_same_bytes_under_another_hash_seed(tmp_path: Path) -> None:
    """With a search of rate and splits, workers that die, and a sweep."""
    command = [
        "--synthetic", "azure-code", "--duration", "8", "--cluster", "b", "--systems", "blitz,static-full,static-half",
        "--scale-rate", "half", "--kill-every", "7", "--what-if", "give-back=0.5,60",
    ]  # fmt: skip
    written = []
    for seed in ("1", "77"):
        file = tmp_path / f"{seed}.json"
        script = "from bench.sim.cli import app; import sys; app(sys.argv[1:])"
        environ = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run(
            [sys.executable, "-c", script, *command, "--json", str(file)], check=True, capture_output=True, env=environ
        )
        written.append(file.read_bytes())
    assert written[0] == written[1]


def test_the_same_run_gives_the_same_bytes_under_another_hash_seed() -> None:
    names = ("blitz", "sllm", "lambdascale")
    script = f"import sys; from tests.bench.sim.test_run import rows; sys.stdout.buffer.write(rows({names!r}))"
    environ = os.environ | {"PYTHONHASHSEED": "1234"}
    other = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, env=environ).stdout
    assert other == rows(names)
