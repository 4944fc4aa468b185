from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.lab import system
from bench.scaleout.result import GIB, Result, Run
from shared.messages.scaling import ScaleRecord, TargetRecord


def run(strategy: str, count: int, seconds: float, *, cpu_s: float = 1.0) -> Run:
    page_cache = "warm" if strategy == "disk" else ""
    targets = tuple((f"worker-{i}", 10.0, seconds * 1000 - 5, seconds * 1000) for i in range(1, count + 1))
    return Run(strategy, count, seconds, seconds - 0.015, cpu_s, count * GIB // 8, (GIB,) * count, targets, page_cache)


RESULT = Result(
    num_hosts=4,
    rate_gbps=1.0,
    model_bytes=125_000_000,
    goodput_gbps=(0.5, 0.8, 0.9),
    runs=(run("chain", 1, 1.3), run("chain", 3, 1.5), run("chain", 1, 1.2), run("chain", 1, 9.0), run("disk", 3, 0.1)),
    worker_env=(),
)


def test_the_ideal_is_what_plain_tcp_gave_in_the_same_run() -> None:
    assert RESULT.nominal_s == pytest.approx(1.0)
    assert RESULT.ideal_s == pytest.approx(1.25)


def test_times_are_medians_by_number_of_targets() -> None:
    document = json.loads(json.dumps(RESULT.document()))
    assert document["chain_s"] == {"1": 1.3, "3": 1.5}
    assert document["disk_s"] == {"3": 0.1}
    assert document["chain_of_ideal"] == {"1": 1.04, "3": 1.2}
    assert document["chain_line_share"]["3"] == pytest.approx(1 / 1.5, abs=1e-4)
    assert document["chain_cpu_s_per_gib"]["1"] == 8.0
    assert document["page_cache"] == "warm"
    assert "disk_line_share" not in document


def test_cached_host_bytes_are_said_to_be_none_and_why() -> None:
    document = RESULT.document()
    assert document["host_bytes_cached"] == 0
    assert "host copy" in document["host_bytes_cached_why"]


def test_a_run_takes_the_slowest_target() -> None:
    targets = tuple(
        TargetRecord(worker_id=f"w{i}", instance_id="i", first_byte_ms=first, loaded_ms=loaded, serving_ms=serving)
        for i, first, loaded, serving in ((1, 10.0, 900.0, 901.0), (2, 50.0, 910.0, 930.0))
    )
    record = ScaleRecord(
        plan_id="p",
        model="m",
        status="done",
        direction="out",
        desired=3,
        reason="",
        triggered_at_s=0.0,
        targets=targets,
        bytes=2 * GIB,
    )
    made = Run.of("chain", record, 4.0, (1, 2), "")
    assert (made.num_targets, made.seconds, made.transfer_s, made.cpu_s_per_gib) == (2, 0.93, 0.89, 2.0)


def test_without_root_the_benchmark_says_so_and_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "missing", lambda: "the lab needs root")
    result = CliRunner().invoke(app, ["scaleout", "--hosts", "2"])
    assert result.exit_code == 0
    assert "skipped: the lab needs root" in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rate", "quick"], "quick"),
        (["--hosts", "1"], "not 1"),
        (["--mib", "3"], "not 3"),
        (["--strategy", "ring"], "ring"),
        (["--worker-env", "UCX"], "UCX"),
    ],
)
def test_settings_that_no_lab_has_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str
) -> None:
    monkeypatch.setattr(system, "missing", lambda: "")
    result = CliRunner().invoke(app, ["scaleout", *arguments])
    assert result.exit_code == 2
    assert named in result.output
