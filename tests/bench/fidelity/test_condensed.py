from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.evaluate.saved_run import Placed, Runs
from bench.fidelity.condensed import Condensed, File, read
from bench.replay.observations import InstancePoint
from shared.errors import BadRequest
from tests.bench.evaluate.runs import plan, run

DEEP = b'{"format":"blitzscale-fidelity.v1","more":' + b"[" * 100_000


def test_the_figures_of_a_run_without_what_the_trace_says() -> None:
    found = Condensed.of(run(ttft_s=0.1))
    assert found.figures.ttft_s == (0.1, 0.2, 0.3, None)
    assert found.figures.failed == 1
    assert [(event.at_s, event.direction, event.desired) for event in found.figures.events] == [(0.9, "out", 2)]
    assert found.figures.scale_out_s == ()
    kept = str(found)
    assert "due_s" not in kept
    assert "input_tokens" not in kept


def test_a_folder_of_runs_and_the_file_made_of_it_are_the_same(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    for repetition in range(2):
        runs.keep(run(plan(repetition=repetition)))
    runs.keep(run(plan(purpose="tuning")))
    found = read(tmp_path / "runs")
    assert [one.plan.repetition for one in found] == [0, 1]
    File(runs=found).write(tmp_path / "kept.json")
    assert read(tmp_path / "kept.json") == found


def test_a_file_has_a_line_for_each_run_and_few_digits(tmp_path: Path) -> None:
    found = Condensed.of(run(ttft_s=0.12345678, late_s=0.00123456))
    assert found.figures.ttft_s[0] == 0.123
    assert found.conditions.timer_late_p99_s == 0.0012
    File(runs=(found, found)).write(tmp_path / "kept.json")
    assert len((tmp_path / "kept.json").read_text().splitlines()) == 4


def test_a_void_run_is_kept_with_its_reasons(tmp_path: Path) -> None:
    found = Condensed.of(run(late_s=0.02))
    File(runs=(found,)).write(tmp_path / "kept.json")
    (again,) = read(tmp_path / "kept.json")
    assert "timers were late" in again.void[0]


@pytest.mark.parametrize("content", [None, b"", b'{"format": "other", "runs": []}', b'{"runs": []}', DEEP])
def test_what_has_no_runs_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "kept.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadRequest, match="kept"):
        read(file)


@pytest.mark.parametrize(
    "placed", [Placed(instances={8: "prefill"}, copies={}), Placed(instances={}, copies={-1: False})]
)
def test_instances_and_copies_are_on_workers_that_there_are(tmp_path: Path, placed: Placed) -> None:
    strange = msgspec.structs.replace(Condensed.of(run()), placed=placed)
    File(runs=(strange,)).write(tmp_path / "kept.json")
    with pytest.raises(BadRequest, match="has workers 0 to 7, and not"):
        read(tmp_path / "kept.json")


def test_a_folder_with_a_file_that_is_too_deep_names_it(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_bytes(DEEP)
    with pytest.raises(BadRequest, match=r"deep\.json is no run .*: move it away"):
        read(tmp_path)


def test_an_empty_folder_has_no_runs(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no finished run"):
        read(tmp_path)


def test_what_had_been_asked_for_when_the_replay_began() -> None:
    one = run()
    cluster = one.document.cluster
    assert cluster is not None
    begun = InstancePoint(0.0, {"prefill/serving": 2, "prefill/loading": 1, "decode/serving": 1, "decode/draining": 1})
    later = InstancePoint(3.0, {"prefill/serving": 3, "decode/serving": 1})
    seen = msgspec.structs.replace(one.document, cluster=replace(cluster, instances=(begun, later)))
    assert Condensed.of(msgspec.structs.replace(one, document=seen)).held == {"prefill": 3, "decode": 1}
