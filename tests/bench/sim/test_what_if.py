"""What a sweep goes through."""

from __future__ import annotations

import math

import msgspec
import pytest

from bench.sim.cluster import Cluster, known_cluster
from bench.sim.what_if import MAX_SETTINGS, Grid, resized
from bench.systems import SYSTEMS, System, find
from shared.errors import BadRequest


def systems(*names: str) -> list[System]:
    return [find(name) for name in names]


def test_values_are_those_given_or_fit_the_cluster() -> None:
    a = known_cluster("a")
    assert Grid.of(["hosts=4,1,4", "keep-copies=never,60"], a) == Grid(
        hosts=(1, 4), keep_copies_s=(60.0, math.inf), hosts_given=True
    )
    assert Grid.of(["all"], a) == Grid((1, 2, 4, 8), (25.0, 100.0, 400.0), (60.0, 300.0, math.inf))
    assert Grid.of(["hosts"], resized(a, 1, 100.0)).hosts == (1, 2)
    assert Grid.of(["nic-gbps"], known_cluster("lab")).nic_gbps == (0.0625, 0.25, 1.0)
    assert Grid.of(["give-back=60,0,2.5,60"], a).give_back_s == (0.0, 2.5, 60.0)
    assert Grid.of(["all", "give-back"], a).give_back_s == (1.0, 5.0, 15.0, 30.0, 60.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["racks"], "--what-if racks: it is hosts, nic-gbps, keep-copies, give-back or all"),
        (["hosts="], "'' is no number of hosts"),
        (["hosts=0"], "'0' is no number of hosts"),
        (["hosts=1.5"], "'1.5' is no number of hosts"),
        (["hosts=999999"], "'999999' is no number of hosts"),
        ([f"hosts={'9' * 5000}"], "9' is no number of hosts"),
        (["nic-gbps=0"], "'0' is no positive bandwidth"),
        (["nic-gbps=inf"], "'inf' is no positive bandwidth"),
        (["nic-gbps=never"], "'never' is no positive bandwidth"),
        (["keep-copies=-1"], "'-1' is neither a number of seconds nor 'never'"),
        (["keep-copies=inf"], "'inf' is neither a number of seconds nor 'never'"),
        (["keep-copies=nan"], "'nan' is neither"),
        (["give-back="], "'' is no number of seconds"),
        (["give-back=-1"], "'-1' is no number of seconds"),
        (["give-back=nan"], "'nan' is no number of seconds"),
        (["give-back=inf"], "'inf' is no number of seconds"),
        (["give-back=never"], "'never' is no number of seconds"),
        (["give-back=5", "give-back=15"], "give-back is there already"),
        (["hosts", "all"], "hosts is there already"),
    ],
)
def test_what_is_no_value_is_named(words: list[str], said: str) -> None:
    with pytest.raises(BadRequest, match="--what-if") as raised:
        Grid.of(words, known_cluster("a"))
    assert said in str(raised.value)


def test_copies_are_kept_longer_where_a_system_keeps_them_and_each_setting_is_there_once() -> None:
    found = Grid.of(["keep-copies=60,never"], a := known_cluster("a")).settings(
        a, systems("blitz", "sllm", "sllm-60s"), 1
    )
    assert [(setting.system.name, setting.family, setting.keep_copies) for setting in found] == [
        ("blitz", "blitz", None),
        ("sllm-60s", "sllm", "60"),
        ("sllm-never", "sllm", "never"),
    ]
    assert all(setting.cluster == a for setting in found)
    with pytest.raises(BadRequest, match="of blitz, allcache none keeps copies for a time"):
        Grid.of(["keep-copies"], a).settings(a, systems("blitz", "allcache"), 1)


def test_only_systems_that_scale_give_instances_back() -> None:
    grid = Grid.of(["hosts=2,4", "give-back=0,15"], a := known_cluster("a"))
    found = grid.settings(a, systems("blitz", "static-half"), 1)
    assert [(setting.cluster.hosts, setting.system.name, setting.give_back_s) for setting in found] == [
        (2, "blitz", 0.0), (2, "blitz", 15.0), (2, "static-half", None),
        (4, "blitz", 0.0), (4, "blitz", 15.0), (4, "static-half", None),
    ]  # fmt: skip
    assert [str(setting).partition(": ")[2] for setting in found[:3]] == [
        "2 hosts, NICs of 100 Gbit/s, given back by the rule",
        "2 hosts, NICs of 100 Gbit/s, given back after 15 s",
        "2 hosts, NICs of 100 Gbit/s",
    ]
    with pytest.raises(BadRequest, match="of static-full, static-half none gives instances back"):
        grid.settings(a, systems("static-full", "static-half"), 1)


def test_where_hosts_have_too_few_gpus_for_a_system_it_is_not_tried() -> None:
    lab = known_cluster("lab")
    found = Grid.of(["hosts"], lab).settings(lab, systems("blitz", "blitz-colocated"), 1)
    assert [(str(setting.system.name), setting.cluster.hosts) for setting in found[:3]] == [
        ("blitz-colocated", 1),
        ("blitz", 2),
        ("blitz-colocated", 2),
    ]


def test_hosts_that_were_asked_for_and_cannot_serve_are_named() -> None:
    lab = known_cluster("lab")
    with pytest.raises(BadRequest, match="hosts=1: blitz needs 2 instances"):
        Grid.of(["hosts=1,2"], lab).settings(lab, systems("blitz"), 1)


def test_so_many_settings_and_no_more() -> None:
    a = known_cluster("a")
    hosts = ",".join(map(str, range(1, MAX_SETTINGS + 1)))
    grid = Grid.of([f"hosts={hosts}"], a)
    assert len(grid.settings(a, systems("blitz"), 1)) == MAX_SETTINGS
    with pytest.raises(BadRequest, match=f"400 settings, and at most {MAX_SETTINGS} are tried"):
        grid.settings(a, systems("blitz", "overlap"), 1)
    times = ",".join(map(str, range(MAX_SETTINGS + 1)))
    with pytest.raises(BadRequest, match=f"201 settings, and at most {MAX_SETTINGS} are tried"):
        Grid.of([f"give-back={times}"], a).settings(a, systems("blitz"), 1)


def test_a_cluster_of_another_size_is_one_that_can_be() -> None:
    large = known_cluster("large")
    assert resized(large, large.hosts, large.nic_gbps) == large
    assert resized(large, 40, 25.0) == msgspec.structs.replace(large, hosts=40, nic_gbps=25.0)
    one_leaf = resized(large, 2, 100.0)
    assert (one_leaf.hosts, one_leaf.hosts_per_leaf, one_leaf.oversubscription) == (2, 2, 1.0)
    wider: Cluster = resized(known_cluster("a"), 8, 100.0)
    assert wider.num_leaves == 2


def test_every_system_that_keeps_copies_can_be_swept() -> None:
    a = known_cluster("a")
    for system in SYSTEMS.values():
        if system.copies == "kept":
            assert len(Grid.of(["keep-copies"], a).settings(a, [system], 1)) == 3
