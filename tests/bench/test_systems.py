"""The systems that are compared, as settings of the services."""

from __future__ import annotations

import math

import pytest

from bench.systems import ABLATION, SYSTEMS, NotInServices, System, UnknownSystem, find, give_back_s, named
from services.monitor.config import MonitorConfig
from services.planner.config import PlannerConfig
from services.planner.core.rounds.settings import PlanSettings
from services.pool.config import PoolConfig
from shared.errors import BadRequest

IN_SERVICES = [system for system in SYSTEMS.values() if not system.simulated_only]


def _planner(system: System) -> PlanSettings:
    return PlannerConfig.from_env(system.environ()).plans


@pytest.mark.parametrize("system", IN_SERVICES, ids=lambda s: s.name)
def test_the_planner_reads_what_the_table_says(system: System) -> None:
    plans = _planner(system)
    read = plans.strategy, plans.live.choice, plans.live.policy, plans.mutation, plans.advise
    assert read == (system.strategy, system.live, system.live_policy, system.mutation, not system.scales)


@pytest.mark.parametrize("system", [*IN_SERVICES, SYSTEMS["sllm"].keeping(math.inf)], ids=lambda s: s.name)
def test_the_pool_reads_what_the_table_says(system: System) -> None:
    pool = PoolConfig.from_env(system.environ()).pool
    assert (pool.copies, pool.keep_copies_s) == (system.copies, system.keep_copies_s)


def test_all_have_the_same_give_back_window() -> None:
    assert give_back_s(60.0, 1.5) == 60.0
    window_s = give_back_s(0.0, 1.5)
    for system in IN_SERVICES:
        assert MonitorConfig.from_env(system.environ(give_back_s=window_s)).policy.down_window_s == window_s == 3.0


def test_blitz_is_what_the_services_do_by_themselves() -> None:
    environ = SYSTEMS["blitz"].environ()
    assert _planner(SYSTEMS["blitz"]) == PlannerConfig.from_env({}).plans
    assert PoolConfig.from_env(environ).pool == PoolConfig.from_env({}).pool
    assert MonitorConfig.from_env(environ) == MonitorConfig.from_env({})


def test_an_ablation_step_changes_one_thing_each() -> None:
    steps = [SYSTEMS[name] for name in ABLATION]
    assert [s.strategy for s in steps] == ["host-cache", "star", "chain", "chain"]
    assert [s.live for s in steps] == ["never", "never", "never", "auto"]
    assert [s.mutation for s in steps] == [False, False, False, True]


def test_half_is_the_average_number_rounded_to_the_nearest() -> None:
    half = SYSTEMS["static-half"]
    assert [half.num_instances(8, mean) for mean in (0.2, 3.49, 3.5, 4.0, 9.0)] == [2, 3, 4, 4, 8]
    assert SYSTEMS["static-colocated-half"].num_instances(8, 0.2) == 1
    assert SYSTEMS["static-full"].num_instances(8) == SYSTEMS["blitz"].num_instances(8) == 8
    with pytest.raises(BadRequest, match="average"):
        half.num_instances(8)
    with pytest.raises(BadRequest, match="needs 2"):
        half.num_instances(1, 1.0)


def test_every_split_has_both_roles() -> None:
    assert SYSTEMS["static-full"].splits(4) == ((1, 3), (2, 2), (3, 1))
    assert SYSTEMS["static-colocated-full"].splits(4) == ()


def test_a_time_to_keep_copies_is_part_of_the_name() -> None:
    minute, always = find("sllm-60s"), find("sllm-never")
    assert (minute.name, minute.keep_copies_s) == ("sllm-60s", 60.0)
    assert (always.name, always.keep_copies_s) == ("sllm-never", math.inf)
    assert minute.keeping(math.inf) == always == SYSTEMS["sllm"].keeping(math.inf)
    assert find("sllm-0.5s").keep_copies_s == 0.5
    assert always.environ()["BLITZ_POOL_KEEP_COPIES_S"] == "never"


def test_systems_are_named_once_each_in_their_order() -> None:
    assert [system.name for system in named("sllm-60s, blitz,,sllm-60.0s,blitz")] == ["sllm-60s", "blitz"]
    assert [system.name for system in named("blitz,allcache", ablation=True)] == [
        "blitz", "allcache", "sllm", "blitz-star", "blitz-nolive",
    ]  # fmt: skip


@pytest.mark.parametrize("names", ["", ",,", " , "])
def test_a_list_without_a_system_is_refused(names: str) -> None:
    with pytest.raises(BadRequest, match="name a system: blitz, "):
        named(names, ablation=True)


@pytest.mark.parametrize("names", ["sllm,sllm-300s", "sllm-300s,blitz,sllm", "lambdascale,lambdascale-300s"])
def test_two_names_of_one_system_are_refused(names: str) -> None:
    with pytest.raises(BadRequest, match="are the same system: name one of them"):
        named(names)


@pytest.mark.parametrize("name", ["", "blitzz", "sllm-", "sllm-60", "sllm--1s", "blitz-60s", "allcache-never"])
def test_an_unknown_system_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(UnknownSystem) as refused:
        find(name)
    assert all(known in refused.value.message for known in SYSTEMS)
    assert repr(name) in refused.value.message


def test_what_is_simulated_only_has_no_environment() -> None:
    with pytest.raises(NotInServices, match="lambdascale"):
        SYSTEMS["lambdascale"].environ()
