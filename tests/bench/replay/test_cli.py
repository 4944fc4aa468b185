from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest
import typer
from typer.testing import CliRunner

from bench.replay.cli import app
from shared.messages.admin import InstanceStatus, ModelStatus, PoolStatus, PoolTotals, Status
from tests.bench.fake_server import fake_server
from tests.wait_until import eventually

ROOT = Path(__file__).parents[3]


def _trace_file(tmp_path: Path, rows: int, every_s: float = 0.02) -> Path:
    path = tmp_path / "trace.csv"
    lines = "".join(f"{index * every_s:.3f},20,5\n" for index in range(rows))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + lines)
    return path


async def _run(*arguments: str, interrupt_when: Callable[[], object] | None = None) -> tuple[int, str, str]:
    """Run the command as a process of its own: the fake server needs this one's event loop."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from bench.replay.cli import app; app()",
        *arguments,
        stdout=PIPE,
        stderr=PIPE,
        cwd=ROOT,
        env={**os.environ, "BLITZ_API_KEY": "secret", "COLUMNS": "120"},
        # A test run in the background of a shell ignores SIGINT, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    if interrupt_when is not None:
        await eventually(interrupt_when)
        process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_replays_a_file_and_writes_the_figures(tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    trace = _trace_file(tmp_path, rows=6)
    async with fake_server(lambda n: "429" if n == 2 else "ok", max_model_len=16) as server:
        status, out, err = await _run(
            str(trace), "--url", server.url, "--json", str(result_file), "--sample-outputs", "6", "--speed", "2"
        )
    assert status == 0, err
    assert "completed" in out
    assert "first token (TTFT)" in out
    assert "secret" not in out + err
    assert server.authorizations[0] == "Bearer secret"
    document = json.loads(result_file.read_text())
    assert document["failures"] == {"http_429": 1}
    assert (document["completed"], document["failed"], document["shortened"]) == (5, 1, 6)
    assert document["input_tokens"] == 5 * 11
    assert document["output_tokens"] == 5 * 5
    for key in ("ttft_s", "tbt_s", "e2e_s"):
        assert set(document[key]) == {"count", "mean", "p50", "p99", "max"}
    assert {"model", "url", "trace", "output_tokens_per_s", "duration_s"} <= set(document)
    assert len(document["records"]) == 6
    assert len(document["samples"]) == 5
    assert document["cluster"] is None
    assert "6 of 6 requests were made shorter" in document["void"][-1]
    assert "void: 6 of 6" in err
    assert len(document["samples"][0]["prompt_token_ids"]) == 11


async def test_objectives_figures_and_a_cluster_that_is_ours(tmp_path: Path) -> None:
    admin = {
        "/admin/status": Status(
            models=(ModelStatus(name="fake", weights_bytes=7),),
            instances=(InstanceStatus(id="i", model="fake", state="serving", workers=("w0", "w1")),),
        ),
        "/admin/pool": PoolStatus(models=(), totals=PoolTotals(host_bytes=7)),
    }
    files = [tmp_path / name for name in ("r.json", "r.png")]
    async with fake_server(gap_s=0.01, admin=admin) as server:
        status, out, err = await _run(
            str(_trace_file(tmp_path, rows=4, every_s=0.1)), "--url", server.url, "--scale-rate", "2",
            "--slo-ttft", "20000", "--slo-tbt", "0.001", "--until", "1",
            "--json", str(files[0]), "--png", str(files[1]),
        )  # fmt: skip
    assert status == 0, err
    document = json.loads(files[0].read_text())
    assert (document["completed"], document["scale_rate"]) == (8, 2.0)
    assert (document["slo"]["ttft_share"], document["slo"]["share"]) == (1.0, 0.0)
    assert document["cluster"]["gpu_seconds"] == pytest.approx(2.0)
    assert document["cluster"]["host_cache_max_bytes"] == 7
    assert document["cluster"]["nic_bytes"] is None
    assert "GPU seconds" in out
    assert files[1].read_bytes().startswith(b"\x89PNG")


async def test_an_interrupt_prints_and_writes_what_was_measured(tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    async with fake_server(lambda n: "ok" if n == 0 else "silent") as server:
        status, out, err = await _run(
            str(_trace_file(tmp_path, rows=3)), "--url", server.url, "--json", str(result_file), "--timeout", "600",
            # The third one is sent when the answer to the first has been read.
            "--concurrency-limit", "2",
            interrupt_when=lambda: len(server.bodies) == 3 and server.running == 2,
        )  # fmt: skip
    assert status == 130
    assert "void: interrupted: 2 of 3" in err
    document = json.loads(result_file.read_text())
    assert (document["completed"], document["unfinished"], document["cluster"]) == (1, 2, None)
    assert "interrupted" in err
    assert "1 of 3" in out
    assert "unfinished" in out
    assert "Traceback" not in err


async def test_no_completed_request_is_a_failure(tmp_path: Path) -> None:
    async with fake_server(lambda n: "429") as server:
        status, _, err = await _run(str(_trace_file(tmp_path, rows=2)), "--url", server.url)
    assert status == 1
    assert "queue full" in err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--synthetic", "burstgpt", "--url", "http://127.0.0.1:1"], 1, "cannot be reached"),
        (["absent.csv", "--speed", "2"], 2, "no such file"),
        ([], 2, "trace file or --synthetic"),
        (["x.csv", "--synthetic", "burstgpt"], 2, "not both"),
        (["--synthetic", "other"], 2, "azure-code"),
        (["--synthetic", "burstgpt", "--url", "ftp://x"], 2, "ftp://x"),
        (["--synthetic", "burstgpt", "--speed", "0"], 2, "speed"),
        (["--synthetic", "burstgpt", "--json", "/absent/dir/x.json"], 2, "/absent/dir"),
        (["--synthetic", "burstgpt", "--scale-rate", "0"], 2, "positive number"),
        (["--synthetic", "burstgpt", "--slo-ttft", "0"], 2, "--slo-ttft"),
        (["--synthetic", "burstgpt", "--until", "-1"], 2, "--until"),
    ],
)
def test_refusals_say_what_was_wrong(arguments: list[str], status: int, words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status
    assert words in result.output


def test_works_as_a_group_of_another_command() -> None:
    top = typer.Typer()
    top.add_typer(app, name="replay")
    result = CliRunner().invoke(top, ["replay", "absent.csv", "--url", "http://127.0.0.1:1", "--speed", "3"])
    assert result.exit_code == 2
    assert "absent.csv" in result.output
