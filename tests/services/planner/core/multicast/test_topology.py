from __future__ import annotations

import re
from dataclasses import replace

import pytest

from services.planner.core.multicast.topology import (
    Gpu,
    Host,
    Nic,
    Topologies,
    build_topology,
    topology_of,
    with_copy_holders,
)
from shared.errors import BadTopology
from tests.records import worker

N0 = Nic("n0", "x", 100.0)


@pytest.mark.parametrize(
    "gpus",
    [
        [Gpu("g", "a", "d", N0), Gpu("g", "a", "d", N0)],
        [Gpu("g", "a", "d", N0), Gpu("h", "a", "d", Nic("n0", "y", 100.0))],
        [Gpu("g", "a", "d", N0), Gpu("h", "a", "d", Nic("n0", "x", 50.0))],
        [Gpu("g", "a", "d", N0), Gpu("h", "b", "e", N0)],
        [Gpu("g", "a", "d", N0), Gpu("h", "b", "d", Nic("n1", "x", 100.0))],
        [Gpu("g", "a", "d", Nic("n0", "", 100.0))],
        [Gpu("g", "a", "d", Nic("n0", "x", 0.0))],
        [Gpu("g", "a", "d", Nic("n0", "x", -1.0))],
        [Gpu("g", "a", "d", Nic("n0", "x", float("nan")))],
        [Gpu("g", "a", "d", N0, scale_up_gbps=0.0)],
        [Gpu("g", "a", "d", N0, host_link_gbps=-1.0)],
        [Gpu("", "a", "d", N0)],
    ],
)
def test_contradictions_are_refused(gpus: list[Gpu]) -> None:
    with pytest.raises(BadTopology):
        build_topology(gpus)


def test_a_host_given_twice_or_with_no_disk_bandwidth_is_refused() -> None:
    with pytest.raises(BadTopology):
        build_topology([], [Host("a", N0), Host("a", N0)])
    with pytest.raises(BadTopology):
        build_topology([], [Host("a", N0, ssd_gbps=0.0)])


def test_a_domain_may_span_hosts_where_that_is_allowed() -> None:
    gpus = [Gpu("g", "a", "d", N0), Gpu("h", "b", "d", Nic("n1", "x", 100.0))]
    assert len(build_topology(gpus, multi_host_domains=True).gpus) == 2


def test_the_slowest_member_of_a_domain_counts() -> None:
    gpus = [Gpu("g", "a", "d", N0, scale_up_gbps=900.0), Gpu("h", "a", "d", N0, scale_up_gbps=600.0)]
    assert build_topology(gpus).scale_up_gbps == {"d": 600.0}


def test_workers_of_one_host_share_its_nic_and_stand_alone() -> None:
    topology = topology_of([worker("w0"), worker("w1"), worker("w2", host="b")])
    assert len({topology.gpus[name].domain for name in ("w0", "w1", "w2")}) == 3
    assert topology.gpus["w0"].nic == topology.gpus["w1"].nic
    assert topology.crowded_hosts == {"host-a"}, "they may forward to each other over its memory"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_workers_that_report_a_domain_form_a_group(device: str) -> None:
    joined = [worker(f"w{i}", device=device, scale_up_domain="d") for i in range(2)]
    topology = topology_of([*joined, worker("w2", device=device)])
    assert topology.gpus["w0"].domain == topology.gpus["w1"].domain != topology.gpus["w2"].domain


def test_nics_of_different_hosts_may_have_the_same_name() -> None:
    found = topology_of([worker("w0", nic="eth0"), worker("w1", nic="eth0", host="b", leaf="leaf-1", nic_gbps=25.0)])
    assert found.refused == {}
    assert found.gpus["w0"].nic != found.gpus["w1"].nic


def test_host_copies_leave_by_the_nic_of_their_holder() -> None:
    workers = [worker("w0", nic="eth0"), worker("w1", nic="eth1"), worker("w2", nic="eth2")]
    topology = with_copy_holders(topology_of(workers), workers, {"w1", "w2"})
    assert topology.hosts["host-a"].nic == topology.gpus["w1"].nic


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"leaf": "leaf-1"}, r"leaf-0.*leaf-1"),
        ({"nic_gbps": 20.0}, "10 and 20"),
        ({"nic_gbps": 0.0, "nic": "own"}, "nic_gbps=0.0"),
        ({"nic_gbps": float("nan"), "nic": "own"}, "nic_gbps=nan"),
        ({"host_link_gbps": -1.0}, "host_link_gbps"),
        ({"scale_up_gbps": 0.0}, "scale_up_gbps"),
        ({"ssd_gbps": 0.0}, "ssd_gbps"),
        ({"host": "b", "scale_up_domain": "d"}, r"host-a.*'b'"),
        ({"leaf": "", "nic": "own"}, "no leaf"),
        ({"host": ""}, "no host"),
    ],
)
def test_a_worker_that_contradicts_others_or_itself_is_left_out_alone(changes: dict[str, object], why: str) -> None:
    workers = [worker("w2"), worker("w1", **changes), worker("w0", scale_up_domain="d")]
    found = topology_of(workers)
    assert list(found.gpus) == ["w0", "w2"]
    assert list(found.refused) == ["w1"]
    assert re.search(why, found.refused["w1"])
    without = topology_of([w for w in workers if w.worker_id != "w1"])
    assert replace(found, refused={}) == without, "what is refused leaves no trace"


def test_of_two_that_contradict_each_other_the_first_by_id_counts() -> None:
    one, other = worker("w0", leaf="leaf-1"), worker("w1")
    for workers in ([one, other], [other, one]):
        assert list(topology_of(workers).refused) == ["w1"]


def test_the_topology_of_the_same_workers_is_the_same_until_one_is_another() -> None:
    topologies = Topologies()
    workers = [worker("w0"), worker("w1", host="b")]
    first = topologies.of(workers)
    assert first == topology_of(workers)
    assert topologies.of([worker("w0"), worker("w1", host="b")]) is first
    for others in ([*workers, worker("w2")], workers[:1], [worker("w0", nic_gbps=25.0), workers[1]], workers):
        assert topologies.of(others) == topology_of(others)
