"""Both roles of a disaggregated model follow the load and settle; each is met, and neither goes up and down."""

from __future__ import annotations

from itertools import pairwise

import pytest

from services.monitor.core.policy import DemandPolicy
from tests.records import model
from tests.services.monitor.core.disaggregated_loop import DisaggregatedLoop, steady


def turns(wanted: list[int]) -> int:
    """How often a number went down and up again, or up and down."""
    steps = [b - a for a, b in pairwise(wanted) if a != b]
    return sum(1 for a, b in pairwise(steps) if (a > 0) != (b > 0))


def slow(loop: DisaggregatedLoop) -> float:
    """The share of decoding that took longer than the objective."""
    return loop.slow_token_s / loop.token_s


@pytest.mark.parametrize("load_s", [0.3, 1.0, 5.0])
def test_a_burst_of_long_prompts_is_met_and_given_back_without_going_up_and_down(load_s: float) -> None:
    loop = DisaggregatedLoop(load_s=load_s)
    loop.run([(1.0, 4000, 100)] * 40, 60.0)
    assert loop.ended == 40
    for role in ("prefill", "decode"):
        assert turns(loop.wanted(role)) == 1, "up, and down when it is over"
        assert loop.wanted(role)[-1] == 1
    assert max(loop.wanted("prefill")) == 40
    # Forty of 257 blocks, on instances of 1800 that may be used.
    assert max(loop.wanted("decode")) == 6
    assert set(loop.wanted("colocated")) == {0}


@pytest.mark.parametrize("load_s", [0.3, 2.0])
def test_at_a_steady_load_both_numbers_settle_at_what_is_enough(load_s: float) -> None:
    loop = DisaggregatedLoop(load_s=load_s)
    loop.run(steady(8.0, 500, 300, 0.0, 60.0), 60.0)
    # 4000 prompt tokens/s at 1800 each; 2400 output tokens/s, and 36 requests in steps of 46 ms make 780 of one.
    assert set(loop.wanted("prefill", 30.0)) == {3}
    assert set(loop.wanted("decode", 30.0)) == {4}
    assert turns(loop.wanted("decode")) == 0
    assert max(loop.first_token_s[-100:]) < 0.5


def test_long_outputs_ask_for_decode_instances_alone() -> None:
    loop = DisaggregatedLoop()
    loop.run(steady(2.0, 50, 1000, 0.0, 80.0), 80.0)
    assert set(loop.wanted("prefill")) == {1}
    assert loop.wanted("decode")[-1] == 3
    assert turns(loop.wanted("decode")) == 0
    assert slow(loop) < 0.01


def test_large_contexts_ask_for_decode_instances_by_their_memory() -> None:
    loop = DisaggregatedLoop(record=model(serving="disaggregated"), blocks_total=500)  # no objective for steps
    loop.run(steady(3.0, 2000, 200, 0.0, 40.0), 40.0)
    assert loop.wanted("decode")[-1] > 1
    assert max(loop.first_token_s[-20:]) < 1.5
    assert sum(len(i.held) for i in loop.instances) == 0, "nobody waits for blocks at a prefill instance"


@pytest.mark.parametrize("load_s", [1.0, 5.0])
def test_prescaling_asks_for_decode_when_prefill_rises_and_not_when_prompts_arrive_there(load_s: float) -> None:
    def run(prescale: bool) -> DisaggregatedLoop:
        loop = DisaggregatedLoop(load_s=load_s, policy=DemandPolicy(down_window_s=0.0, prescale=prescale))
        loop.run([(1.0, 1000, 300)] * 80, 40.0)
        return loop

    ahead, behind = run(True), run(False)
    at_burst = slice(10, 13)
    assert max(ahead.wanted("prefill")[at_burst]) > 10
    assert max(ahead.wanted("decode")[at_burst]) >= 3 > max(behind.wanted("decode")[at_burst])
    reasons = [found["decode"].reason for at_s, found in ahead.verdicts if 1.0 < at_s < 1.3]
    assert any("pre-scaled: prefill needs" in reason for reason in reasons)
    assert not any("pre-scaled" in found["decode"].reason for _, found in behind.verdicts)
    assert slow(ahead) < 0.7 * slow(behind)


def test_prefill_instances_are_to_decode_where_decode_lacks_some_now_and_not_ahead() -> None:
    loop = DisaggregatedLoop(start=("prefill", "prefill", "decode"), num_workers=3)
    loop.run([(1.0, 50, 300)] * 120, 8.0)
    found = [(at_s, found["decode"]) for at_s, found in loop.verdicts]
    ahead = [decode for at_s, decode in found if 1.0 < at_s < 1.3]
    assert max(decode.desired for decode in ahead) >= 3
    assert {decode.urgent for decode in ahead} == {1}, "prefill computes all of it first"
    assert 2 in {decode.urgent for at_s, decode in found if at_s > 1.3}


def test_prompts_whose_answers_are_short_prescale_little() -> None:
    loop = DisaggregatedLoop()
    loop.run(steady(1.0, 1000, 1, 0.0, 5.0) + [(6.0, 1000, 1)] * 80, 20.0)
    assert max(loop.wanted("prefill")) > 40
    assert max(loop.wanted("decode", until_s=7.0)) == 1


def test_a_model_that_sleeps_wakes_with_one_of_each_and_both_go_again() -> None:
    asleep = DisaggregatedLoop(record=model(serving="disaggregated", min_instances=0), start=())
    asleep.run([(1.0, 200, 20)], 20.0)
    first = next(found for _, found in asleep.verdicts if found["prefill"].desired)
    assert (first["prefill"].desired, first["decode"].desired) == (1, 1)
    assert max(asleep.wanted("prefill")) == max(asleep.wanted("decode")) == 1
    assert turns(asleep.wanted("prefill")) == turns(asleep.wanted("decode")) == 1
    assert (asleep.wanted("prefill")[-1], asleep.wanted("decode")[-1], asleep.ended) == (0, 0, 1)


def test_a_model_is_moved_from_colocated_to_disaggregated_on_the_workers_that_it_has() -> None:
    loop = DisaggregatedLoop(start=("colocated", "colocated"), num_workers=2, load_s=0.5)
    for instance in loop.instances:
        instance.serves_at_s = 0.0
    taking = []
    for step in range(1, 120):
        loop.run([], step / 10)
        taking.append(len(loop.serving("colocated")) + len(loop.serving("prefill")))
    assert min(taking) >= 1, "never without an instance that takes prompts"
    assert [len(loop.serving(role)) for role in ("colocated", "prefill", "decode")] == [0, 1, 1]


def test_all_roles_together_stay_within_the_maximum_in_proportion() -> None:
    loop = DisaggregatedLoop(record=model(serving="disaggregated", max_instances=6, slo_tbt_s=0.05))
    loop.run(steady(20.0, 500, 300, 0.0, 12.0), 12.0)
    for _, found in loop.verdicts:
        assert sum(verdict.desired for verdict in found.values()) <= 6
    last = loop.verdicts[-1][1]
    assert last["prefill"].desired >= 2
    assert last["decode"].desired >= 2
