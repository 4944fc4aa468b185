"""What a worker tells about its place: configured, else found, else measured, else by default."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.worker.bootstrap import worker_info
from services.worker.node.facts import DEFAULT_NIC_GBPS, Probes, discover
from services.worker.node.nic_meter import NicMeter
from shared.settings import SettingsError
from tests.services.worker.node.fake_machine import FakeMachine
from tests.services.worker.node.fake_nvml import FakeGpu, FakeNvml
from tests.services.workers import worker_config

GPU = "00000000:3B:00.0"
FOUND: dict[str, object] = {"host": "h1", "nic_gbps": None, "host_link_gbps": None}
"""Changes to the usual configuration, which leave everything to be found."""


@pytest.fixture
def probes(machine: FakeMachine) -> Probes:
    """A machine with one card of 25 Gb/s and two GPUs joined by NVLink."""
    machine.interface("eth0", pci="0000:00/0000:00:03.0", speed="25000")
    machine.route("eth0")
    other = "00000000:3C:00.0"
    nvml = FakeNvml(FakeGpu(GPU, links=(other, other)), FakeGpu(other, links=(GPU, GPU)))
    return Probes(
        roots=machine.roots,
        load_nvml=lambda: nvml,
        measure_copy_gbps=lambda: 111.0,
        measure_ssd_gbps=lambda directory: 22.0,
    )


def test_a_cpu_worker_finds_its_nic_and_measures_its_memory(probes: Probes) -> None:
    facts = discover(worker_config("w", **FOUND), probes)
    assert (facts.nic, facts.nic_gbps) == ("h1/eth0", 25.0)
    assert (facts.how.nic, facts.how.nic_gbps) == ("sysfs", "sysfs")
    assert (facts.host_link_gbps, facts.how.host_link_gbps) == (111.0, "measured")
    assert (facts.scale_up_domain, facts.scale_up_gbps) == ("", None), "its GPUs are no business of a CPU worker"
    assert (facts.ssd_gbps, facts.how.ssd_gbps) == (None, "unknown"), "no scratch directory, no trial"


def test_a_gpu_worker_asks_nvml(probes: Probes) -> None:
    facts = discover(worker_config("w", device="cuda", **FOUND), probes)
    other = discover(worker_config("v", device="cuda", visible_gpu="1", **FOUND), probes)
    assert facts.scale_up_domain == other.scale_up_domain
    assert facts.scale_up_domain.startswith("h1/"), "another host's GPUs have the same PCI addresses"
    assert facts.scale_up_gbps == pytest.approx(2 * 25.781 * 8)
    assert facts.host_link_gbps not in (None, 111.0)
    assert facts.how.scale_up_domain == facts.how.scale_up_gbps == facts.how.host_link_gbps == "nvml"


def test_a_worker_tells_which_gpu_and_which_engines_it_has(probes: Probes) -> None:
    config = worker_config("w", device="cuda", engine="torch", engines=("vllm",), **FOUND)
    facts = discover(config, probes)
    assert facts.gpu is not None
    assert facts.describe().endswith(f", GPU {facts.gpu.shown}")
    info = worker_info(config, facts, SimpleNamespace(address=b"a"), pid=1, incarnation="i")  # type: ignore[arg-type]
    assert (info.gpu_name, info.gpu_capability, info.gpu_memory_bytes) == ("NVIDIA H100 80GB HBM3", "9.0", 80 << 30)
    assert (info.engine, info.engines) == ("torch", ("vllm",))
    on_cpu = discover(worker_config("w", **FOUND), probes)
    assert on_cpu.gpu is None
    assert "GPU" not in on_cpu.describe()


def test_a_gpu_worker_takes_the_rdma_port_near_its_gpu(probes: Probes, machine: FakeMachine) -> None:
    machine.rdma("mlx5_0", pci="0000:10/0000:11:00.0")
    machine.rdma("mlx5_1", pci="0000:3a/0000:3a:01.0/0000:3e:00.0")
    machine.gpu("0000:3a/0000:3a:01.0/0000:3b:00.0")
    facts = discover(worker_config("w", device="cuda", **FOUND), probes)
    assert (facts.nic, facts.nic_gbps) == ("h1/mlx5_1", 100.0)


def test_what_is_configured_wins_and_nothing_is_measured(probes: Probes, machine: FakeMachine, tmp_path: Path) -> None:
    def never(*_: object) -> float:
        raise AssertionError("measured what is configured")

    machine.interface("eth1", pci="0000:00/0000:00:04.0", speed="1000")
    config = worker_config(
        "w",
        host="h1",
        device="cuda",
        leaf="rack-7",
        nic="eth1",
        nic_gbps=0.25,
        scale_up_domain="island",
        scale_up_gbps=1.0,
        host_link_gbps=2.0,
        ssd_gbps=3.0,
        scratch_dir=tmp_path,
    )
    facts = discover(config, dataclasses.replace(probes, measure_copy_gbps=never, measure_ssd_gbps=never))
    assert (facts.leaf, facts.nic, facts.nic_gbps) == ("rack-7", "h1/eth1", 0.25)
    assert (facts.scale_up_domain, facts.scale_up_gbps) == ("island", 1.0)
    assert (facts.host_link_gbps, facts.ssd_gbps) == (2.0, 3.0)
    assert set(dataclasses.asdict(facts.how).values()) == {"configured"}


def test_a_card_of_unknown_speed_has_the_default_one(probes: Probes, machine: FakeMachine) -> None:
    machine.interface("tap0", speed="10")
    machine.route("tap0", metric=-1)
    facts = discover(worker_config("w", **FOUND), probes)
    assert (facts.nic, facts.nic_gbps, facts.how.nic_gbps) == ("h1/tap0", DEFAULT_NIC_GBPS, "default")


def test_the_disk_is_measured_where_a_scratch_directory_is_given(probes: Probes, tmp_path: Path) -> None:
    facts = discover(worker_config("w", scratch_dir=tmp_path, **FOUND), probes)
    assert (facts.ssd_gbps, facts.how.ssd_gbps) == (22.0, "measured")


def test_a_gpu_worker_without_nvml_leaves_its_links_unknown(probes: Probes) -> None:
    facts = discover(worker_config("w", device="cuda", **FOUND), dataclasses.replace(probes, load_nvml=lambda: None))
    assert (facts.scale_up_domain, facts.scale_up_gbps, facts.host_link_gbps) == ("", None, None)
    assert facts.how.host_link_gbps == "unknown"


def test_a_nic_that_does_not_exist_is_refused_with_those_that_do(probes: Probes) -> None:
    with pytest.raises(SettingsError) as refused:
        discover(worker_config("w", nic="eth9", **FOUND), probes)
    assert refused.value.param == "BLITZ_WORKER_NIC"
    assert "eth9" in refused.value.message
    assert "eth0" in refused.value.message


def test_a_machine_with_loopback_alone_reports_no_nic(tmp_path: Path, probes: Probes) -> None:
    empty = FakeMachine(tmp_path / "other")
    facts = discover(worker_config("w", **FOUND), dataclasses.replace(probes, roots=empty.roots))
    assert (facts.nic, facts.device, facts.how.nic) == ("", None, "unknown")


def test_the_nic_that_was_found_can_be_metered(probes: Probes, machine: FakeMachine) -> None:
    facts = discover(worker_config("w", **FOUND), probes)
    meter = NicMeter(facts.device, machine.roots)
    meter.rates(0.0)
    machine.count("eth0", received=0, sent=125_000_000)
    assert meter.rates(1.0) == pytest.approx((1.0, 0.0))


def test_all_facts_are_told_in_one_line(probes: Probes) -> None:
    line = discover(worker_config("w", **FOUND), probes).describe()
    assert "\n" not in line
    for part in ("host h1", "nic h1/eth0 (sysfs)", "nic_gbps 25 (sysfs)", "host_link_gbps 111 (measured)"):
        assert part in line


def test_this_machine_can_be_described() -> None:
    facts = discover(worker_config("w", host="here", nic_gbps=None))
    assert facts.nic_gbps > 0
    assert facts.nic.startswith("here/") or facts.device is None
