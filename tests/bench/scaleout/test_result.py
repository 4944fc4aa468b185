from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.lab import system
from bench.scaleout.background import Background, BackgroundRun
from bench.scaleout.result import GIB, Result, Run
from bench.scaleout.rows import CHAIN, DISK, DISK_COLD, HOST_CACHE, HOST_CACHE_MISS, Row
from shared.messages.operations import ScaleRecord, TargetRecord

MODEL_BYTES = 125_000_000


def run(row: Row, count: int, seconds: float, *, host_bytes: int = MODEL_BYTES) -> Run:
    targets = tuple((f"worker-{i}", 10.0, seconds * 1000 - 5, seconds * 1000) for i in range(1, count + 1))
    return Run(
        row=row,
        num_targets=count,
        seconds=seconds,
        transfer_s=seconds - 0.015,
        cpu_s=1.0,
        num_bytes=count * GIB // 8,
        received_bytes=(GIB,) * count,
        sent_bytes=(GIB,) * count + (0,),
        targets=targets,
        local=(),
        host_bytes=host_bytes,
        explain=("because",),
    )


def background_run(mode: str, scale_s: float, during_gbps: float) -> BackgroundRun:
    return BackgroundRun(
        mode=mode,
        undisturbed_s=1.0,
        scale_s=scale_s,
        stream_before_gbps=0.8,
        stream_during_gbps=during_gbps,
        stream_lowest_gbps=during_gbps / 2,
        busy_source_share=0.0,
    )


RUNS = (
    run(CHAIN, 1, 1.3),
    run(CHAIN, 3, 1.5),
    run(CHAIN, 1, 1.2),
    run(CHAIN, 1, 9.0),
    run(DISK, 3, 0.1),
    run(DISK_COLD, 3, 0.4),
    run(HOST_CACHE_MISS, 3, 0.5, host_bytes=4 * MODEL_BYTES),
    run(HOST_CACHE, 3, 0.05, host_bytes=4 * MODEL_BYTES),
)
RESULT = Result(
    num_hosts=4,
    rate_gbps=1.0,
    model_bytes=MODEL_BYTES,
    goodput_gbps=(0.5, 0.8, 0.9),
    runs=RUNS,
    worker_env=(),
)


def test_the_ideal_is_what_plain_tcp_gave_in_the_same_run() -> None:
    assert RESULT.nominal_s == pytest.approx(1.0)
    assert RESULT.ideal_s == pytest.approx(1.25)


def test_times_are_medians_by_number_of_targets() -> None:
    document = json.loads(json.dumps(RESULT.document()))
    assert document["chain_s"] == {"1": 1.3, "3": 1.5}
    assert document["disk_s"] == {"3": 0.1}
    assert document["disk_cold_s"] == {"3": 0.4}
    assert (document["host_cache_miss_s"], document["host_cache_s"]) == ({"3": 0.5}, {"3": 0.05})
    assert document["chain_of_ideal"] == {"1": 1.04, "3": 1.2}
    assert document["chain_line_share"]["3"] == pytest.approx(1 / 1.5, abs=1e-4)
    assert document["chain_cpu_s_per_gib"]["1"] == 8.0
    assert "disk_line_share" not in document
    assert "background" not in document


def test_host_memory_is_counted_apart_for_the_strategy_that_caches() -> None:
    document = RESULT.document()
    assert document["host_bytes_cached"] == MODEL_BYTES
    assert document["host_cache_bytes_cached"] == 4 * MODEL_BYTES


def test_without_the_caching_strategy_nothing_is_said_of_its_memory() -> None:
    result = Result(
        num_hosts=4, rate_gbps=1.0, model_bytes=MODEL_BYTES, goodput_gbps=(0.9,), runs=RUNS[:2], worker_env=()
    )
    assert "host_cache_bytes_cached" not in result.document()
    assert result.document()["host_bytes_cached"] == MODEL_BYTES


def test_ratios_beside_a_stream_are_medians_by_mode() -> None:
    background = Background(
        (
            background_run("planned", 1.1, 0.8),
            background_run("planned", 1.0, 0.76),
            background_run("planned", 4.0, 0.1),
            background_run("naive", 2.0, 0.4),
        )
    )
    document = background.document()
    assert document["planned"]["stream_ratio"] == pytest.approx(0.95)
    assert document["planned"]["scale_ratio"] == pytest.approx(1.1)
    assert document["naive"]["stream_ratio"] == pytest.approx(0.5)
    assert document["naive"]["scale_ratio"] == pytest.approx(2.0)
    assert len(document["planned"]["runs"]) == 3


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
    made = Run.of(CHAIN, record, cpu_s=4.0, received_bytes=(1, 2), sent_bytes=(3,), local=(), host_bytes=0)
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
        (["--hosts", "3", "--background"], "not 3"),
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
