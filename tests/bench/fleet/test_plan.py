"""What is asked."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from bench.fleet.plan import Setting, make_arrivals, partition
from shared.errors import BadRequest


def test_two_runs_of_one_setting_ask_the_same_and_other_seeds_something_else() -> None:
    assert make_arrivals(Setting(seed=3)) == make_arrivals(Setting(seed=3))
    assert make_arrivals(Setting(seed=3)) != make_arrivals(Setting(seed=4))


def test_requests_come_in_order_at_the_rate_with_a_burst_for_one_model_half_way() -> None:
    setting = Setting(models=8, workers=2, seconds=100.0, per_s=20.0, burst=50)
    arrivals = make_arrivals(setting)
    assert [a.number for a in arrivals] == list(range(len(arrivals)))
    assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)
    assert abs(len(arrivals) - 50 - 2000) < 200
    half_way = Counter(a.model for a in arrivals if 50.0 <= a.at_s < 50.5)
    ((_, most),) = half_way.most_common(1)
    assert most >= 50


def test_who_is_popular_rotates() -> None:
    setting = Setting(models=9, workers=3, seconds=30.0, per_s=50.0, rotate_s=10.0, burst=0)
    tops = []
    for first_s in (0.0, 10.0, 20.0):
        counts = Counter(a.model for a in make_arrivals(setting) if first_s <= a.at_s < first_s + 10.0)
        tops.append(counts.most_common(1)[0][0])
    assert tops == ["model-00", "model-03", "model-06"]


def test_each_model_has_one_worker_of_a_partition() -> None:
    setting = Setting(models=20, workers=6)
    shares = partition(setting)
    assert sorted(name for share in shares for name in share) == sorted(setting.names)
    assert {len(share) for share in shares} == {3, 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"models": 1},
        {"workers": 0},
        {"workers": 21},
        {"seconds": 0.0},
        {"seconds": math.inf},
        {"per_s": 0.0},
        {"per_s": math.inf},
        {"rotate_s": math.nan},
        {"burst": -1},
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(BadRequest):
        Setting(**fields)  # type: ignore[arg-type]
