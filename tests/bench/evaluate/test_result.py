from __future__ import annotations

import io
from functools import cache

import msgspec
import pytest
from rich.console import Console

from bench.evaluate.figures import Judged
from bench.evaluate.measure import Found, Outcome, Setting
from bench.evaluate.models import find_model
from bench.evaluate.result import Summary, Summed
from bench.evaluate.windows import Window, Windows
from bench.lab.played import Played
from bench.replay.objectives import Slo
from bench.systems import find
from bench.traces.request import Trace
from tests.bench.evaluate.runs import plan, run

WINDOWS = (Window(100.0), Window(300.0))


@cache
def _summary(model: str = "llama3-8b") -> Summary:
    """Two windows, three repetitions; ``blitz`` is slower by a tenth of its number each repetition."""
    known = find_model(model)
    setting = Setting(
        trace=Trace("t.csv", ()),
        spread_seconds=False,
        model=known,
        systems=(find("blitz"), find("static-full")),
        windows=Windows(Window(0.0), WINDOWS),
        scale=0.5,
        repetitions=3,
        seed=0,
        workers=8,
        nic_gbps=0.25,
        lead_in_s=10.0,
        give_back_s=2.5,
    )
    runs = tuple(
        tuple(
            {
                "blitz": run(plan("blitz", repetition=r, window=window), ttft_s=0.1 * (1 + r)),
                "static-full": run(plan("static-full", repetition=r, window=window), late_s=0.1 if r == 2 else 0.0),
            }
            for window in WINDOWS
        )
        for r in range(3)
    )
    found = Found(scale_rate=0.5, highest=None, limited_by_machine=False, splits={}, steps=())
    played = Played.of(known.profile(), hidden_size=known.hidden_size, num_gpus=known.num_gpus, nic_gbps=0.25)
    return Summary(setting, Outcome(found, runs), played)


def test_the_document_has_the_named_figures_pooled_and_by_window() -> None:
    document = msgspec.to_builtins(_summary().document())
    keys = ("ttft_mean_s", "ttft_p99_s", "tbt_mean_s", "tbt_p99_s", "slo_attainment", "gpu_seconds")
    for systems in (document["systems"], *(window["systems"] for window in document["windows"])):
        assert list(systems) == ["blitz", "static-full"]
        for one in systems.values():
            assert {*keys, "host_cache_bytes_max", "requests", "failed", "intervals"} <= one.keys()
        assert [len(one["repetitions"]) for one in systems.values()] == [3, 2], "one has a void run"
    # Two windows of four requests, of which one failed; the median repetition.
    assert (document["systems"]["blitz"]["requests"], document["systems"]["blitz"]["failed"]) == (8, 2)
    assert document["systems"]["blitz"]["ttft_mean_s"] == pytest.approx(0.4)
    assert document["systems"]["static-full"]["void"] == 2
    assert len(document["runs"]) == 12


def test_each_repetition_is_judged_by_the_reference_in_it() -> None:
    """Five times 0.2 s: of ``blitz``'s times in the second repetition all are within, and one request failed."""
    blitz = _summary().pooled["blitz"]
    assert blitz.repetitions[1].slo_attainment == 0.75
    assert blitz.repetitions[2].slo_attainment is None, "the reference is void"
    assert blitz.repetitions[2].slo_attainment_absolute == 0.25
    assert blitz.medians is not None
    assert blitz.medians.slo_attainment == 0.75, "of the repetitions that have it"
    assert blitz.intervals["slo_attainment"].high == 0.75


def test_where_all_runs_are_void_there_are_no_figures() -> None:
    one = run(late_s=0.1)
    summed = Summed.of([[Judged(one, None, Slo(0.45, 0.15))]] * 2, seed=0, num_gpus=1)
    assert (summed.medians, summed.repetitions, summed.intervals, summed.void) == (None, (), {}, 2)
    assert summed.flat()["ttft_mean_s"] is None


def test_gpu_seconds_are_of_all_gpus_of_an_instance() -> None:
    small, large = (_summary(model).pooled["blitz"].repetitions[0] for model in ("llama3-8b", "qwen2.5-72b"))
    assert large.gpu_seconds == pytest.approx(4 * small.gpu_seconds)


def test_the_table_names_systems_and_void_runs() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(_summary().table())
    rows = {line.split()[0]: line.split() for line in console.export_text().splitlines() if line.strip()}
    # Lost, and void: the median repetition, and all of them.
    assert rows["blitz"][-2:] == ["2", "0"]
    assert rows["static-full"][-2:] == ["2", "2"]


def test_a_report_gets_every_system_in_every_window() -> None:
    labels = [document.label for document in _summary().replays()]
    assert labels == [f"{name}, {at} s" for at in (100, 300) for name in ("blitz", "static-full")]
