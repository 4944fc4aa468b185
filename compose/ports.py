"""TCP ports of this machine."""

from __future__ import annotations

import errno
import socket

from compose.errors import StackRefused


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def require_free(host: str, port: int, flag: str) -> None:
    """Raises ``StackRefused`` naming the port if it cannot be listened on; ``flag`` is how to choose another."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT is free, one that somebody listens on is not.
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
