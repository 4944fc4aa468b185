from __future__ import annotations

from typing import get_args

import pytest

from services.planner.config import PlannerConfig
from services.planner.core.multicast.baselines import STRATEGIES, Strategy, plan_by
from services.planner.core.multicast.chains import plan_worker_chains
from services.planner.core.multicast.timing import MAX_CHUNK_BYTES
from shared.settings import SettingsError
from tests.services.planner.core.multicast.clusters import MODEL_BYTES, cluster, paths, record

SPARE = (record("w3"), record("w1"), record("w2"))
COPY = record("w0", "serving")


def test_a_star_sends_to_every_target_on_its_own() -> None:
    plan = plan_by("star", cluster(COPY, *SPARE), 3, MODEL_BYTES)
    assert paths(plan.chains) == [[("gpu", "w0", "w1")], [("gpu", "w0", "w2")], [("gpu", "w0", "w3")]]
    assert not plan.left_out


def test_a_stars_targets_are_dealt_out_to_the_copies() -> None:
    plan = plan_by("star", cluster(record("w9", "serving"), COPY, *SPARE), 3, MODEL_BYTES)
    assert paths(plan.chains) == [[("gpu", "w0", "w1")], [("gpu", "w0", "w3")], [("gpu", "w9", "w2")]]
    assert plan.predicted_s["w1"] == pytest.approx(2 * plan.predicted_s["w2"])
    assert len(plan_by("star", cluster(record("w9", "serving"), COPY, *SPARE), 1, MODEL_BYTES).targets) == 1


def test_a_stars_targets_share_the_sources_egress() -> None:
    one, three = (plan_by("star", cluster(COPY, *SPARE), n, MODEL_BYTES).predicted_s["w1"] for n in (1, 3))
    assert three == pytest.approx(3 * one)


def test_a_star_takes_the_widest_source_that_stays() -> None:
    sources = (record("w8", "serving", nic_gbps=25.0), record("w9", "draining", nic_gbps=100.0))
    assert plan_by("star", cluster(COPY, *sources, *SPARE), 1, MODEL_BYTES).links == (("w8", "w1"),)


def test_a_star_takes_a_host_copy_where_no_gpu_has_one() -> None:
    holder = record("w9", host_copy="ready", nic_gbps=100.0, arena_bytes=0)
    plan = plan_by("star", cluster(holder, *SPARE), 2, MODEL_BYTES)
    assert paths(plan.chains) == [[("host", "w9", "w1")], [("host", "w9", "w2")]]
    assert plan_by("star", cluster(holder, COPY, *SPARE), 1, MODEL_BYTES).links == (("w0", "w1"),)


def test_every_target_reads_the_checkpoint_itself() -> None:
    plan = plan_by("disk", cluster(COPY, *SPARE), 3, MODEL_BYTES)
    assert paths(plan.chains) == [[("disk", "", "w1")], [("disk", "", "w2")], [("disk", "", "w3")]]
    assert all(chain.chunk_bytes == MAX_CHUNK_BYTES for chain in plan.chains)
    assert plan.fallbacks == ()


def test_a_star_without_a_copy_to_send_reads_the_disk() -> None:
    assert plan_by("star", cluster(*SPARE), 2, MODEL_BYTES) == plan_by("disk", cluster(*SPARE), 2, MODEL_BYTES)


def test_a_finish_from_disk_is_predicted_where_its_speed_is_known() -> None:
    plan = plan_by("disk", cluster(record("w0"), record("w1", ssd_gbps=10.0)), 2, MODEL_BYTES)
    assert plan.predicted_s == {"w0": 0.0, "w1": pytest.approx(MODEL_BYTES * 8e-10)}


def test_targets_read_the_copy_that_their_host_keeps_and_others_the_disk() -> None:
    keeper = record("w9", "serving", host="a", host_copy="ready", cached=True)
    found = cluster(keeper, record("w1", host="b", nic_gbps=100.0), record("w2", host="a"), record("w3", host="c"))
    plan = plan_by("host-cache", found, 3, MODEL_BYTES)
    assert paths(plan.chains) == [[("host", "w9", "w2")], [("disk", "", "w1")], [("disk", "", "w3")]]
    assert plan.keepers == ("w1", "w3")
    assert "the host of w2" in plan.explain[0]
    assert "w1, w3" in plan.explain[1]


