"""Hears what goes over the bus, and keeps the largest message of each subject.

``python -m bench.control.tap PORT USER``, password on the first line of its standard input, until a second line comes.
It reads the protocol itself, and no payload: a client library would take a core of its own.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections import deque

import msgspec

from shared import subjects
from shared.permissions import INBOX, TABLE

# Whoever asks on these wants to learn that nobody listens: this process must not.
_NOT_HEARD = (subjects.gateway_holder, subjects.worker_holder, subjects.nobody, subjects.worker_submit)
_READ_BYTES = 1 << 18
_NAMES = (
    (re.compile(r"^(blitz\.v1\.worker|blitz\.v1\.gateway)\.[^.]+\.(.*)$"), r"\1.*.\2"),
    (re.compile(r"^(blitz\.v1\.plans\.worker)\..*$"), r"\1.*"),
    (re.compile(r"^_INBOX\.([^.]+)\..*$"), r"_INBOX.\1"),
)
_MAX_ASKED = 100_000
_LATE_MARKS = 4


def heard() -> list[str]:
    """All subjects of the product, but for that of requests and those on which nobody may listen; and all answers."""
    return sorted({row.subject for row in TABLE if row.build not in _NOT_HEARD} | {f"{INBOX}.>"})


def plain(subject: str) -> str:
    """A subject without the names of workers, gateways and clients in it."""
    for pattern, replacement in _NAMES:
        subject = pattern.sub(replacement, subject)
    return subject


class Sizes:
    """Feeds on what the server sends. ``largest``: bytes of payload and headers by subject; an answer is listed under
    the subject of its question, with ``(answer)``."""

    def __init__(self) -> None:
        self.largest: dict[str, int] = {}
        self.messages = 0
        self._rest = b""
        self._skip = 0
        self._asked: dict[str, str] = {}

    def feed(self, data: bytes) -> bool:
        """Whether the server wants a PONG."""
        ping = False
        data = self._rest + data
        at, end = 0, len(data)
        while at < end:
            if self._skip:
                step = min(self._skip, end - at)
                at, self._skip = at + step, self._skip - step
                continue
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            line = data[at:line_end]
            at = line_end + 2
            if line[:4] in (b"MSG ", b"HMSG"):
                self._message(line.decode("utf-8", "replace").split(" "))
            elif line == b"PING":
                ping = True
            elif line.startswith(b"-ERR"):
                raise RuntimeError(line.decode("utf-8", "replace"))
        self._rest = data[at:]
        return ping

    def _message(self, words: list[str]) -> None:
        has_headers = words[0] == "HMSG"
        # HMSG subject sid [reply] header_bytes total_bytes; MSG subject sid [reply] bytes
        size, subject = int(words[-1]), words[1]
        reply = words[3] if len(words) == (6 if has_headers else 5) else ""
        self._skip = size + 2
        self.messages += 1
        asked = self._asked.pop(subject, "")
        name = f"{asked} (answer)" if asked else plain(subject)
        if reply and len(self._asked) < _MAX_ASKED:
            self._asked[reply] = name
        if size > self.largest.get(name, -1):
            self.largest[name] = size


class TapResult(msgspec.Struct, frozen=True):
    """What came by."""

    largest: dict[str, int]
    late_messages: int
    """Of the last seconds."""
    late_s: float


def _listen(connection: socket.socket, sizes: Sizes, stopping: threading.Event) -> TapResult:
    marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
    while not stopping.is_set():
        if time.monotonic() - marks[-1][0] >= 1.0:
            marks.append((time.monotonic(), sizes.messages))
            if len(marks) > _LATE_MARKS:
                marks.popleft()
        try:
            data = connection.recv(_READ_BYTES)
        except TimeoutError:
            continue
        if not data:
            raise RuntimeError("the server closed the connection")
        if sizes.feed(data):
            connection.sendall(b"PONG\r\n")
    since_s, messages = marks[0]
    return TapResult(sizes.largest, sizes.messages - messages, time.monotonic() - since_s)


def _wait(stopping: threading.Event) -> None:
    sys.stdin.readline()
    stopping.set()


def main() -> None:
    """Write the result as JSON once told to end."""
    port, user = int(sys.argv[1]), sys.argv[2]
    password = sys.stdin.readline().strip()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(0.2)
    about = msgspec.json.encode({"user": user, "pass": password, "verbose": False, "headers": True, "name": "tap"})
    lines = [f"SUB {subject} {number}" for number, subject in enumerate(heard(), start=1)]
    connection.sendall(b"CONNECT " + about + b"\r\n" + "\r\n".join(lines).encode() + b"\r\nPING\r\n")
    sizes, stopping = Sizes(), threading.Event()
    threading.Thread(target=_wait, args=(stopping,), daemon=True).start()
    result = _listen(connection, sizes, stopping)
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    main()
