"""The lab's network, made and taken away: a context manager that leaves nothing behind.

What a run that was killed left is found by its names and taken away at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from bench.lab import goodput, system
from bench.lab.errors import LabFailed, LabUnavailable
from bench.lab.plan import (
    DATA_DEVICE,
    DATA_NETWORK,
    MANAGEMENT_NETWORK,
    PREFIX,
    Rate,
    create_commands,
    hosts,
    rate_commands,
)

LOCK = Path("/run/lock/blitzscale-lab.lock")
_PROBE_BYTES = 64 * 1024
Argument = TypeVar("Argument")


class Network:
    """``with Network(4, Rate.parse("1gbit")) as network:``. One per machine at a time.

    Entering raises ``LabUnavailable`` with everything taken away again.
    """

    def __init__(self, num_hosts: int, rate: Rate, *, lock: Path = LOCK) -> None:
        """Raises ``BadRequest`` for a number of hosts that no lab has."""
        self.hosts = hosts(num_hosts)
        self.rate = rate
        self._lock = lock
        self._lock_fd: int | None = None

    def __enter__(self) -> Network:
        system.require()
        self._acquire()
        try:
            clean()
            _refuse_taken_addresses()
            for command in create_commands(self.hosts, self.rate):
                system.run(command)
            self._check_reachable()
        except BaseException:
            # Also on Ctrl-C half way: what was made must not stay.
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def received_bytes(self) -> tuple[int, ...]:
        """By host: what its data interface received since it was made."""
        return tuple(system.counters(host.namespace, DATA_DEVICE)[0] for host in self.hosts)

    def sent_bytes(self) -> tuple[int, ...]:
        """By host: what its data interface sent since it was made."""
        return tuple(system.counters(host.namespace, DATA_DEVICE)[1] for host in self.hosts)

    def set_rate(self, host: int, rate: Rate) -> None:
        """Rate both directions of one host's link anew, from now on. Raises ``LabUnavailable``."""
        for command in rate_commands(self.hosts[host], rate, "change"):
            system.run(command)

    def set_link(self, host: int, *, up: bool) -> None:
        """Pull the cable of one host's data link out of the switch, or put it back. Raises ``LabUnavailable``."""
        system.run(("ip", "link", "set", self.hosts[host].data_port, "up" if up else "down"))

    def goodput(self, num_bytes: int, *, sender: int = 0, receiver: int = 1) -> goodput.Goodput:
        """A plain TCP transfer of ``num_bytes`` between two hosts. Raises ``LabUnavailable``."""
        at_least_s = self.rate.seconds(num_bytes)
        return goodput.measure(self.hosts[sender], self.hosts[receiver], num_bytes, at_least_s=at_least_s)

    def require_received(self, before: tuple[int, ...], receivers: dict[int, int]) -> None:
        """``receivers``: by host, the bytes that its interface must have counted since ``before``.

        Raises ``LabFailed``: the bytes came some other way than over the rated link.
        """
        now = self.received_bytes()
        for host, wanted in sorted(receivers.items()):
            counted = now[host] - before[host]
            if counted < wanted:
                raise LabFailed(
                    f"{self.hosts[host].namespace} counted {counted} bytes on {DATA_DEVICE} and should have received "
                    f"{wanted}: they came another way than over the rated link"
                )

    def _check_reachable(self) -> None:
        try:
            self.goodput(_PROBE_BYTES)
        except LabUnavailable as error:
            if not system.bridged_traffic_is_filtered():
                raise
            raise LabUnavailable(
                f"{error.message}. Bridged traffic passes through iptables here "
                "(net.bridge.bridge-nf-call-iptables=1), and a running dockerd sets FORWARD to DROP: allow it with "
                f"`iptables -I FORWARD -i {PREFIX}-+ -j ACCEPT`, or `sysctl -w net.bridge.bridge-nf-call-iptables=0`"
            ) from error

    def _acquire(self) -> None:
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The kernel's lock: it ends with this process, even by SIGKILL.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise LabUnavailable(f"another lab runs on this machine ({self._lock} is held)") from error
        self._lock_fd = descriptor

    def _leave(self) -> None:
        try:
            clean()
        finally:
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None


def clean() -> None:
    """Take away every namespace and interface of the lab's names, and end what still runs inside.

    Raises ``LabUnavailable`` if something stays, after trying everything.
    """
    problems: list[str] = []
    for namespace in system.namespaces():
        if namespace.startswith(f"{PREFIX}-"):
            _try(problems, _end_processes, namespace)
            _try(problems, system.run, ("ip", "netns", "delete", namespace))
    for link in system.links():
        # A namespace's death takes its links along, a little later: one may be gone by now.
        if link.startswith(PREFIX):
            with contextlib.suppress(LabUnavailable):
                system.run(("ip", "link", "delete", link))
    left = [link for link in system.links() if link.startswith(PREFIX)]
    if left:
        problems.append(f"these interfaces stay: {', '.join(left)}")
    if problems:
        raise LabUnavailable("; ".join(problems))


def _try(problems: list[str], work: Callable[[Argument], object], argument: Argument) -> None:
    try:
        work(argument)
    except LabUnavailable as error:
        problems.append(error.message)


def _end_processes(namespace: str) -> None:
    for pid in system.run(("ip", "netns", "pids", namespace)).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _refuse_taken_addresses() -> None:
    for destination, device in system.routes():
        if destination == "default":
            continue
        route = ipaddress.IPv4Network(destination, strict=False)
        for network in (DATA_NETWORK, MANAGEMENT_NETWORK):
            if route.overlaps(network):
                raise LabUnavailable(f"the lab's addresses {network} are in use here: {destination} on {device}")
