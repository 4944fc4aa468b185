from __future__ import annotations

import msgspec
import pytest

from bench.evaluate.figures import Judged, blocks, figures, intervals, medians, relative_slo
from bench.evaluate.saved_run import SavedRun
from bench.replay.document import RequestRow
from bench.replay.objectives import Slo
from tests.bench.evaluate.runs import SLO, plan, run


def _judged(relative: Slo | None = SLO, *, ttft_s: float = 0.1) -> Judged:
    return Judged(run(ttft_s=ttft_s), relative, SLO)


def _long(num_blocks: int, ttft_s: float) -> Judged:
    """A run with a request in each block of 10 s; every fifth takes five times as long."""
    short = run()
    rows = tuple(
        RequestRow(n, 10.0 * n, 0.0, ttft_s * (5 if n % 5 == 0 else 1), None, None, 1.0, 5, 1, None)
        for n in range(num_blocks)
    )
    result = msgspec.convert(
        msgspec.to_builtins(short.document.result) | {"planned": num_blocks}, type(short.document.result)
    )
    document = msgspec.structs.replace(short.document, records=rows, result=result)
    return Judged(run(found=document), SLO, SLO)


def test_failed_requests_miss_their_objectives_and_have_no_latency() -> None:
    found = figures([_judged()])
    assert (found.requests, found.failed) == (4, 1)
    assert found.ttft_mean_s == pytest.approx(0.2)
    assert found.tbt_mean_s == pytest.approx(0.025)
    # 0.1 and 0.2 s are within 0.25 s, 0.3 s is not, and one failed.
    assert found.slo_attainment == found.slo_attainment_absolute == 0.5


def test_without_the_reference_there_is_no_relative_attainment() -> None:
    assert figures([_judged(None)]).slo_attainment is None
    assert figures([_judged(), _judged(None)]).slo_attainment is None
    assert "slo_attainment" not in intervals([_judged(None)], seed=0, resamples=5)


def test_relative_objectives_are_five_times_the_means() -> None:
    slo = relative_slo(run())
    assert slo is not None
    assert slo.ttft_s == pytest.approx(1.0)
    assert slo.tbt_s == pytest.approx(0.125)


def test_runs_are_pooled_and_an_instances_gpus_count() -> None:
    one, two = figures([_judged()]), figures([_judged(), _judged(ttft_s=0.3)], num_gpus=4)
    assert two.requests == 8
    assert two.ttft_mean_s == pytest.approx(0.4)
    assert two.gpu_seconds == pytest.approx(8 * one.gpu_seconds)
    assert two.mean_instances == pytest.approx(one.mean_instances)
    assert two.host_cache_bytes_max == one.host_cache_bytes_max


def test_medians_are_of_each_figure() -> None:
    found = medians([figures([_judged(ttft_s=ttft_s)]) for ttft_s in (0.3, 0.1, 0.2)])
    assert found.ttft_mean_s == pytest.approx(0.4)
    assert found.requests == 4
    assert medians([figures([_judged()]), figures([_judged(None)])]).slo_attainment == 0.5, "of those that have it"
    assert medians([figures([_judged(None)])] * 2).slo_attainment is None


def test_blocks_are_of_ten_seconds_of_each_run() -> None:
    assert [block.requests for block in blocks([_judged(), _judged()])] == [4, 4]
    assert len(blocks([_long(30, 0.1)])) == 30


def test_intervals_hold_the_figure_and_narrow_with_more_blocks() -> None:
    def width(judged: Judged) -> float:
        found = intervals([judged], seed=1, resamples=60)["ttft_mean_s"]
        mean = figures([judged]).ttft_mean_s
        assert mean is not None
        assert found.low < mean < found.high
        return found.high - found.low

    assert width(_long(200, 0.1)) < 0.5 * width(_long(20, 0.1))
    assert intervals([_long(20, 0.1)], seed=1, resamples=9) == intervals([_long(20, 0.1)], seed=1, resamples=9)
    assert intervals([_long(20, 0.1)], seed=1, resamples=9) != intervals([_long(20, 0.1)], seed=2, resamples=9)


def test_repetitions_of_the_same_requests_do_not_narrow_an_interval() -> None:
    (once, often) = (intervals([_long(20, 0.1)] * n, seed=1, resamples=60)["ttft_mean_s"] for n in (1, 5))
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_a_run_that_completed_nothing_has_figures_all_the_same() -> None:
    saved: SavedRun = run(plan("sllm"))
    rows = tuple(msgspec.convert(msgspec.to_builtins(r) | {"failure": "x"}, RequestRow) for r in saved.document.records)
    document = msgspec.structs.replace(saved.document, records=rows)
    found = figures([Judged(msgspec.structs.replace(saved, document=document), None, SLO)])
    assert (found.ttft_mean_s, found.tbt_p99_s, found.slo_attainment_absolute) == (None, None, 0.0)
