"""Which settings are not beaten, and which is the cheapest that will do."""

from __future__ import annotations

import pytest

from bench.sim.frontier import Point, answer, marked, needed


def point(paid: float, share: float, p99_s: float | None = 0.2, **settings: object) -> Point:
    given = {
        "system": "blitz", "hosts": 1, "num_gpus": 8, "nic_gbps": 100.0, "keep_copies": None, "cost": None,
        "give_back_s": 60.0, "give_back_by_rule": False,
        "ttft_mean_s": 0.1, "ttft_p50_s": 0.1, "ttft_p99_s": p99_s, "tbt_mean_s": 0.01, "tbt_p99_s": 0.02,
        "slo_attainment": 1.0, "slo_attainment_absolute": share, "gpu_seconds": paid, "gpu_seconds_by_role": {},
        "host_cache_bytes_max": 0, "nic_bytes": {}, "requests": 1, "failed": 0, "unfinished": 0, "scale_outs": 0,
        "scale_out_p50_s": None, "scale_out_max_s": None, "mean_gpus": 1.0, "paid_gpu_seconds": paid,
        "keeps_objectives": share >= 0.99,
    }  # fmt: skip
    return Point(**(given | settings))  # type: ignore[arg-type]


def test_a_point_is_on_the_frontier_if_no_other_is_cheaper_and_as_good() -> None:
    points = marked([point(100, 0.9), point(120, 0.9), point(150, 0.99), point(200, 0.98, 0.1), point(90, 0.5)])
    assert [one.frontier for one in points] == [True, False, True, False, True]
    assert [one.frontier_ttft for one in points] == [False, False, False, True, True]


def test_equals_are_both_on_it_and_other_systems_do_not_count() -> None:
    points = marked([point(100, 0.9), point(100, 0.9), point(50, 1.0, system="sllm")])
    assert [one.frontier for one in points] == [True, True, True]


def test_what_served_nothing_is_on_no_frontier_of_latency() -> None:
    (one,) = marked([point(1, 0.0, None)])
    assert (one.frontier, one.frontier_ttft) == (True, False)


def test_the_cheapest_that_keeps_the_objectives_is_the_answer() -> None:
    found = answer([point(100, 0.9), point(150, 0.992, cost=3.0), point(200, 1.0)], 0.99)
    assert found.met
    assert found.point.paid_gpu_seconds == 150
    assert found.text == (
        "blitz: the cheapest is 1 host (8 GPUs) with NICs of 100 Gbit/s, instances given back after 60 s: 99.20% "
        "within the objectives for 150 GPU s, which cost 3.00; TTFT p99 200 ms"
    )


def test_costs_that_hardly_differ_leave_the_choice_to_gpus_and_links() -> None:
    large = point(100.0, 1.0, num_gpus=32, hosts=4, nic_gbps=25.0)
    fast = point(100.5, 1.0, nic_gbps=400.0)
    assert answer([large, fast, point(100.9, 1.0)], 0.99).point.nic_gbps == 100.0
    assert answer([large, point(102.0, 1.0)], 0.99).point is large


def test_otherwise_the_nearest_is() -> None:
    found = answer([point(100, 0.9), point(150, 0.95, keep_copies="60"), point(170, 0.95)], 0.99)
    assert not found.met
    assert found.text.startswith(
        "blitz: no setting keeps the objectives for 99 % of the requests; the nearest is 1 host"
    )
    assert found.point.keep_copies == "60"
    with pytest.raises(ValueError, match="no points"):
        answer([], 0.99)


def test_a_setting_says_after_which_time_instances_go_and_whether_that_is_the_rule() -> None:
    assert point(1, 1.0, give_back_s=5.8165, give_back_by_rule=True).setting.endswith(
        "given back after 5.82 s (the rule)"
    )
    assert point(1, 1.0, give_back_s=None, system="static-full").setting == "1 host (8 GPUs) with NICs of 100 Gbit/s"


def test_systems_are_compared_by_what_equally_many_requests_within_the_objectives_cost() -> None:
    points = [
        point(100, 0.96, give_back_s=5.0), point(150, 0.991, give_back_s=15.0), point(200, 0.999),
        point(120, 0.92, system="sllm"), point(210, 0.985, system="sllm"),
        point(300, 1.0, system="static-full", give_back_s=None),
    ]  # fmt: skip
    found = needed(points, 0.99, within_reach=1.0)
    assert [one.level for one in found] == [one.share for one in found] == [0.9, 0.95, 0.97, 0.98, 0.99]
    paid = [[None if best is None else best.paid_gpu_seconds for best in one.points.values()] for one in found]
    assert paid == [[100, 120, 300], [100, 210, 300], [150, 210, 300], [150, 210, 300], [150, None, 300]]
    assert found[-1].text == (
        "99 % within the objectives: blitz 150 GPU s (given back after 15 s); static-full 2.00 times as much; "
        "not reached: sllm"
    )
    assert [one.share for one in needed(points, 0.5, 1.0)] == [0.5, 0.9, 0.95, 0.97, 0.98, 0.99]


def test_where_prompts_are_out_of_reach_shares_are_of_those_within() -> None:
    last = needed([point(100, 0.9)], 0.99, within_reach=0.9)[-1]
    assert (last.level, last.share) == (0.99, pytest.approx(0.891))
    assert last.text == "99 % of those within reach within the objectives: blitz 100 GPU s (given back after 60 s)"
    assert last.points["blitz"] is not None
    # As many as are asked for can be: they are.
    assert needed([point(100, 0.9)], 0.99, within_reach=0.99)[-1].share == 0.99