def test_hosts_with_a_kept_copy_are_chosen_first() -> None:
    keeper = record("w9", "serving", host="a", host_copy="ready")
    found = cluster(keeper, record("w1", host="b", nic_gbps=100.0), record("w2", host="a"))
    assert plan_by("host-cache", found, 1, MODEL_BYTES).targets == ("w2",)


def test_among_the_workers_of_a_host_the_one_that_holds_the_copy_comes_first() -> None:
    spare = [record("w1", host="b", nic_gbps=100.0), record("w2", host="a")]
    found = cluster(*spare, record("w3", host="a", host_copy="ready", cached=True))
    plan = plan_by("host-cache", found, 2, MODEL_BYTES)
    assert paths(plan.chains) == [[("host", "w3", "w3")], [("host", "w3", "w2")]]
    assert plan.keepers == ()


def test_of_the_targets_of_a_host_without_a_copy_one_keeps_one() -> None:
    found = cluster(record("w1", host="a"), record("w2", host="a"), record("w3", host="b"))
    assert plan_by("host-cache", found, 3, MODEL_BYTES).keepers == ("w1", "w3")


def test_a_kept_copy_of_the_targets_own_process_is_its_source() -> None:
    found = cluster(record("w1", host="a", host_copy="ready", arena_bytes=0), record("w2", host="a", host_copy="ready"))
    assert paths(plan_by("host-cache", found, 1, MODEL_BYTES).chains) == [[("host", "w2", "w2")]]


def test_a_kept_copy_that_is_not_ready_is_a_miss() -> None:
    found = cluster(record("w1", host_copy="loading"), record("w2", host_copy="retired"))
    assert [p[0][0] for p in paths(plan_by("host-cache", found, 2, MODEL_BYTES).chains)] == ["disk", "disk"]


def test_chain_is_the_planners_own() -> None:
    found = cluster(COPY, *SPARE)
    assert plan_by("chain", found, 3, MODEL_BYTES) == plan_worker_chains(found, 3, MODEL_BYTES)
    assert not plan_by("chain", found, 3, MODEL_BYTES).keepers


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_too_few_spare_workers_give_a_smaller_plan_that_says_so(strategy: Strategy) -> None:
    plan = plan_by(strategy, cluster(COPY, record("w4", arena_bytes=0), *SPARE), 5, MODEL_BYTES)
    assert len(plan.targets) == 3
    assert "2 of 5" in plan.left_out[0]
    assert "1 spare worker's arena" in plan.left_out[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_spare_workers_there_is_no_chain(strategy: Strategy) -> None:
    plan = plan_by(strategy, cluster(COPY), 1, MODEL_BYTES)
    assert not plan.chains
    assert plan.left_out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_wrong_facts_of_one_worker_stop_no_strategy(strategy: Strategy) -> None:
    plan = plan_by(strategy, cluster(COPY, record("w4", nic_gbps=0.0), *SPARE), 3, MODEL_BYTES)
    assert sorted(plan.targets) == ["w1", "w2", "w3"]
    assert "w4" in plan.left_out[0]


def test_every_strategy_can_be_configured() -> None:
    assert get_args(Strategy) == STRATEGIES
    assert PlannerConfig.from_env({}).plans.strategy == "chain"
    for strategy in STRATEGIES:
        assert PlannerConfig.from_env({"BLITZ_PLANNER_STRATEGY": strategy}).plans.strategy == strategy


def test_an_unknown_strategy_is_refused_with_its_name() -> None:
    with pytest.raises(SettingsError, match=r"BLITZ_PLANNER_STRATEGY.*ring"):
        PlannerConfig.from_env({"BLITZ_PLANNER_STRATEGY": "ring"})


def test_knowing_flows_can_be_configured() -> None:
    default = PlannerConfig.from_env({})
    assert (default.plans.knows_flows, default.plans.busy_nic_share) == (True, 0.1)
    naive = PlannerConfig.from_env({"BLITZ_PLANNER_KNOWS_FLOWS": "false", "BLITZ_PLANNER_BUSY_NIC_SHARE": "0.5"})
    assert (naive.plans.knows_flows, naive.plans.busy_nic_share) == (False, 0.5)
    with pytest.raises(SettingsError, match="BLITZ_PLANNER_BUSY_NIC_SHARE"):
        PlannerConfig.from_env({"BLITZ_PLANNER_BUSY_NIC_SHARE": "1.5"})
