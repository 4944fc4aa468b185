"""TCP ports of this machine."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

from compose.errors import StackRefused

LOCAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_ATTEMPTS = 64


def free_port(host: str = "127.0.0.1") -> int:
    """A free port that is unlikely to be taken before its server listens on it.

    The system gives ports of its local range to every outgoing connection, and to every
    process that asks for any port; the server for this one may come up seconds later.
    So it is drawn at random from the ports below that range.

    Raises:
        StackRefused: no port was free.
    """
    for port in candidates():
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            free: int = probe.getsockname()[1]
            return free
    raise StackRefused(f"no TCP port is free on {host}")


def next_free_ports(host: str, first: int, count: int) -> tuple[int, ...]:
    """The ``count`` ports after ``first`` that are free now. Raises ``StackRefused`` if there are fewer."""
    free: list[int] = []
    for port in range(first + 1, 65536):
        if len(free) == count:
            break
        with contextlib.suppress(StackRefused):
            require_free(host, port, "--port")
            free.append(port)
    if len(free) < count:
        raise StackRefused(f"there are no {count} free ports on {host} above {first}: choose another with --port")
    return tuple(free)


def candidates() -> list[int]:
    try:
        first_local = int(LOCAL_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux: its local ports are above these
        first_local = 32_768
    below = range(_FIRST_PORT, first_local)
    # 0: the system's choice, where it keeps (nearly) all ports for itself.
    return [*random.SystemRandom().sample(below, min(_ATTEMPTS, len(below))), 0]


def require_free(host: str, port: int, flag: str) -> None:
    """Raises ``StackRefused`` naming the port if it cannot be listened on; ``flag`` is how to choose another."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free, one with a listener is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StackRefused(f"port {port} on {host} is in use: choose another with {flag}") from error
            raise StackRefused(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
