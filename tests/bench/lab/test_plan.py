from __future__ import annotations

import pytest

from bench.lab.checkpoint import num_layers
from bench.lab.plan import (
    DATA_DEVICE,
    DATA_NETWORK,
    MANAGEMENT_ADDRESS,
    MANAGEMENT_NETWORK,
    MAX_HOSTS,
    PREFIX,
    Rate,
    create_commands,
    hosts,
)
from shared.errors import BadRequest

MAX_INTERFACE_NAME = 15


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 10**9),
        ("2.5gbit", 2_500_000_000),
        ("500mbit", 500_000_000),
        (" 1 GBIT ", 10**9),
        ("64000kbit", 64_000_000),
    ],
)
def test_rates_are_read_as_tc_writes_them(text: str, bits: int) -> None:
    assert Rate.parse(text).bits_per_s == bits


@pytest.mark.parametrize(
    "text", ["bit", "fast", "1", "-1gbit", "1gbps", "1 gbit extra", "0gbit", "1kbit", "900gbit", "nangbit"]
)
def test_what_is_no_rate_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        Rate.parse(text)


def test_the_bucket_holds_a_few_segments_at_least_and_a_millisecond_of_a_fast_link() -> None:
    assert Rate.parse("10mbit").burst_bytes >= 2 * 64 * 1024
    assert Rate.parse("100gbit").burst_bytes == 12_500_000


def test_seconds_of_a_rate() -> None:
    assert Rate.parse("1gbit").seconds(125_000_000) == 1.0


def test_names_fit_the_kernels_limit_carry_the_prefix_and_differ() -> None:
    names = [name for h in hosts(MAX_HOSTS) for name in (h.namespace, h.data_port, h.management_port)]
    assert len(set(names)) == 3 * MAX_HOSTS
    assert all(name.startswith(PREFIX) and len(name) <= MAX_INTERFACE_NAME for name in names)


def test_addresses_differ_and_lie_in_their_networks() -> None:
    lab = hosts(MAX_HOSTS)
    assert len({h.data_address for h in lab}) == len({h.management_address for h in lab}) == MAX_HOSTS
    assert MANAGEMENT_ADDRESS not in {h.management_address for h in lab}
    assert not DATA_NETWORK.overlaps(MANAGEMENT_NETWORK)


@pytest.mark.parametrize("count", [-1, 0, 1, MAX_HOSTS + 1])
def test_a_lab_needs_two_hosts_and_an_address_for_each(count: int) -> None:
    with pytest.raises(BadRequest, match=str(count)):
        hosts(count)


def test_both_directions_of_every_data_link_are_rated_and_no_management_link_is() -> None:
    buckets = [c for c in create_commands(hosts(3), Rate.parse("1gbit")) if c[0] == "tc"]
    assert all(c[c.index("rate") + 1] == "1000000000bit" for c in buckets)
    inside = {c[c.index("-n") + 1] for c in buckets if "-n" in c and DATA_DEVICE in c}
    outside = {c[c.index("dev") + 1] for c in buckets if "-n" not in c}
    assert inside == {h.namespace for h in hosts(3)}
    assert outside == {h.data_port for h in hosts(3)}


def test_everything_that_stays_in_the_root_namespace_carries_the_prefix() -> None:
    for command in create_commands(hosts(2), Rate.parse("1gbit")):
        if command[:3] in {("ip", "link", "add"), ("ip", "netns", "add")}:
            assert command[3].startswith(PREFIX)


def test_a_model_smaller_than_a_layer_is_refused() -> None:
    assert num_layers(128) == 16
    with pytest.raises(BadRequest, match="7"):
        num_layers(7)
