from __future__ import annotations

import pytest

from services.planner.core.topology import Gpu, Host, Nic, build_topology, topology_of
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


def test_cpu_workers_of_one_host_form_a_domain_and_share_its_nic() -> None:
    topology = topology_of([worker("w0"), worker("w1"), worker("w2", host="b")])
    assert topology.gpus["w0"].domain == topology.gpus["w1"].domain != topology.gpus["w2"].domain
    assert topology.gpus["w0"].nic == topology.gpus["w1"].nic


def test_gpus_of_unknown_domain_stand_alone() -> None:
    topology = topology_of([worker("w0", device="cuda"), worker("w1", device="cuda", scale_up_domain="d")])
    assert topology.gpus["w0"].domain != topology.gpus["w1"].domain
    assert topology.crowded_hosts == {"host-a"}


def test_workers_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadTopology, match=r"leaf-0.*leaf-1"):
        topology_of([worker("w0"), worker("w1", leaf="leaf-1")])
    with pytest.raises(BadTopology, match="ssd_gbps"):
        topology_of([worker("w0", ssd_gbps=0.0)])
