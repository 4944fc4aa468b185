from __future__ import annotations

import pytest

from services.planner.core.timing import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, chunk_bytes
from services.planner.core.worker_chains import WorkerSource, plan_worker_chains
from tests.records import worker

MODEL_BYTES = 128 << 20


def source(worker_id: str, *, busy: bool = False, state: str = "serving", **changes: object) -> WorkerSource:
    return WorkerSource(worker(worker_id, **changes), f"i-{worker_id}", 1, state, busy)  # type: ignore[arg-type]


def test_a_chain_runs_from_the_source_through_all_targets() -> None:
    plan = plan_worker_chains([source("w0")], [worker("w2"), worker("w1")], 2, MODEL_BYTES)
    (chain,) = plan.chains
    assert chain.source is not None
    assert chain.source.worker.worker_id == "w0"
    assert [t.worker_id for t in chain.targets] == ["w1", "w2"]
    assert not plan.left_out


def test_targets_on_the_sources_host_come_first_then_host_by_host() -> None:
    spare = [
        worker("w1", host="b"),
        worker("w2", host="c"),
        worker("w3", host="b"),
        worker("w4", host="a"),
    ]
    plan = plan_worker_chains([source("w0", host="a")], spare, 4, MODEL_BYTES)
    assert [t.host for t in plan.chains[0].targets] == ["a", "b", "b", "c"]


def test_a_source_that_already_sends_is_avoided() -> None:
    plan = plan_worker_chains([source("w0", busy=True), source("w1")], [worker("w2")], 1, MODEL_BYTES)
    assert plan.chains[0].source is not None
    assert plan.chains[0].source.worker.worker_id == "w1"


def test_a_sending_source_serves_when_nothing_is_left_and_the_plan_says_so() -> None:
    plan = plan_worker_chains([source("w0", busy=True)], [worker("w2")], 1, MODEL_BYTES)
    assert plan.chains[0].source is not None
    assert "in use" in " ".join(plan.explain)


def test_a_draining_source_is_the_last_choice() -> None:
    plan = plan_worker_chains([source("w0", state="draining"), source("w1")], [worker("w2")], 1, MODEL_BYTES)
    assert plan.chains[0].source is not None
    assert plan.chains[0].source.worker.worker_id == "w1"


def test_without_any_copy_the_first_target_reads_its_disk() -> None:
    plan = plan_worker_chains([], [worker("w1"), worker("w2")], 2, MODEL_BYTES)
    assert plan.chains[0].source_kind == "disk"
    assert plan.chains[0].source is None
    assert len(plan.chains[0].targets) == 2


def test_more_targets_than_workers_give_a_smaller_plan_that_says_what_it_left_out() -> None:
    plan = plan_worker_chains([source("w0")], [worker("w1")], 3, MODEL_BYTES)
    assert len(plan.chains[0].targets) == 1
    assert plan.left_out == ("2 of 3 instances: only 1 workers are spare",)


def test_no_spare_worker_gives_no_chain() -> None:
    plan = plan_worker_chains([source("w0")], [], 1, MODEL_BYTES)
    assert plan.chains == ()
    assert plan.left_out


@pytest.mark.parametrize("hops", [2, 3, 7, 50])
def test_filling_a_chain_takes_under_two_per_cent_unless_the_floor_forbids(hops: int) -> None:
    chunk = chunk_bytes(MODEL_BYTES, hops)
    assert chunk % MIN_CHUNK_BYTES == 0
    assert MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES
    assert chunk == MIN_CHUNK_BYTES or (hops - 1) * chunk <= 0.02 * MODEL_BYTES


def test_a_single_hop_takes_the_largest_chunk() -> None:
    assert chunk_bytes(MODEL_BYTES, 1) == MAX_CHUNK_BYTES


def test_two_leaves_with_a_copy_each_give_two_chains() -> None:
    spare = [worker(f"w{i}", host=f"h{i}", leaf=f"leaf-{i % 2}") for i in range(2, 6)]
    sources = [source("w0", host="h0", leaf="leaf-0"), source("w1", host="h1", leaf="leaf-1")]
    plan = plan_worker_chains(sources, spare, 4, MODEL_BYTES)
    assert [c.source.worker.worker_id for c in plan.chains if c.source] == ["w0", "w1"]
    assert [[t.worker_id for t in c.targets] for c in plan.chains] == [["w2", "w4"], ["w3", "w5"]]


def test_every_chain_is_a_path_of_single_workers_from_a_copy() -> None:
    spare = [worker(f"t{i}", host=f"h{i % 3}", nic_gbps=10.0) for i in range(9)]
    sources = [source("s0", host="h0", busy=True), source("s1", host="h1", busy=True)]
    plan = plan_worker_chains(sources, spare, 9, MODEL_BYTES)
    assert all(c.source is not None for c in plan.chains)
    assert sorted(t.worker_id for c in plan.chains for t in c.targets) == sorted(w.worker_id for w in spare)
