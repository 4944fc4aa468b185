"""Traffic of a NIC from its byte counters."""

from __future__ import annotations

import socket

import pytest

from services.worker.node.nic import LocalNic, Roots
from services.worker.node.nic_meter import NicMeter
from tests.services.worker.node.fake_machine import FakeMachine

GIGABIT_BYTES = 125_000_000
ETH0 = LocalNic("eth0", "interface")


@pytest.fixture
def meter(machine: FakeMachine) -> NicMeter:
    """Read once, at 10 s, with a thousand bytes counted."""
    machine.interface("eth0")
    machine.count("eth0", 1000, 1000)
    meter = NicMeter(ETH0, machine.roots)
    assert meter.rates(10.0) == (0.0, 0.0)
    return meter


def test_rates_are_averages_since_the_previous_call(machine: FakeMachine, meter: NicMeter) -> None:
    machine.count("eth0", received=1000 + GIGABIT_BYTES, sent=1000 + 3 * GIGABIT_BYTES)
    assert meter.rates(10.5) == pytest.approx((6.0, 2.0)), "egress first"
    machine.count("eth0", received=1000 + 2 * GIGABIT_BYTES, sent=1000 + 3 * GIGABIT_BYTES)
    assert meter.rates(12.5) == pytest.approx((0.0, 0.5))
    assert meter.rates(13.0) == (0.0, 0.0)


def test_a_counter_that_goes_back_gives_zero_once(machine: FakeMachine, meter: NicMeter) -> None:
    machine.count("eth0", received=1000 + GIGABIT_BYTES, sent=0)
    assert meter.rates(11.0) == pytest.approx((0.0, 1.0))
    machine.count("eth0", received=1000 + GIGABIT_BYTES, sent=GIGABIT_BYTES)
    assert meter.rates(12.0) == pytest.approx((1.0, 0.0))


def test_an_interface_that_vanishes_and_returns_makes_no_spike(machine: FakeMachine, meter: NicMeter) -> None:
    machine.remove("eth0")
    assert meter.rates(11.0) == (0.0, 0.0)
    machine.count("eth0", 50 * GIGABIT_BYTES, 50 * GIGABIT_BYTES)
    assert meter.rates(12.0) == (0.0, 0.0)
    machine.count("eth0", 51 * GIGABIT_BYTES, 50 * GIGABIT_BYTES)
    assert meter.rates(13.0) == pytest.approx((0.0, 1.0))


def test_calls_at_one_moment_lose_no_bytes(machine: FakeMachine, meter: NicMeter) -> None:
    machine.count("eth0", 1000, 1000 + GIGABIT_BYTES)
    assert meter.rates(10.0) == (0.0, 0.0)
    assert meter.rates(11.0) == pytest.approx((1.0, 0.0))


def test_interfaces_whose_names_begin_alike_are_told_apart(machine: FakeMachine, meter: NicMeter) -> None:
    machine.interface("eth01")
    machine.interface("veth0")
    machine.count("eth01", GIGABIT_BYTES, GIGABIT_BYTES)
    machine.count("veth0", GIGABIT_BYTES, GIGABIT_BYTES)
    assert meter.rates(11.0) == (0.0, 0.0)


def test_infiniband_counts_words_of_four_bytes(machine: FakeMachine) -> None:
    port = machine.rdma("mlx5_0", port=2)
    machine.count_rdma(port, received=0, sent=0)
    meter = NicMeter(LocalNic("mlx5_0:2", "rdma", 2), machine.roots)
    meter.rates(1.0)
    machine.count_rdma(port, received=GIGABIT_BYTES // 4, sent=GIGABIT_BYTES)
    assert meter.rates(2.0) == pytest.approx((4.0, 1.0))


def test_rdma_cards_without_infiniband_counters_count_bytes(machine: FakeMachine) -> None:
    port = machine.rdma("rdmap0s6")
    machine.count_rdma(port, received=0, sent=0, words=False)
    meter = NicMeter(LocalNic("rdmap0s6", "rdma"), machine.roots)
    meter.rates(1.0)
    machine.count_rdma(port, received=GIGABIT_BYTES, sent=2 * GIGABIT_BYTES, words=False)
    assert meter.rates(2.0) == pytest.approx((2.0, 1.0))


def test_a_worker_without_a_nic_has_no_traffic() -> None:
    meter = NicMeter(None)
    assert meter.rates(1.0) == meter.rates(2.0) == (0.0, 0.0)


def test_this_machines_counters_can_be_read() -> None:
    meter = NicMeter(LocalNic("lo", "interface"), Roots())
    meter.rates(1.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sends:
        sends.sendto(bytes(1000), ("127.0.0.1", 9))
    egress_gbps, ingress_gbps = meter.rates(2.0)
    assert egress_gbps > 0
    assert ingress_gbps > 0
