from __future__ import annotations

import pytest

from bench.live.modes import ZIGZAG
from bench.live.timeline import Timeline
from tests.bench.live.samples import TRIGGER_S, live_record


def timeline() -> Timeline:
    return Timeline.of(live_record(ZIGZAG), trigger_s=TRIGGER_S, loaded_s=0.1, first_tokens_s=(0.12, 0.04, 0.06, 0.05))


def test_layers_begin_when_the_pair_did_and_count_from_the_burst() -> None:
    assert timeline().start_s == pytest.approx(0.025)
    assert timeline().ended_s == pytest.approx(0.15)
    assert timeline().layers == (6, 10, 3)


def test_only_whole_buckets_before_the_end_are_counted() -> None:
    # Buckets end at 0.075, 0.125 and 0.175 s.
    assert timeline().layers_per_s(0.13) == pytest.approx(16 / 0.1)
    assert timeline().layers_per_s(0.125) == pytest.approx(16 / 0.1)
    assert timeline().layers_per_s(0.12) == pytest.approx(6 / 0.05)
    assert timeline().layers_per_s(0.05) is None


def test_first_tokens_are_counted_per_bucket_from_the_burst() -> None:
    assert timeline().first_tokens == (1, 2, 1)
    assert timeline().first_tokens_s == (0.04, 0.05, 0.06, 0.12)


def test_without_a_pair_no_layers_are_known() -> None:
    alone = Timeline.of(None, trigger_s=0.0, loaded_s=0.1, first_tokens_s=(0.2,))
    assert alone.layers == ()
    assert alone.layers_per_s(1.0) is None
    assert alone.document()["ended_s"] is None
    assert sum(alone.document()["first_tokens"]) == 1
