from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

from compose.log_lines import ConsoleSink, LineSplitter, ProcessLog, worth_showing


def test_lines_come_out_whole_however_the_bytes_come_in() -> None:
    splitter = LineSplitter()
    text = "first\r\nsécond\n\nlast".encode()
    lines = [line for index in range(len(text)) for line in splitter.feed(text[index : index + 1])]
    assert [*lines, *splitter.flush()] == [b"first", "sécond".encode(), b"", b"last"]
    assert list(splitter.flush()) == []


def test_an_endless_line_is_cut_and_loses_nothing() -> None:
    splitter = LineSplitter()
    lines = list(splitter.feed(b"x" * 200_000))
    assert max(map(len, lines)) <= 64 * 1024
    assert sum(map(len, [*lines, *splitter.flush()])) == 200_000


def test_console_lines_have_an_aligned_name_and_no_colour_off_a_terminal() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink("gateway", "ready")
    sink("worker-0", "ready")
    first, second = stream.getvalue().splitlines()
    assert first == "gateway   | ready"
    assert first.index("|") == second.index("|")


def test_names_are_coloured_on_a_terminal_each_differently() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, colour=True)
    sink("gateway", "a")
    sink("pool", "b")
    sink("gateway", "c")
    prefixes = [line.split("|")[0] for line in stream.getvalue().splitlines()]
    assert prefixes[0] == prefixes[2] != prefixes[1]
    assert prefixes[0].startswith("\x1b[")


def test_a_reader_that_went_away_does_not_stop_the_stack() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    stream = os.fdopen(write_fd, "w")
    sink = ConsoleSink(stream)
    sink("pool", "nobody reads this")
    sink("pool", "nor this")
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_a_log_keeps_the_former_run_and_the_last_lines(tmp_path: Path) -> None:
    log = ProcessLog("pool", tmp_path)
    log.write(b"old run")
    log.close()
    log = ProcessLog("pool", tmp_path)
    for number in range(100):
        log.write(f"line {number} \xff".encode("latin-1"))
    log.close()
    assert (tmp_path / "pool.log.1").read_text() == "old run\n"
    assert len((tmp_path / "pool.log").read_bytes().splitlines()) == 100
    assert log.last_lines[-1] == "line 99 �"
    assert len(log.last_lines) == 40


def test_a_full_disk_costs_the_lines_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda *_, **__: opened(Path("/dev/full"), "wb", buffering=0))
    log = ProcessLog("pool", tmp_path)
    assert log.write(b"a line") == "a line"
    log.close()
    assert list(log.last_lines) == ["a line"]


@pytest.mark.parametrize(
    ("name", "line", "shown"),
    [
        ("worker-0", "2026-11-22T05:39:59.100Z INFO worker-0: registered", False),
        ("worker-0", "2026-11-22T05:39:59.100Z WARNING worker-0: no lease", True),
        ("worker-0", "Traceback (most recent call last):", True),
        ("nats", "[1] 2026/11/22 05:39:59.1 [INF] Server is ready", False),
        ("nats", "[1] 2026/11/22 05:39:59.1 [WRN] Plaintext passwords detected, use nkeys or bcrypt", False),
        ("nats", "[1] 2026/11/22 05:39:59.1 [WRN] Filestore [BLITZ_PLANS] Stream state outdated", True),
        ("nats", "[1] 2026/11/22 05:39:59.1 [ERR] authentication error", True),
        ("redis", "9:M 22 Nov 2026 05:39:59.1 * Ready to accept connections", False),
        ("redis", "9:M 22 Nov 2026 05:39:59.1 # Server initialized", False),
        ("redis", "9:M 22 Nov 2026 05:39:59.1 # MISCONF Errors writing to the AOF file: No space left on device", True),
    ],
)
def test_the_console_shows_what_calls_for_somebody(name: str, line: str, shown: bool) -> None:
    assert worth_showing(name, line) is shown
