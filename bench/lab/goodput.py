"""A plain TCP transfer between two hosts: what the link gives to anybody.

``python -m bench.lab.goodput receive ADDRESS PORT BYTES`` prints the seconds from the accepted connection to the
last byte; ``... send ADDRESS PORT BYTES`` is its other end. Both are run inside of the hosts' namespaces.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from bench.lab.errors import LabUnavailable
from bench.lab.plan import Host

PIECE_BYTES = 1024 * 1024
_PORT = 9999
_CONNECT_S = 5.0
_SLACK_S = 15.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """What one transfer gave."""

    num_bytes: int
    seconds: float

    @property
    def gbps(self) -> float:
        """Gigabits of payload per second."""
        return self.num_bytes * 8 / self.seconds / 1e9


def measure(sender: Host, receiver: Host, num_bytes: int, *, at_least_s: float) -> Goodput:
    """Transfer once. ``at_least_s``: what the rate allows, for the deadline.

    Raises ``LabUnavailable`` when the hosts cannot reach each other or the transfer does not end.
    """
    deadline_s = 4 * at_least_s + _SLACK_S
    module = (sys.executable, "-m", "bench.lab.goodput")
    where = (receiver.data_address, str(_PORT), str(num_bytes))
    with contextlib.ExitStack() as started:

        def start(host: Host, role: str) -> subprocess.Popen[str]:
            command = (*host.enter, *module, role, *where)
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            started.callback(_end, process)
            return process

        receiving = start(receiver, "receive")
        sending = start(sender, "send")
        try:
            said, _ = sending.communicate(timeout=deadline_s)
            if sending.returncode != 0:
                reason = (said.strip().splitlines() or ["no reason given"])[-1]
                raise LabUnavailable(
                    f"no TCP connection from {sender.namespace} to {receiver.namespace} over the switch: {reason}"
                )
            answer, _ = receiving.communicate(timeout=_SLACK_S)
        except subprocess.TimeoutExpired as error:
            raise LabUnavailable(f"{num_bytes} bytes over plain TCP took more than {deadline_s:.0f} s") from error
    if receiving.returncode != 0:
        raise LabUnavailable(f"the plain TCP receiver failed: {answer.strip()}")
    return Goodput(num_bytes, float(answer.split()[-1]))


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def receive(address: str, port: int, num_bytes: int) -> float:
    """Accept one connection and take ``num_bytes``; the seconds that took. Raises ``OSError``, ``EOFError``."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    with socket.create_server((address, port)) as server:
        server.settimeout(_CONNECT_S + _SLACK_S)
        connection, _ = server.accept()
        with connection:
            # A peer that stalls must not hold this for ever.
            connection.settimeout(_SLACK_S)
            started_s = time.monotonic()
            left = num_bytes
            while left:
                count = connection.recv_into(buffer)
                if count == 0:
                    raise EOFError(f"the sender ended {left} bytes early")
                left -= count
            return time.monotonic() - started_s


def connect(address: str, port: int) -> socket.socket:
    """A connection, as soon as somebody listens. Raises ``OSError``."""
    deadline_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def send(address: str, port: int, num_bytes: int) -> None:
    """Connect, as soon as the receiver listens, and send. Raises ``OSError``."""
    buffer = memoryview(bytes(PIECE_BYTES))
    with connect(address, port) as connection:
        connection.settimeout(_SLACK_S)
        left = num_bytes
        while left:
            count = min(left, PIECE_BYTES)
            connection.sendall(buffer[:count])
            left -= count


def _main() -> None:
    role, address, port, num_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if role == "receive":
        sys.stdout.write(f"{receive(address, port, num_bytes):.6f}\n")
    else:
        send(address, port, num_bytes)


if __name__ == "__main__":
    _main()
