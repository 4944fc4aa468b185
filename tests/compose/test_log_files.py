"""The last lines of log files, and what is added to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from compose import log_files
from compose.errors import StackRefused
from compose.log_files import FollowedFile, merged, time_of
from compose.log_lines import ProcessLog

AT = datetime(2026, 11, 27, 2, 47, 51, 250_000, tzinfo=UTC).timestamp()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        yield
    time.tzset()


def texts(file: FollowedFile) -> list[str]:
    return [line.text for line in file.added()]


@pytest.mark.parametrize(
    ("line", "at_s"),
    [
        ("2026-11-27T02:47:51.250Z INFO gateway: listening", AT),
        ('{"time": "2026-11-27T02:47:51.250Z", "level": "INFO"}', AT),
        ("2026-11-27T02:47:51Z INFO", AT - 0.25),
        ("[16210] 2026/11/27 08:17:51.250000 [INF] Starting", AT),
        ("16215:C 27 Nov 2026 08:17:51.250 # Redis is starting", AT),
        ("2026-13-27T02:47:51.250Z INFO", None),
        ("0000-00-00T00:00:00Z", None),
        ("  File x, line 7", None),
        ("", None),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_lines_of_all_kinds_have_the_same_clock(line: str, at_s: float | None) -> None:
    assert time_of(line.encode()) == at_s


@pytest.mark.parametrize("num_lines", [0, 1, 7, 5000])
def test_the_last_lines_are_those_at_the_end(tmp_path: Path, num_lines: int) -> None:
    lines = [f"line {number} {'x' * (number % 200)}" for number in range(3000)]
    (tmp_path / "a.log").write_text("".join(f"{line}\n" for line in lines))
    file = FollowedFile(tmp_path / "a.log")
    found = [line.text for line in file.last(num_lines, log_files.MAX_BYTES)]
    assert found == lines[len(lines) - min(num_lines, len(lines)) :]
    assert texts(file) == []


def test_no_more_is_read_than_may_be(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"y" * (20 << 20) + b"\nlast\n")
    assert [len(line.text) for line in FollowedFile(tmp_path / "a.log").last(2, 1 << 20)][-1] == 4
    held = sum(len(line.text) for line in FollowedFile(tmp_path / "a.log").last(1000, 1 << 20))
    assert held <= (1 << 20) + (64 << 10)


def test_files_are_merged_by_time_and_stacks_stay_together(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("2026-11-27T02:00:01Z a1\nTraceback\n  more\n2026-11-27T02:00:04Z a4\n")
    (tmp_path / "b.log").write_text("2026-11-27T02:00:02Z b2\n2026-11-27T02:00:03Z b3\n")
    files = [FollowedFile(tmp_path / f"{name}.log") for name in log_files.names(tmp_path)]
    assert [line.text.split()[-1] for line in merged(files, 5)] == ["Traceback", "more", "b2", "b3", "a4"]


def test_what_is_added_is_followed_into_the_next_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compose.log_lines.MAX_FILE_BYTES", 20)
    log = ProcessLog("a", tmp_path)
    log.write(b"before")
    file = FollowedFile(tmp_path / "a.log")
    assert [line.text for line in file.last(1, 100)] == ["before"]
    written = []
    for number in range(6):
        log.write(f"line {number} of this".encode())
        written += texts(file)
    assert (tmp_path / "a.log.1").exists(), "there was another file"
    assert written == [f"line {number} of this" for number in range(6)]
    (tmp_path / "a.log").unlink()
    assert texts(file) == []
    (tmp_path / "a.log").write_bytes(b"half")
    assert texts(file) == []
    with (tmp_path / "a.log").open("ab") as more:
        more.write(b" and half\n")
    assert texts(file) == ["half and half"]
    file.close()


def test_a_folder_without_logs_is_said(tmp_path: Path) -> None:
    with pytest.raises(StackRefused, match="there are no logs in"):
        log_files.names(tmp_path / "none")
