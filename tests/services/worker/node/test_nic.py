"""Which NIC a worker uses, and how fast it is."""

from __future__ import annotations

import pytest

from services.worker.node.nic import LocalNic, Roots, find_nic, named_nic, pci_address
from tests.services.worker.node.fake_machine import FakeMachine

CARD = "0000:00/0000:00:03.0"


def found(machine: FakeMachine, gpu_bus_id: str = "") -> LocalNic:
    nic = find_nic(machine.roots, gpu_bus_id=gpu_bus_id)
    assert nic is not None
    return nic


def test_a_machine_with_loopback_alone_has_no_nic(machine: FakeMachine) -> None:
    assert find_nic(machine.roots) is None


def test_traffic_leaves_by_the_default_route_of_the_lowest_metric(machine: FakeMachine) -> None:
    for name in ("eth0", "eth1", "eth2"):
        machine.interface(name, pci=f"0000:00/{name}", speed="25000")
    machine.route("eth0", destination="0000000A", mask="000000FF")
    machine.route("eth1", metric=600)
    machine.route("eth2", metric=100)
    assert found(machine) == LocalNic("eth2", "interface", speed_gbps=25.0)


def test_a_host_without_ipv4_goes_by_its_ipv6_default_route(machine: FakeMachine) -> None:
    machine.interface("eth0")
    machine.interface("eth1")
    machine.ipv6_default_route("lo", metric="00000001")
    machine.ipv6_default_route("eth1")
    assert found(machine).name == "eth1"


def test_a_closed_network_uses_the_interface_that_has_a_route(machine: FakeMachine) -> None:
    machine.interface("ifb0")
    machine.interface("w3")
    machine.route("w3", destination="0000630A", mask="00FFFFFF")
    assert found(machine).name == "w3"


def test_without_any_route_the_first_interface_that_is_up_is_used(machine: FakeMachine) -> None:
    machine.interface("ifb0", state="down")
    machine.interface("eth0")
    assert found(machine).name == "eth0"


def test_a_namespace_without_its_own_sysfs_still_has_its_interface(machine: FakeMachine) -> None:
    machine.interface("eth0", pci=CARD, speed="1000")
    machine.lose_sysfs()
    assert found(machine) == LocalNic("eth0", "interface", speed_gbps=None)


@pytest.mark.parametrize("speed", ["-1", "0", "", "garbage"])
def test_a_card_whose_speed_the_kernel_does_not_know_has_none(machine: FakeMachine, speed: str) -> None:
    machine.interface("eth0", pci=CARD, speed=speed)
    assert found(machine).speed_gbps is None


def test_the_speed_of_a_veth_pair_is_not_believed(machine: FakeMachine) -> None:
    machine.interface("eth0", speed="10000")
    assert found(machine).speed_gbps is None


def test_a_vlan_is_as_fast_as_the_card_below_it(machine: FakeMachine) -> None:
    machine.interface("eth0", pci=CARD, speed="40000")
    machine.interface("eth0.7", speed="40000")
    machine.put_on_top("eth0.7", "eth0")
    machine.route("eth0.7")
    assert found(machine) == LocalNic("eth0.7", "interface", speed_gbps=40.0)


def test_a_bond_is_as_fast_as_its_cards_together(machine: FakeMachine) -> None:
    machine.interface("bond0", speed="50000", kind="bonding")
    for name in ("eth0", "eth1"):
        machine.interface(name, pci=f"0000:00/{name}", speed="25000")
        machine.put_on_top("bond0", name)
    assert found(machine) == LocalNic("bond0", "interface", speed_gbps=50.0)


def test_a_bridge_is_as_fast_as_its_real_card(machine: FakeMachine) -> None:
    machine.interface("br0", speed="10000", kind="bridge")
    machine.interface("eth0", pci=CARD, speed="1000")
    machine.interface("veth7", speed="10000")
    machine.put_on_top("br0", "eth0")
    machine.put_on_top("br0", "veth7")
    assert found(machine) == LocalNic("br0", "interface", speed_gbps=1.0)


def test_an_active_rdma_port_is_preferred(machine: FakeMachine) -> None:
    machine.interface("eth0", pci=CARD, speed="10000")
    machine.route("eth0")
    machine.rdma("mlx5_0", state="1: DOWN")
    machine.rdma("mlx5_1", rate="200 Gb/sec (4X HDR)", pci="0000:00/0000:02:00.0")
    assert found(machine) == LocalNic("mlx5_1", "rdma", speed_gbps=200.0)


def test_an_rdma_device_that_the_container_was_not_given_is_not_used(machine: FakeMachine) -> None:
    machine.interface("eth0", pci=CARD, speed="10000")
    machine.rdma("mlx5_0", can_open=False)
    assert found(machine).name == "eth0"
    assert named_nic(machine.roots, "mlx5_0") is None


def test_the_second_port_of_an_rdma_device_has_a_name_of_its_own(machine: FakeMachine) -> None:
    machine.rdma("mlx5_0", port=1, state="1: DOWN")
    machine.rdma("mlx5_0", port=2, rate="2.5 Gb/sec (1X SDR)")
    nic = found(machine)
    assert nic == LocalNic("mlx5_0:2", "rdma", 2, 2.5)
    assert nic.device == "mlx5_0"


def test_a_gpu_uses_the_rdma_device_behind_its_own_pci_switch(machine: FakeMachine) -> None:
    machine.rdma("mlx5_0", pci="0000:00/0000:00:01.0/0000:01:00.0")
    machine.rdma("mlx5_1", pci="0000:3a/0000:3a:00.0/0000:3b:02.0/0000:3c:00.0")
    machine.rdma("mlx5_2", pci="0000:3a/0000:3a:00.0/0000:3b:04.0/0000:3e:00.0")
    machine.gpu("0000:3a/0000:3a:00.0/0000:3b:04.0/0000:3d:00.0")
    assert found(machine, gpu_bus_id="00000000:3D:00.0").name == "mlx5_2"
    assert found(machine).name == "mlx5_0", "without a GPU the first"


def test_a_gpu_on_a_root_complex_of_its_own_uses_the_device_on_its_numa_node(machine: FakeMachine) -> None:
    machine.rdma("mlx5_0", pci="0000:10/0000:11:00.0", node="0")
    machine.rdma("mlx5_1", pci="0000:20/0000:21:00.0", node="1")
    machine.gpu("0000:90/0000:91:00.0", node="1")
    assert found(machine, gpu_bus_id="0000:91:00.0").name == "mlx5_1"


def test_a_nic_can_be_named(machine: FakeMachine) -> None:
    machine.interface("eth0", pci=CARD, speed="10000")
    machine.interface("eth1", pci="0000:00/0000:00:04.0", speed="25000")
    machine.rdma("mlx5_0")
    assert named_nic(machine.roots, "eth1") == LocalNic("eth1", "interface", speed_gbps=25.0)
    assert (
        named_nic(machine.roots, "mlx5_0")
        == named_nic(machine.roots, "mlx5_0:1")
        == LocalNic("mlx5_0", "rdma", 1, 100.0)
    )
    assert named_nic(machine.roots, "eth9") is None


def test_pci_addresses_of_nvml_become_those_of_sysfs() -> None:
    assert pci_address("00000000:3B:00.0") == pci_address("0000:3b:00.0") == "0000:3b:00.0"
    assert pci_address("0002BEEF:AB:00.0") == "2beef:ab:00.0", "virtual machines have large domains"


def test_this_machine_can_be_read() -> None:
    nic = find_nic(Roots())
    assert nic is None or nic.name != "lo"
