"""A TCP stream between two hosts that takes what the link gives, for as long as it is wanted: traffic to disturb.

``python -m bench.lab.stream receive ADDRESS PORT`` prints the time and the bytes so far every 100 ms; ``... send
ADDRESS PORT`` is its other end. Both are run inside of the hosts' namespaces and end when they are killed.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from bench.lab.errors import LabFailed, LabUnavailable
from bench.lab.goodput import PIECE_BYTES, connect
from bench.lab.plan import Host

SAMPLE_S = 0.1
_PORT = 9998
_START_S = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """``num_bytes`` had arrived at ``at_s`` (Unix time)."""

    at_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Samples:
    """What a stream delivered, in the order of time."""

    of: tuple[Sample, ...]

    def gbps(self, begin_s: float, end_s: float) -> float:
        """Mean goodput between two times. Raises ``LabFailed`` for times before or after the stream."""
        if not begin_s < end_s:
            raise LabFailed(f"{begin_s} to {end_s} is no span of time")
        return (self._bytes_at(end_s) - self._bytes_at(begin_s)) * 8 / (end_s - begin_s) / 1e9

    def lowest_gbps(self, begin_s: float, end_s: float) -> float:
        """Of the samples that lie between two times, or the mean if none do. Raises ``LabFailed``."""
        rates = [
            (late.num_bytes - early.num_bytes) * 8 / (late.at_s - early.at_s) / 1e9
            for early, late in zip(self.of, self.of[1:], strict=False)
            if early.at_s >= begin_s and late.at_s <= end_s
        ]
        return min(rates, default=self.gbps(begin_s, end_s))

    def _bytes_at(self, at_s: float) -> float:
        index = bisect_right(self.of, at_s, key=lambda sample: sample.at_s)
        if index == 0 or index == len(self.of):
            raise LabFailed("the stream was not there for the whole of the time that is asked for")
        early, late = self.of[index - 1], self.of[index]
        share = (at_s - early.at_s) / (late.at_s - early.at_s)
        return early.num_bytes + share * (late.num_bytes - early.num_bytes)


class Stream:
    """A stream that runs."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._begun = threading.Event()

    def wait_begun(self) -> None:
        """Returns once bytes arrive. Blocks. Raises ``LabUnavailable``."""
        if not self._begun.wait(_START_S):
            raise LabUnavailable(f"no byte of the background stream arrived within {_START_S:g} s")

    def samples(self) -> Samples:
        """So far."""
        return Samples(tuple(self._samples))

    def follow(self, lines: Iterable[str]) -> None:
        """Take the receiver's samples until it ends."""
        for line in lines:
            at_s, _, num_bytes = line.partition(" ")
            self._samples.append(Sample(float(at_s), int(num_bytes)))
            if int(num_bytes):
                self._begun.set()


@contextlib.contextmanager
def running(sender: Host, receiver: Host) -> Iterator[Stream]:
    """A stream from one host to another, until the block is left; ``wait_begun`` says when it runs."""
    command = (sys.executable, "-m", "bench.lab.stream")
    where = (receiver.data_address, str(_PORT))
    with contextlib.ExitStack() as started:
        receiving = subprocess.Popen(
            (*receiver.enter, *command, "receive", *where), stdout=subprocess.PIPE, text=True, bufsize=1
        )
        started.callback(receiving.wait)
        stream = Stream()
        reader = threading.Thread(target=stream.follow, args=(receiving.stdout,), name="stream-samples")
        reader.start()
        # The reader ends with the receiver's pipe.
        started.callback(reader.join)
        started.callback(receiving.kill)
        sending = subprocess.Popen((*sender.enter, *command, "send", *where))
        started.callback(sending.wait)
        started.callback(sending.kill)
        yield stream


def receive(address: str, port: int) -> Generator[Sample, None, None]:
    """Accept one connection; a sample every ``SAMPLE_S`` until it ends. Raises ``OSError``."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    with socket.create_server((address, port)) as server:
        server.settimeout(_START_S)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(SAMPLE_S)
            total = 0
            next_s = time.time()
            while True:
                now_s = time.time()
                if now_s >= next_s:
                    yield Sample(now_s, total)
                    next_s = now_s + SAMPLE_S
                try:
                    count = connection.recv_into(buffer)
                except TimeoutError:
                    continue  # starved: that is what samples are to show
                if count == 0:
                    yield Sample(time.time(), total)
                    return
                total += count


def send(address: str, port: int) -> None:
    """Connect, as soon as the receiver listens, and send until it is gone."""
    buffer = bytes(PIECE_BYTES)
    with connect(address, port) as connection, contextlib.suppress(ConnectionError):
        # The receiver always reads: without end of time it waits for the link alone.
        connection.settimeout(None)
        while True:
            connection.sendall(buffer)


def _main() -> None:
    role, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "send":
        send(address, port)
        return
    for sample in receive(address, port):
        sys.stdout.write(f"{sample.at_s:.6f} {sample.num_bytes}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
