from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.evaluate.saved_run import Runs, digest
from bench.evaluate.windows import Window
from bench.replay.document import read_document
from bench.traces.request import Trace, TraceRequest
from shared.errors import BadRequest
from tests.bench.evaluate.runs import plan, run


def test_a_run_is_found_again_whole(tmp_path: Path) -> None:
    runs, saved = Runs(tmp_path / "new"), run()
    assert runs.find(saved.plan) is None
    runs.keep(saved)
    found = runs.find(saved.plan)
    assert found is not None
    assert found == msgspec.structs.replace(saved, document=msgspec.structs.replace(saved.document, label="blitz"))
    assert [file.name for file in (tmp_path / "new").iterdir()] == [f"{saved.plan.name}.json"]


def test_a_run_of_other_settings_does_not_count(tmp_path: Path) -> None:
    runs, saved = Runs(tmp_path), run()
    runs.keep(saved)
    for changes in ({"digest": "other"}, {"settings": {}}, {"workers": 4}, {"seed": 1}):
        assert runs.find(msgspec.structs.replace(saved.plan, **changes)) is None
    for changes in ({"repetition": 1}, {"instances": {"prefill": 2, "decode": 1}}, {"window": Window(11.0, 30.0)}):
        assert runs.file(msgspec.structs.replace(saved.plan, **changes)) != runs.file(saved.plan)


def test_a_report_reads_the_file_of_a_run(tmp_path: Path) -> None:
    saved = run()
    Runs(tmp_path).keep(saved)
    assert read_document(tmp_path / f"{saved.plan.name}.json").records == saved.document.records


def test_a_file_that_is_no_run_is_named(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.file(plan()).write_text("{}")
    with pytest.raises(BadRequest, match=plan().name):
        runs.find(plan())


def test_instances_count_up_to_the_last_arrival() -> None:
    # One until 1 s, then two; the last request is due after 2.4 s, and the cluster is looked at for 3 s.
    assert run().mean_instances == pytest.approx((1.0 + 2 * 1.4) / 2.4)


def test_late_timers_make_a_run_void() -> None:
    assert not run().document.void
    (reason,) = run(late_s=0.006).document.void
    assert "6.0 ms" in reason


def test_the_digest_is_of_what_is_replayed() -> None:
    def trace(*arrivals: float) -> Trace:
        return Trace("t", tuple(TraceRequest(at_s, 1, 1) for at_s in arrivals))

    window = Window(100.0, 50.0)
    assert digest(trace(1, 95, 120, 200), window, 10.0) == digest(trace(2, 95, 120, 300), window, 10.0)
    assert digest(trace(95, 120), window, 10.0) != digest(trace(96, 120), window, 10.0)
    assert digest(trace(95, 120), window, 10.0) != digest(trace(95, 121), window, 10.0)
