"""The lab on paper: names, addresses and rates. Nothing here touches the system.

A bridge is the switch of one leaf. Each host is a network namespace with two interfaces: ``data0``, rated in
both directions, on the switch; and ``mgmt0``, unrated, on a second bridge where NATS listens, so that
control messages never compete with what is measured.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from shared.errors import BadRequest

PREFIX = "blzlab"
"""Every name that the lab makes starts with this: what an earlier run left is found by it."""
DATA_BRIDGE = f"{PREFIX}-sw"
MANAGEMENT_BRIDGE = f"{PREFIX}-mg"
DATA_DEVICE = "data0"
MANAGEMENT_DEVICE = "mgmt0"
DATA_NETWORK = ipaddress.IPv4Network("10.213.0.0/24")
MANAGEMENT_NETWORK = ipaddress.IPv4Network("10.213.1.0/24")
MANAGEMENT_ADDRESS = str(MANAGEMENT_NETWORK[1])
"""The root namespace's, where NATS listens."""
MIN_HOSTS, MAX_HOSTS = 2, 64
_MIN_BITS, _MAX_BITS = 1_000_000, 400_000_000_000
_MIN_BURST_BYTES = 128 * 1024
_BURST_S = 0.001

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)")


QUEUE = "5ms"
"""What may wait in front of a link. There is one queue for all, while a NIC has one for each connection: connections,
hidden states and answers wait behind weights as long as this. Plain TCP gets as much with it as with ten times that."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Of a link, per direction."""

    bits_per_s: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        """``1gbit``, ``2.5gbit``, ``500mbit``: as ``tc`` writes rates. Raises ``BadRequest`` with the value."""
        match = _RATE.fullmatch(text.strip().lower())
        if match is None:
            raise BadRequest(f"{text!r} is no rate: write it as 500mbit, 1gbit or 2.5gbit", param="rate")
        bits = round(float(match[1]) * _UNITS[match[2]])
        if not _MIN_BITS <= bits <= _MAX_BITS:
            raise BadRequest(f"a rate lies between 1mbit and 400gbit, not {text}", param="rate")
        return cls(bits)

    @property
    def gbps(self) -> float:
        """Gigabits per second."""
        return self.bits_per_s / 1e9

    @property
    def burst_bytes(self) -> int:
        """The token bucket: a millisecond's worth, and never less than two of the largest segments."""
        return max(_MIN_BURST_BYTES, round(self.bits_per_s / 8 * _BURST_S))

    def seconds(self, num_bytes: int) -> float:
        return num_bytes * 8 / self.bits_per_s

    def __str__(self) -> str:
        return f"{self.bits_per_s}bit"


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace."""

    index: int

    @property
    def namespace(self) -> str:
        return f"{PREFIX}-h{self.index}"

    @property
    def data_port(self) -> str:
        """The switch's end of the data link."""
        return f"{PREFIX}d{self.index}"

    @property
    def management_port(self) -> str:
        return f"{PREFIX}m{self.index}"

    @property
    def data_address(self) -> str:
        return str(DATA_NETWORK[self.index + 2])

    @property
    def management_address(self) -> str:
        return str(MANAGEMENT_NETWORK[self.index + 2])

    @property
    def enter(self) -> tuple[str, ...]:
        """Put before a command line, this runs it inside; it becomes the command, it does not fork."""
        return ("ip", "netns", "exec", self.namespace)


def hosts(count: int) -> tuple[Host, ...]:
    """``count`` hosts. Raises ``BadRequest`` for fewer than two or more than fit."""
    if not MIN_HOSTS <= count <= MAX_HOSTS:
        raise BadRequest(f"a lab has {MIN_HOSTS} to {MAX_HOSTS} hosts, not {count}", param="hosts")
    return tuple(Host(index) for index in range(count))


def create_commands(lab: tuple[Host, ...], rate: Rate) -> list[tuple[str, ...]]:
    """The ``ip`` and ``tc`` command lines that make the lab, in order."""
    commands: list[tuple[str, ...]] = []
    for bridge in (DATA_BRIDGE, MANAGEMENT_BRIDGE):
        commands += [
            ("ip", "link", "add", bridge, "type", "bridge"),
            ("ip", "link", "set", bridge, "up"),
        ]
    address = f"{MANAGEMENT_ADDRESS}/{MANAGEMENT_NETWORK.prefixlen}"
    commands.append(("ip", "address", "add", address, "dev", MANAGEMENT_BRIDGE))
    for host in lab:
        inside = ("ip", "-n", host.namespace)
        commands += [("ip", "netns", "add", host.namespace), (*inside, "link", "set", "lo", "up")]
        links = (
            (host.data_port, DATA_BRIDGE, DATA_DEVICE, host.data_address, DATA_NETWORK),
            (host.management_port, MANAGEMENT_BRIDGE, MANAGEMENT_DEVICE, host.management_address, MANAGEMENT_NETWORK),
        )
        for port, bridge, device, own, network in links:
            peer = ("peer", "name", device, "netns", host.namespace)
            commands += [
                ("ip", "link", "add", port, "type", "veth", *peer),
                ("ip", "link", "set", port, "master", bridge, "up"),
                (*inside, "address", "add", f"{own}/{network.prefixlen}", "dev", device),
                (*inside, "link", "set", device, "up"),
            ]
        commands += rate_commands(host, rate, "add")
    return commands


def rate_commands(host: Host, rate: Rate, verb: Literal["add", "change"]) -> list[tuple[str, ...]]:
    """The command lines that rate both directions of a host's data link."""
    bucket = ("root", "tbf", "rate", str(rate), "burst", f"{rate.burst_bytes}b", "latency", QUEUE)
    return [
        ("tc", "-n", host.namespace, "qdisc", verb, "dev", DATA_DEVICE, *bucket),
        ("tc", "qdisc", verb, "dev", host.data_port, *bucket),
    ]
