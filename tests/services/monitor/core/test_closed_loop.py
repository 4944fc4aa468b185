"""The verdict acts on the load that it is made of: it settles, at the right number."""

from __future__ import annotations

import random
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.services.monitor.core.closed_loop import ClosedLoop, steady

UTILISATION = 0.9


def enough(load: float) -> int:
    """Instances for a load in instances."""
    return max(1, ceil(load / UTILISATION - 1e-6))


@pytest.mark.parametrize("load_s", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("loads", [(0.4, 3.0), (0.4, 7.5), (2.0, 5.2), (0.0, 1.7, 4.0)])
def test_a_step_of_load_is_met_without_more_than_one_instance_too_many(loads: tuple[float, ...], load_s: float) -> None:
    loop = ClosedLoop(load_s=load_s)
    phase_s = 60.0
    for number, load in enumerate(loads):
        since_s = number * phase_s
        loop.run(steady(load * loop.tokens_per_s, 300, since_s, since_s + phase_s) if load else (), since_s + phase_s)
        assert loop.most(since_s, since_s + phase_s) <= enough(load) + 1, load
        assert loop.least_of(since_s + phase_s / 2, since_s + phase_s) >= enough(load), load
    assert not loop.waiting or loop.now_s - loop.waiting[0][0] < 0.5


@given(
    load=st.floats(0.05, 8.0),
    tokens=st.sampled_from([50, 300, 1500]),
    load_s=st.floats(0.1, 4.0),
    slo_ttft_s=st.sampled_from([0.0, 0.2, 1.0, 5.0]),
)
@example(load=7.51171875, tokens=1500, load_s=1.0, slo_ttft_s=5.0)  # 10.02 prompts/s: once in 64 s the window has 11
@settings(max_examples=40, deadline=None)
def test_at_constant_load_the_number_does_not_go_up_and_down(
    load: float, tokens: int, load_s: float, slo_ttft_s: float
) -> None:
    loop = ClosedLoop(load_s=load_s, slo_ttft_s=slo_ttft_s)
    loop.run(steady(load * loop.tokens_per_s, tokens, 0.0, 90.0), 90.0)
    settled = [count for at_s, count in loop.counts if at_s > 60.0]
    assert settled == sorted(settled), "not down, and so not up again"
    one_more = tokens / (loop.tokens_per_s * loop.policy.rate_window_s)
    assert settled[-1] - settled[0] <= ceil(one_more / UTILISATION), "a prompt more in the window, at most"
    assert settled[0] >= ceil(load - 1e-6), "no fewer than can do it at all"


def test_random_arrivals_at_constant_load_do_not_make_it_swing() -> None:
    loop = ClosedLoop(load_s=0.5)
    draw, at_s, arrivals = random.Random(7), 0.0, []
    while at_s < 200.0:
        at_s += draw.expovariate(3.0 * loop.tokens_per_s / 300)
        arrivals.append((at_s, draw.randint(100, 500)))
    loop.run(arrivals, 200.0)
    later = [count for at_s, count in loop.counts if at_s > 20.0]
    turns = sum(1 for a, b in pairwise(later) if a != b)
    assert enough(3.0) <= min(later)
    assert max(later) <= enough(3.0) + 3, "prompts that come together are met together"
    assert turns <= 30


@pytest.mark.parametrize("load_s", [0.2, 3.0])
def test_one_long_prompt_on_an_idle_instance_asks_for_no_second_one(load_s: float) -> None:
    loop = ClosedLoop(load_s=load_s)
    loop.run([(1.0, 20_000)], 30.0)
    assert {count for _, count in loop.counts} == {1}


def test_a_model_without_instances_gets_as_many_as_the_first_prompts_need() -> None:
    loop = ClosedLoop(least=0, load_s=3.0)
    loop.run([(1.0, 900)] * 3, 8.0)
    assert loop.most(0.0, 8.0) == 3
    assert loop.counts[0][1] == 0
    loop.run((), 30.0)
    assert loop.counts[-1][1] == 0


def test_instances_slower_than_they_say_are_noticed_by_what_stays_overdue() -> None:
    loop = ClosedLoop(reported_tokens_per_s=4000.0, load_s=0.5)  # half of that is true
    loop.run(steady(5.0 * loop.tokens_per_s, 300, 0.0, 60.0), 60.0)
    assert loop.most(0.0, 60.0) <= 8
    assert max(waited_s for _, waited_s in loop.waited_s) < 1.5, "without that they would wait for ever longer"


def test_when_the_load_ends_the_instances_go() -> None:
    loop = ClosedLoop()
    loop.run(steady(4.0 * loop.tokens_per_s, 300, 0.0, 20.0), 20.0)
    assert loop.counts[-1][1] >= 4
    loop.run((), 30.0)
    assert loop.counts[-1][1] == 1


def test_an_instance_that_loads_fast_goes_soon_after_the_last_request() -> None:
    loop = ClosedLoop(least=0, load_s=0.03, decode_s=0.1)
    loop.run([(1.0, 100), (1.3, 100), (1.6, 100)], 6.0)
    ended_s = max(at_s for at_s, _ in loop.waited_s) + 100 / loop.tokens_per_s + loop.decode_s
    gone_s = min(at_s for at_s, count in loop.counts if at_s > 1.6 and count == 0)
    assert {count for at_s, count in loop.counts if 1.2 < at_s < gone_s} == {1}
    assert gone_s - ended_s < 0.5 + 2 * 0.1


def test_a_model_that_loads_slowly_is_kept_for_what_may_come() -> None:
    loop = ClosedLoop(least=0, load_s=3.0, decode_s=0.1)
    loop.run([(1.0, 100), (9.0, 100)], 12.0)
    assert loop.least_of(1.3, 9.5) == 1
