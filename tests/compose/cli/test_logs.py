from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compose.cli import run
from compose.log_lines import ProcessLog
from tests.compose.cli.test_commands import one_error_line


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "gateway.log").write_text("2026-11-27T02:00:01Z one\n2026-11-27T02:00:03Z three\n")
    (folder / "worker-0.log").write_text("2026-11-27T02:00:02Z two\n")
    (folder / "gateway.log.1").write_text("2026-11-26T02:00:00Z before\n")
    return tmp_path


def test_all_are_printed_by_time_and_one_as_it_is(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "--state-dir", str(state)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "gateway  | 2026-11-27T02:00:01Z one",
        "worker-0 | 2026-11-27T02:00:02Z two",
        "gateway  | 2026-11-27T02:00:03Z three",
    ]
    assert run(["logs", "gateway", "-n", "1", "--state-dir", str(state)]) == 0
    assert capsys.readouterr().out == "2026-11-27T02:00:03Z three\n"
    assert run(["logs", "--lines", "1", "--json", "--state-dir", str(state)]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "gateway"


def test_an_unknown_service_is_refused_with_those_that_there_are(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["logs", "../lock", "--state-dir", str(state)]) == 1
    assert one_error_line(capsys).endswith("there are: gateway, worker-0")


def test_following_shows_new_lines_new_files_and_new_processes_until_ctrl_c(state: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "compose", "logs", "-f", "--state-dir", str(state)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("one\n")
        for name in ("gateway", "worker-1"):  # the former is taken to another file, the latter is new
            log = ProcessLog(name, state / "logs")
            log.write(f"of {name}".encode())
            log.close()
            while (line := process.stdout.readline()) and not line.endswith(f"of {name}\n"):
                pass
            assert line.startswith(name)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors
