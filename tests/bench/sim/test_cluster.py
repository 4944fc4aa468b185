"""Cluster files: those that come along, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.sim.cluster import Cluster, known_cluster, known_clusters, read_cluster
from shared.errors import BadTopology

GOOD = {
    "name": '"mine"',
    "hosts": "4",
    "gpus_per_host": "8",
    "gpus_per_domain": "4",
    "scale_up_gbps": "1600",
    "nics_per_host": "2",
    "nic_gbps": "200",
    "host_link_gbps": "128.0",
    "ssds_per_host": "1",
    "ssd_gbps": "10",
    "hosts_per_leaf": "3",
    "oversubscription": "2",
}


def read(folder: Path, **changed: str | None) -> Cluster:
    file = folder / "cluster.toml"
    lines = [f"{key} = {value}" for key, value in (GOOD | changed).items() if value is not None]
    file.write_text("\n".join(lines), encoding="utf-8")
    return read_cluster(file)


def test_a_file_says_a_cluster(tmp_path: Path) -> None:
    cluster = read(tmp_path)
    assert (cluster.name, cluster.num_gpus, cluster.num_leaves) == ("mine", 32, 2)
    assert cluster.uplink_gbps == 3 * 2 * 200 / 2


def test_the_clusters_of_the_paper() -> None:
    assert known_clusters() == ("a", "b", "lab", "large")
    a, b, lab, large = [known_cluster(name) for name in known_clusters()]
    assert (a.hosts, a.gpus_per_host, b.hosts, b.gpus_per_host) == (4, 8, 2, 8)
    assert (a.scale_up_gbps, b.scale_up_gbps) == (1600, 256)
    for cluster in (a, b, large):
        assert (cluster.nic_gbps, cluster.host_link_gbps, cluster.ssd_gbps) == (100, 128, 10)
    assert (large.num_gpus, large.num_leaves) == (8000, 63)
    assert (lab.hosts, lab.nic_gbps) == (8, 0.25)
    assert (lab.host_link_gbps / lab.nic_gbps, lab.ssd_gbps / lab.nic_gbps) == (1.28, 0.1)


@pytest.mark.parametrize(
    ("changed", "param", "said"),
    [
        ({"hosts": "0"}, "hosts", "hosts is 0"),
        ({"gpu_memory_gib": "1e300"}, "gpu_memory_gib", "no size of a memory"),
        ({"hosts": "9" * 30}, "hosts", "at most 1,000,000 are simulated"),
        ({"nic_gbps": "-1"}, "nic_gbps", "nic_gbps is -1"),
        ({"ssd_gbps": "nan"}, "ssd_gbps", "ssd_gbps is nan"),
        ({"host_link_gbps": "inf"}, "host_link_gbps", "host_link_gbps is inf"),
        ({"nics_per_host": "3"}, "nics_per_host", "8 GPUs of a host cannot be shared out evenly: nics_per_host is 3"),
        ({"gpus_per_domain": "16"}, "gpus_per_domain", "gpus_per_domain is 16"),
        ({"scale_up_gbps": None}, "scale_up_gbps", "gpus_per_domain is 4, and there is no scale_up_gbps"),
        ({"gpus_per_domain": "1"}, "scale_up_gbps", "gpus_per_domain is 1, and there is a scale_up_gbps of 1600"),
        ({"hosts_per_leaf": "5"}, "hosts_per_leaf", "a leaf of 5 hosts, but 4 in all"),
        ({"oversubscription": "0.5"}, "oversubscription", "oversubscription is 0.5"),
        ({"hosts_per_leaf": "4"}, "oversubscription", "one leaf has all hosts"),
        ({"nic_gbps": '"fast"'}, "cluster", "nic_gbps"),
        ({"hosts": "4.5"}, "cluster", "hosts"),
        ({"hosts": None}, "cluster", "hosts"),
        ({"spines": "2"}, "cluster", "spines"),
        ({"hosts": "= ="}, "cluster", "cluster.toml"),
    ],
)
def test_what_contradicts_itself_is_named(
    tmp_path: Path, changed: dict[str, str | None], param: str, said: str
) -> None:
    with pytest.raises(BadTopology) as refused:
        read(tmp_path, **changed)
    assert said in refused.value.message
    assert "cluster.toml" in refused.value.message
    assert refused.value.param == param


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BadTopology, match=r"cluster\.toml"):
        read_cluster(file)


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(BadTopology, match=r"no cluster '../a': there are a, b, lab, large"):
        known_cluster("../a")
