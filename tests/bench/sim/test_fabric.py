"""Which links a transfer passes."""

from __future__ import annotations

import msgspec
import pytest

from bench.sim.cluster import Cluster, known_cluster
from bench.sim.fabric import Fabric
from bench.sim.sharing import Resource
from shared.errors import BadTopology

SMALL = Cluster(
    name="small",
    hosts=4,
    gpus_per_host=4,
    gpus_per_domain=2,
    scale_up_gbps=1600,
    nics_per_host=2,
    nic_gbps=100,
    host_link_gbps=128,
    ssds_per_host=1,
    ssd_gbps=10,
    hosts_per_leaf=2,
    oversubscription=4,
)


def names(path: tuple[Resource, ...]) -> list[str]:
    return [resource.name for resource in path]


def test_the_nearest_link_carries_it() -> None:
    fabric = Fabric(SMALL)
    path = fabric.gpu_to_gpu
    assert names(path("host-0-gpu-0", "host-0-gpu-1")) == ["host-0-gpu-0 scale-up out", "host-0-gpu-1 scale-up in"]
    # Two domains of one host meet in its memory.
    assert names(path("host-0-gpu-1", "host-0-gpu-2")) == ["host-0-gpu-1 host link out", "host-0-gpu-2 host link in"]
    # Two GPUs share a NIC.
    assert names(path("host-0-gpu-1", "host-1-gpu-2")) == ["host-0-nic-0 out", "host-1-nic-1 in"]
    assert names(path("host-1-gpu-3", "host-2-gpu-0")) == [
        "host-1-nic-1 out",
        "leaf-0 out",
        "leaf-1 in",
        "host-2-nic-0 in",
    ]
    assert fabric.uplinks["leaf-0"].out.gbps == 2 * 2 * 100 / 4


def test_memory_and_disk() -> None:
    fabric = Fabric(SMALL)
    assert names(fabric.host_to_gpu("host-0", "host-0-gpu-3")) == ["host-0-gpu-3 host link in"]
    assert names(fabric.host_to_gpu("host-0", "host-1-gpu-3")) == ["host-0-nic-0 out", "host-1-nic-1 in"]
    assert names(fabric.gpu_to_host("host-0-gpu-3", "host-0")) == ["host-0-gpu-3 host link out"]
    assert names(fabric.gpu_to_host("host-0-gpu-3", "host-1")) == ["host-0-nic-1 out", "host-1-nic-0 in"]
    assert names(fabric.host_to_host("host-0", "host-1")) == ["host-0-nic-0 out", "host-1-nic-0 in"]
    assert names(fabric.ssd_to_gpu("host-0-gpu-3")) == ["host-0-ssd-0 read", "host-0-gpu-3 host link in"]
    assert names(fabric.ssd_to_host("host-0-gpu-3")) == ["host-0-ssd-0 read"]


def test_directions_are_different_resources_and_the_same_link_is_the_same_resource() -> None:
    fabric = Fabric(SMALL)
    there, back = fabric.gpu_to_gpu("host-0-gpu-0", "host-3-gpu-0"), fabric.gpu_to_gpu("host-3-gpu-0", "host-0-gpu-0")
    assert not set(there) & set(back)
    assert there[0] is fabric.host_to_host("host-0", "host-1")[0]


def test_uplinks_that_cannot_bind_are_left_out() -> None:
    fabric = Fabric(msgspec.structs.replace(SMALL, oversubscription=1.0))
    assert fabric.uplinks == {}
    assert names(fabric.gpu_to_gpu("host-0-gpu-0", "host-3-gpu-0")) == ["host-0-nic-0 out", "host-3-nic-0 in"]


def test_ids_sort_as_they_count() -> None:
    fabric = Fabric(known_cluster("large"))
    assert list(fabric.gpus) == sorted(fabric.gpus)
    assert list(fabric.hosts) == sorted(fabric.hosts)
    assert list(fabric.uplinks) == sorted(fabric.uplinks)
    assert len(fabric.gpus) == 8000
    assert fabric.gpus["host-999-gpu-7"].nic.leaf == "leaf-62"


def test_names_that_are_not_there_are_refused() -> None:
    fabric = Fabric(SMALL)
    with pytest.raises(BadTopology, match="no GPU 'host-9-gpu-0'"):
        fabric.gpu_to_gpu("host-0-gpu-0", "host-9-gpu-0")
    with pytest.raises(BadTopology, match="no host 'host-9'"):
        fabric.host_to_gpu("host-9", "host-0-gpu-0")
    with pytest.raises(BadTopology, match="its own bytes"):
        fabric.gpu_to_gpu("host-0-gpu-0", "host-0-gpu-0")
    with pytest.raises(BadTopology, match="its own bytes"):
        fabric.host_to_host("host-0", "host-0")
