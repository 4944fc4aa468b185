"""Reads the log files of a state directory: the last lines, and what is added. Only reads.

A file is read from its end, in pieces; lines over 64 KiB are cut as they are when they are written.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from compose.errors import StackRefused
from compose.log_lines import LineSplitter

SUFFIX = ".log"
MAX_LINES = 100_000
MAX_BYTES = 64 << 20
"""Of the last lines of all files together."""
_PIECE_BYTES = 64 * 1024
_TIME = re.compile(
    rb'^(?:\{"time": ")?(?P<service>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?)Z'
    rb"|^\[\d+\] (?P<nats>\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+) "
    rb"|^\d+:[A-Z] (?P<redis>\d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d\.\d+) "
)
_FORMATS = {"nats": "%Y/%m/%d %H:%M:%S.%f", "redis": "%d %b %Y %H:%M:%S.%f"}


@dataclass(frozen=True, slots=True)
class LogLine:
    """Of one process. ``at_s`` is Unix time: its own, or that of the line before it."""

    at_s: float
    name: str
    text: str


class FollowedFile:
    """What is added to a file, also after another one has taken its place (it grew too large, or ``up`` ran again)."""

    def __init__(self, path: Path) -> None:
        """Raises ``StackRefused``."""
        self.name = path.name.removesuffix(SUFFIX)
        self._path = path
        self._file: BinaryIO | None = _opened(path)
        self._splitter = LineSplitter()
        self._at_s = 0.0

    def last(self, num_lines: int, max_bytes: int) -> list[LogLine]:
        """The last lines so far; ``added`` goes on from there."""
        if self._file is None:
            return []
        begin = _before_last(self._file, num_lines, max_bytes)
        self._file.seek(begin)
        lines = self._read()
        if begin:
            next(lines, None)  # the end of one
        return list(deque(lines, maxlen=num_lines))

    def added(self) -> Iterator[LogLine]:
        """Whole lines that were added. Raises ``StackRefused``."""
        yield from self._read()
        if self._file is not None and _is(self._file, self._path):
            return
        if (fresh := _opened(self._path)) is not None:
            # What came between the last look and the change of files.
            yield from self._read()
            yield from self._lines(self._splitter.flush())
            self.close()
            self._file = fresh
            yield from self._read()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> Iterator[LogLine]:
        while self._file is not None and (data := self._file.read(_PIECE_BYTES)):
            yield from self._lines(self._splitter.feed(data))

    def _lines(self, lines: Iterator[bytes]) -> Iterator[LogLine]:
        for line in lines:
            self._at_s = time_of(line) or self._at_s
            yield LogLine(self._at_s, self.name, line.decode(errors="replace"))


def names(folder: Path) -> tuple[str, ...]:
    """Of the processes that have a log there. Raises ``StackRefused``."""
    try:
        found = [path.name for path in folder.iterdir() if path.name.endswith(SUFFIX) and path.is_file()]
    except OSError as error:
        raise StackRefused(f"there are no logs in {folder}: {error.strerror}") from error
    return tuple(sorted(name.removesuffix(SUFFIX) for name in found))


def merged(files: Sequence[FollowedFile], num_lines: int) -> list[LogLine]:
    """The last lines of all together, by time; lines without one stay behind the line before them."""
    each = max(_PIECE_BYTES, MAX_BYTES // max(1, len(files)))
    lines = [line for file in files for line in file.last(num_lines, each)]
    lines.sort(key=lambda line: line.at_s)
    return lines[len(lines) - min(num_lines, len(lines)) :]


def time_of(line: bytes) -> float | None:
    """Unix time. NATS and Redis write this machine's time, services UTC. None: it has none."""
    found = _TIME.match(line)
    if found is None or found.lastgroup is None:
        return None
    text = found[found.lastgroup].decode()
    try:
        if found.lastgroup == "service":
            return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        return datetime.strptime(text, _FORMATS[found.lastgroup]).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _opened(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StackRefused(f"{path} cannot be read: {error.strerror}") from error


def _is(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return True  # another one is about to take its place


def _before_last(file: BinaryIO, num_lines: int, max_bytes: int) -> int:
    """Somewhere before the last lines; no more than ``max_bytes`` before the end. 0, or in the middle of a line."""
    position = end = file.seek(0, os.SEEK_END)
    missing = num_lines + 1
    while position > 0 and missing > 0 and end - position < max_bytes:
        piece = min(_PIECE_BYTES, position)
        position -= piece
        file.seek(position)
        missing -= file.read(piece).count(b"\n")
    return position
