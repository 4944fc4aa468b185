"""Output of several processes as whole lines: prefixed on the console, plain in a file each."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, TextIO

LineSink = Callable[[str, str], None]
"""Takes (process name, line without its end)."""


def ignore_line(name: str, line: str) -> None:
    """A ``LineSink`` that shows nothing."""
    del name, line


LOG_NAME = "blitz"
"""Of the stack's own lines, beside those of its processes."""
_MAX_LINE_BYTES = 64 * 1024
MAX_FILE_BYTES = 64 * 1024 * 1024
_KEPT_LINES = 40
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


# Of what NATS and Redis mark as more than information, these come at every start and stop, and call for nothing: NATS's
# file holds passwords because it was made for this machine, and Redis marks half of its greeting as warnings.
_ROUTINE = (
    "Plaintext passwords detected",
    "Redis is starting",
    "Redis version=",
    "Configuration loaded",
    "Server initialized",
    "Memory overcommit must be enabled",
    "User requested shutdown",
    "Redis is now ready to exit",
)
_EVERYDAY = re.compile(r"\S+Z (DEBUG|INFO) ")
"""How a service begins a line that calls for nothing."""
_MARKS = {"nats": ("[WRN]", "[ERR]", "[FTL]"), "redis": (" # ",)}


def worth_showing(name: str, line: str) -> bool:
    """Whether a line belongs on the console: warnings, errors and what nobody foresaw do. The others go to files."""
    marks = _MARKS.get(name)
    if marks is None:
        return _EVERYDAY.match(line) is None
    return any(mark in line for mark in marks) and not any(text in line for text in _ROUTINE)


def log_time() -> str:
    """Now, as services begin their lines with it."""
    now = datetime.now(UTC)
    return f"{now:%Y-%m-%dT%H:%M:%S}.{now.microsecond // 1000:03}Z"


class LineSplitter:
    """Bytes as they come in, whole lines out. A line over 64 KiB is cut there."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that ``data`` completes, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
        while len(self._rest) > _MAX_LINE_BYTES:
            yield self._rest[:_MAX_LINE_BYTES]
            self._rest = self._rest[_MAX_LINE_BYTES:]

    def flush(self) -> Iterator[bytes]:
        """What is left of a last line without an end."""
        if self._rest:
            yield self._rest
        self._rest = b""


class ProcessLog:
    """One process's lines: the last few in memory and, where there is a folder, a file of its own (the former run's
    becomes ``NAME.log.1``)."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self.path = folder / f"{name}.log" if folder is not None else None
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._file = _fresh_file(self.path) if self.path is not None else None
        self._num_bytes = 0

    def write(self, line: bytes) -> str:
        """Keep one line; gives it as text."""
        text = line.decode(errors="replace")
        self.last_lines.append(text)
        if self.path is None or self._file is None:
            return text
        try:
            if self._num_bytes > MAX_FILE_BYTES:
                self._file.close()
                self._file = _fresh_file(self.path)
                self._num_bytes = 0
            self._file.write(line + b"\n")
            self._num_bytes += len(line) + 1
        except OSError:
            pass  # the disk is full: who writes goes on, and can be stopped
        return text

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _fresh_file(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_suffix(".log.1"))
    return path.open("wb", buffering=0)


class ConsoleSink:
    """Lines on a terminal or pipe, one write each, with the process's name in a column of ``width``."""

    def __init__(self, stream: TextIO | None = None, *, colour: bool | None = None, width: int = 9) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._colour = self._stream.isatty() if colour is None else colour
        self._width = width
        self._colour_of: dict[str, int] = {}
        self._open = True

    @property
    def is_open(self) -> bool:
        """Somebody reads."""
        return self._open

    def __call__(self, name: str, line: str) -> None:
        prefix = f"{name:<{self._width}} |"
        if self._colour:
            code = self._colour_of.setdefault(name, _COLOURS[len(self._colour_of) % len(_COLOURS)])
            prefix = f"\x1b[{code}m{prefix}\x1b[0m"
        self.write(f"{prefix} {line}")

    def write(self, text: str) -> None:
        """One piece of text and a line end, as one write."""
        if not self._open:
            return
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):
            # The reader is gone (``| head``): the log files stay, and serving continues.
            self._open = False
