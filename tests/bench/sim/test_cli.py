"""``blitzscale simulate``: what cannot be simulated is a line and exit code 2, at once; what can gives a document."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.sim import evaluation
from bench.sim.cli import app
from bench.sim.run import simulate
from bench.sim.run_result import RunResult

HEADER = "arrival_s,input_tokens,output_tokens\n"
CLUSTER = {
    "hosts": "2", "gpus_per_host": "2", "gpus_per_domain": "2", "scale_up_gbps": "1600.0", "nics_per_host": "2",
    "nic_gbps": "100.0", "host_link_gbps": "128.0", "ssds_per_host": "2", "ssd_gbps": "10.0", "hosts_per_leaf": "2",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "0.5,100,5\n0.2,200,6\n0.7,10,0\n1.0,300,4\n")
    return path


def cluster_file(folder: Path, **keys: str) -> str:
    path = folder / "cluster.toml"
    path.write_text('name = "mine"\n' + "".join(f"{key} = {value}\n" for key, value in (CLUSTER | keys).items()))
    return str(path)


def failed(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.output.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cluster", "c"), "no cluster 'c': there are a, b"),
        (("--cluster", "nowhere/c.toml"), "nowhere/c.toml cannot be read"),
        (("--cluster", "lab", "--model", "qwen2.5-72b"), "not joined 4 at a time"),
        (("--model", "gpt"), "no model 'gpt': there are llama3-8b"),
        (("--degree", "3"), "llama3-8b on 3 GPUs has no profile"),
        (("--systems", "blitz,bltz"), "no system 'bltz'"),
        (("--systems", "sllm--1s"), "no system 'sllm--1s'"),
        (("--systems", ",,"), "name a system"),
        (("--systems", ""), "name a system"),
        (("--systems", "sllm,sllm-300s"), "sllm and sllm-300s are the same system"),
        (("--png", "x.xyz"), "figures are drawn as PNG (--png FILE.png) or HTML (--html FILE.html), not as '.xyz'"),
        (("--profile", "none.json"), "none.json: cannot be read"),
        (("--compute", "0"), "--compute is a positive number, not 0.0"),
        (("--compute", "nan"), "--compute"),
        (("--seed", "-1"), "--seed is at least 0, not -1"),
        (("--scale-rate", "whole"), "--scale-rate is a number or 'half', not 'whole'"),
        (("--scale-rate", "-2"), "positive number"),
        (("--scale-rate", "nan"), "positive number"),
        (("--start-at", "100"), "no requests between 100 s and inf s"),
        (("--window", "0"), "window_s must be positive"),
        (("--max-requests", "0"), "max_requests must be at least 1"),
        (("--synthetic", "azure-code"), "not both"),
        (("--slo-ttft", "0"), "--slo-ttft must be positive"),
        (("--slo-attainment", "99"), "--slo-attainment is a share"),
        (("--gpu-hour-price", "-1"), "--gpu-hour-price is a positive number"),
        (("--what-if", "racks=2"), "hosts, nic-gbps, keep-copies, give-back or all"),
        (("--what-if", "hosts=1,many"), "'many' is no number of hosts"),
        (("--what-if", "keep-copies=60", "--systems", "blitz"), "of blitz none keeps copies"),
        (("--what-if", "give-back=soon"), "'soon' is no number of seconds"),
        (("--what-if", "give-back", "--systems", "static-full"), "of static-full none gives instances back"),
        (("--json", "/tmp"), "/tmp is a directory"),
        (("--html", "/tmp"), "/tmp is a directory"),
        (("--json", "/nowhere/else/file.json"), "no such directory: /nowhere/else"),
    ],
)
def test_what_cannot_be_is_a_line(trace: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in failed(str(trace), *arguments)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "empty"),
        (HEADER, "no requests"),
        (HEADER + "0,0,5\n", "no requests (1 rows without tokens)"),
        (HEADER + "0,5,5\n-1,5,5\n", "line 3, column 'arrival_s'"),
        (HEADER + "0,5,many\n", "line 2, column 'output_tokens'"),
        ("a,b\n1,2\n", "no known trace format"),
    ],
)
def test_so_is_a_trace_that_is_none(tmp_path: Path, rows: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(rows)
    assert said in failed(str(path))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"hosts": "0"}, "hosts is 0: at least 1"),
        ({"nics_per_host": "4"}, "cannot be shared out evenly"),
        ({"hosts_per_leaf": "3"}, "a leaf of 3 hosts, but 2 in all"),
        ({"gpu": '"b200"'}, "there are those of a100, h100"),
        ({"gpu_memory_gib": "8.0"}, "there is no room for KV"),
        ({"host_memory_gib": "8.0"}, "has 8 GiB for copies"),
        ({"racks": "2"}, "racks"),
        ({"hosts": '"two"'}, "hosts"),
    ],
)
def test_so_is_a_cluster_that_cannot_be(trace: Path, tmp_path: Path, keys: dict[str, str], said: str) -> None:
    assert said in failed(str(trace), "--cluster", cluster_file(tmp_path, **keys))


def test_a_rate_is_not_halved_where_no_prompt_can_be_in_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "0,8000,5\n1,8000,5\n")
    assert "computes no prompt in 450 ms" in failed(str(path), "--scale-rate", "half")


def test_a_result_that_cannot_be_written_is_a_line(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: Path, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    json_file = str(trace.with_suffix(".json"))
    result = CliRunner().invoke(app, [str(trace), "--systems", "blitz", "--json", json_file])
    assert result.exit_code == 1
    assert f"{json_file} cannot be written: No space left on device" in result.output.replace("\n", "")


def test_a_name_is_no_markup(trace: Path, tmp_path: Path) -> None:
    path = Path(cluster_file(tmp_path))
    path.write_text(path.read_text().replace("mine", "[/x] [red]y"))
    result = CliRunner().invoke(app, [str(trace), "--systems", "blitz", "--cluster", str(path)])
    assert "on cluster [/x] [red]y" in result.output


def test_whose_means_the_objectives_are_of_is_said(trace: Path) -> None:
    page = trace.with_suffix(".html")
    arguments = [str(trace), "--systems", "blitz", "--html", str(page)]
    own = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).output
    assert "5x: the means of blitz, not of static-full" in " ".join(own.split())
    assert "Simulated, not measured: llama3-8b on cluster a, 32 GPUs." in page.read_text()
    full = CliRunner().invoke(app, [str(trace), "--systems", "static-colocated-full,static-full"]).output
    assert "5x: the means" not in full


def test_one_gpu_is_too_few_for_prompts_and_tokens(trace: Path, tmp_path: Path) -> None:
    one = dict.fromkeys(("hosts", "gpus_per_host", "gpus_per_domain", "nics_per_host", "ssds_per_host"), "1")
    path = tmp_path / "cluster.toml"
    lines = {key: value for key, value in (CLUSTER | one | {"hosts_per_leaf": "1"}).items() if key != "scale_up_gbps"}
    path.write_text('name = "one"\n' + "".join(f"{key} = {value}\n" for key, value in lines.items()))
    assert "blitz needs 2 instances of 1 GPU, and cluster 'one' has 1 GPU" in failed(
        str(trace), "--cluster", str(path), "--systems", "blitz"
    )
    result = CliRunner().invoke(app, [str(trace), "--cluster", str(path), "--systems", "static-colocated-full"])
    assert result.exit_code == 0, result.output


def test_the_result_says_what_the_trace_had_besides(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [str(trace), "--cluster", cluster_file(tmp_path), "--systems", "sllm,static-full", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "1 rows without tokens" in result.output
    assert "1 rows out of order" in result.output
    written = json.loads(out.read_bytes())
    assert (written["requests"], written["skipped_rows"], written["unsorted_rows"]) == (3, 1, 1)
    assert list(written["systems"]) == ["sllm", "static-full"]
    assert written["slo_of"] == "static-full"
    assert "what_if" not in written
    shown = [line for line in result.output.splitlines() if line.strip()]
    assert max(map(len, shown)) <= 80


def test_what_had_finished_before_ctrl_c_is_kept(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def until_allcache(setup, system, *arguments, **settings) -> RunResult:  # type: ignore[no-untyped-def]
        if system.name == "allcache":
            raise KeyboardInterrupt
        return simulate(setup, system, *arguments, **settings)

    monkeypatch.setattr(evaluation, "simulate", until_allcache)
    out = tmp_path / "out.json"
    arguments = [str(trace), "--cluster", cluster_file(tmp_path), "--what-if", "hosts", "--json", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--systems", "sllm,allcache,blitz"])
    assert result.exit_code == 130, result.output
    written = json.loads(out.read_bytes())
    assert (list(written["systems"]), written["interrupted"]) == (["sllm"], True)
    assert "what_if" not in written
    # Nothing had: there is nothing to write.
    out.unlink()
    result = CliRunner().invoke(app, [*arguments, "--systems", "allcache,blitz"])
    assert result.exit_code == 130
    assert "nothing had finished" in result.output
    assert not out.exists()


def test_a_sweep_gives_points_and_answers_and_keeps_what_it_has(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, int]] = []

    def counted(setup, system, *arguments, **settings) -> RunResult:  # type: ignore[no-untyped-def]
        if len(runs) == 6:
            raise KeyboardInterrupt
        runs.append((system.name, setup.cluster.hosts))
        return simulate(setup, system, *arguments, **settings)

    monkeypatch.setattr(evaluation, "simulate", counted)
    out = tmp_path / "out.json"
    arguments = [
        str(trace), "--cluster", cluster_file(tmp_path), "--systems", "sllm,blitz-colocated", "--json", str(out),
        "--what-if", "hosts=1,2", "--what-if", "keep-copies=60,300", "--gpu-hour-price", "2", "--slo-ttft", "500",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    # What the cluster as it is has given is not simulated again: sllm keeps copies for 300 s, and the file has 2 hosts.
    assert runs == [
        ("sllm", 2), ("blitz-colocated", 2), ("sllm-60s", 1), ("sllm-300s", 1), ("blitz-colocated", 1), ("sllm-60s", 2),
    ]  # fmt: skip
    written = json.loads(out.read_bytes())
    assert [(p["system"], p["hosts"], p["keep_copies"]) for p in written["what_if"]] == [
        ("sllm", 1, "60"), ("sllm", 1, "300"), ("sllm", 2, "60"), ("sllm", 2, "300"),
        ("blitz-colocated", 1, None), ("blitz-colocated", 2, None),
    ]  # fmt: skip
    assert written["what_if_slo"]["ttft_s"] == 0.5
    base = written["systems"]["blitz-colocated"]
    same = written["what_if"][-1]
    assert {key: same[key] for key in base} == base
    assert same["cost"] == pytest.approx(same["gpu_seconds"] / 1800)
    assert written["what_if_answers"]["sllm"]["met"] is True
    assert "sllm: the cheapest is 1 host (2 GPUs) with NICs of 100 Gbit/s" in result.output.replace("\n", " ")
    # The seventh run is interrupted.
    arguments[arguments.index("hosts=1,2")] = "hosts=1,2,4"
    runs.clear()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    written = json.loads(out.read_bytes())
    assert (len(written["what_if"]), written["what_if_left_out"]) == (6, 3)


def test_a_sweep_of_times_to_give_back_compares_systems(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, float]] = []

    def counted(setup, system, *arguments, **settings) -> RunResult:  # type: ignore[no-untyped-def]
        runs.append((system.name, setup.give_back_s))
        return simulate(setup, system, *arguments, **settings)

    monkeypatch.setattr(evaluation, "simulate", counted)
    out = tmp_path / "out.json"
    arguments = [
        str(trace), "--cluster", cluster_file(tmp_path), "--systems", "blitz-colocated,static-colocated-half",
        "--json", str(out), "--what-if", "give-back=0,5,60",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    # Those that do not scale are what they are, as large as the other is with the time of --give-back.
    assert runs == [
        ("blitz-colocated", 60.0), ("static-colocated-half", 60.0), ("blitz-colocated", 0.0), ("blitz-colocated", 5.0),
    ]  # fmt: skip
    written = json.loads(out.read_bytes())
    assert [(p["system"], p["give_back_s"], p["give_back_by_rule"]) for p in written["what_if"]] == [
        ("blitz-colocated", pytest.approx(2.57, abs=0.01), True), ("blitz-colocated", 5.0, False),
        ("blitz-colocated", 60.0, False), ("static-colocated-half", None, False),
    ]  # fmt: skip
    assert [needed["level"] for needed in written["what_if_needed"]] == [0.9, 0.95, 0.97, 0.98, 0.99]
    assert list(written["what_if_needed"][0]["points"]) == ["blitz-colocated", "static-colocated-half"]
    said = [line for line in result.output.splitlines() if line.startswith("99 % within the objectives: blitz-col")]
    assert len(said) == 1
