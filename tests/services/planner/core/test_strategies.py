from __future__ import annotations

from typing import get_args

import pytest

from services.planner.config import PlannerConfig
from services.planner.core.strategies import STRATEGIES, Strategy, plan_by
from services.planner.core.timing import MAX_CHUNK_BYTES
from services.planner.core.worker_chains import WorkerSource, plan_worker_chains
from shared.settings import SettingsError
from tests.records import worker

MODEL_BYTES = 128 << 20
SPARE = [worker("w3"), worker("w1"), worker("w2")]


def source(worker_id: str, *, state: str = "serving", nic_gbps: float = 10.0) -> WorkerSource:
    return WorkerSource(worker(worker_id, nic_gbps=nic_gbps), f"i-{worker_id}", 1, state, False)  # type: ignore[arg-type]


def test_a_star_sends_to_every_target_from_one_source() -> None:
    plan = plan_by("star", [source("w9"), source("w0")], SPARE, 3, MODEL_BYTES)
    assert [[t.worker_id for t in chain.targets] for chain in plan.chains] == [["w1"], ["w2"], ["w3"]]
    assert {chain.source.worker.worker_id for chain in plan.chains if chain.source} == {"w0"}
    assert all(chain.source_kind == "gpu" for chain in plan.chains)
    assert not plan.left_out


def test_a_stars_targets_share_the_sources_egress() -> None:
    one, three = (plan_by("star", [source("w0")], SPARE, n, MODEL_BYTES) for n in (1, 3))
    assert three.chains[0].predicted_finish_s == pytest.approx(3 * one.chains[0].predicted_finish_s)


def test_a_star_takes_the_widest_source_that_stays() -> None:
    sources = [source("w0"), source("w8", nic_gbps=25.0), source("w9", nic_gbps=100.0, state="draining")]
    plan = plan_by("star", sources, SPARE, 1, MODEL_BYTES)
    assert plan.chains[0].source is not None
    assert plan.chains[0].source.worker.worker_id == "w8"


def test_every_target_reads_the_checkpoint_itself() -> None:
    plan = plan_by("disk", [source("w0")], SPARE, 3, MODEL_BYTES)
    assert [[t.worker_id for t in chain.targets] for chain in plan.chains] == [["w1"], ["w2"], ["w3"]]
    assert all(chain.source is None and chain.source_kind == "disk" for chain in plan.chains)
    assert all(chain.chunk_bytes == MAX_CHUNK_BYTES for chain in plan.chains)


def test_a_star_without_a_copy_to_send_reads_the_disk() -> None:
    assert plan_by("star", [], SPARE, 2, MODEL_BYTES) == plan_by("disk", [], SPARE, 2, MODEL_BYTES)


def test_chain_is_the_planners_own() -> None:
    assert plan_by("chain", [source("w0")], SPARE, 3, MODEL_BYTES) == plan_worker_chains(
        [source("w0")], SPARE, 3, MODEL_BYTES
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_too_few_spare_workers_give_a_smaller_plan_that_says_so(strategy: Strategy) -> None:
    plan = plan_by(strategy, [source("w0")], SPARE, 5, MODEL_BYTES)
    assert sum(len(chain.targets) for chain in plan.chains) == 3
    assert "2 of 5" in plan.left_out[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_spare_workers_there_is_no_chain(strategy: Strategy) -> None:
    plan = plan_by(strategy, [source("w0")], [], 1, MODEL_BYTES)
    assert not plan.chains
    assert plan.left_out


def test_every_strategy_can_be_configured() -> None:
    assert get_args(Strategy) == STRATEGIES
    assert PlannerConfig.from_env({}).strategy == "chain"
    for strategy in STRATEGIES:
        assert PlannerConfig.from_env({"BLITZ_PLANNER_STRATEGY": strategy}).strategy == strategy


def test_an_unknown_strategy_is_refused_with_its_name() -> None:
    with pytest.raises(SettingsError, match=r"BLITZ_PLANNER_STRATEGY.*ring"):
        PlannerConfig.from_env({"BLITZ_PLANNER_STRATEGY": "ring"})
