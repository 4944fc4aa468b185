"""The formula: what counts, how often, and never for more than there are requests."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.monitor.core.need import (
    Capability,
    DecodeLoad,
    ModelLoad,
    decode_need_of,
    max_decodes,
    need_of,
    worth_moving,
)

ONE = Capability(tokens_per_s=1000.0)
SLACK_S = 0.5


def needed(load: ModelLoad, one: Capability = ONE, slack_s: float = SLACK_S) -> float:
    return need_of(load, one, slack_s=slack_s).instances


def prompts(number: int, tokens: float, **fields: float) -> ModelLoad:
    """So many prompts that came at once just now, and wait."""
    total = number * tokens
    load = ModelLoad(total, total, total, 0.0, prompts=number, requests=number)
    return replace(load, **fields)  # type: ignore[arg-type]


def test_a_lone_prompt_asks_for_one_instance_however_long_it_is() -> None:
    assert 0 < needed(prompts(1, 100)) < 1
    assert needed(prompts(1, 3500)) == needed(prompts(1, 1e6)) == 1


def test_a_prompt_counts_once_whether_it_arrived_or_waits() -> None:
    steady = ModelLoad(arrived_tokens_per_s=900.0, burst_tokens=450.0, prompts=9, requests=9)
    assert needed(steady) == needed(replace(steady, waiting_tokens=450.0)) == 0.9


def test_a_burst_is_computed_within_the_slack() -> None:
    assert needed(prompts(20, 100)) == 4  # 2000 tokens in half a second
    assert needed(prompts(20, 100), slack_s=0.25) == 8
    assert needed(prompts(20, 100), slack_s=4.0) == 2, "no faster than it came, over the window"
    assert needed(prompts(20, 100, waiting_tokens=100.0)) == 2, "most of it is computed"


def test_what_is_overdue_adds_at_most_one_instance() -> None:
    steady = ModelLoad(arrived_tokens_per_s=1900.0, burst_tokens=950.0, waiting_tokens=950.0, prompts=99, requests=99)
    assert needed(replace(steady, overdue_tokens=250.0)) == pytest.approx(2.4)
    assert needed(replace(steady, overdue_tokens=1e9)) == pytest.approx(2.9)


def test_requests_that_decode_do_not_let_a_prompt_use_more_instances() -> None:
    load = prompts(1, 10_000, running_requests=50, decoding_requests=50, requests=51)
    assert needed(load) == 1
    assert needed(load, replace(ONE, max_decodes=100.0)) == 1.5


def test_memory_counts_beside_time_not_on_top_of_it() -> None:
    load = ModelLoad(arrived_tokens_per_s=700.0, prompts=9, memory=0.8, requests=9)
    assert needed(load) == 0.8
    assert needed(replace(load, memory=2.3)) == 2.3


def test_running_requests_are_limited_where_somebody_says_so() -> None:
    load = ModelLoad(running_requests=30, decoding_requests=30, requests=30)
    assert needed(load) == 0
    assert needed(load, replace(ONE, running_limit=8.0)) == 3.75


@pytest.mark.parametrize(
    ("base_s", "request_s", "slo_s", "most"),
    [
        (0.01, 0.001, 0.05, 40.0),
        (0.0, 0.01, 0.05, 5.0),
        (0.049, 0.002, 0.05, 1.0),  # a lone request is just too much
        (0.05, 0.001, 0.05, inf),  # not even that would help
        (0.01, 0.0, 0.05, inf),  # not measured
        (0.01, 0.001, 0.0, inf),  # no objective
        (0.01, 0.001, float("nan"), inf),
    ],
)
def test_as_many_decodes_as_fit_the_objective(base_s: float, request_s: float, slo_s: float, most: float) -> None:
    assert max_decodes(base_s, request_s, slo_s) == pytest.approx(most)


amounts = st.floats(0.0, 1e7)
counts = st.integers(0, 5000)
loads = st.builds(
    ModelLoad,
    arrived_tokens_per_s=amounts,
    burst_tokens=amounts,
    waiting_tokens=amounts,
    overdue_tokens=amounts,
    prompts=st.floats(0.0, 5000.0),
    running_requests=counts,
    decoding_requests=counts,
    memory=st.floats(0.0, 100.0),
    requests=counts,
)
ones = st.builds(
    Capability,
    tokens_per_s=st.floats(1.0, 1e6),
    max_decodes=st.one_of(st.just(inf), st.floats(1.0, 1e4)),
    running_limit=st.one_of(st.just(inf), st.floats(1.0, 1e4)),
)
slacks = st.floats(0.001, 60.0)


@given(loads, ones, slacks)
def test_no_load_needs_more_instances_than_requests(load: ModelLoad, one: Capability, slack_s: float) -> None:
    assert 0 <= needed(load, one, slack_s) <= load.requests


@given(loads, ones, slacks, st.sampled_from(ModelLoad.__slots__), st.integers(0, 5000))
def test_more_of_anything_never_needs_less(
    load: ModelLoad, one: Capability, slack_s: float, what: str, more: int
) -> None:
    grown = replace(load, **{what: getattr(load, what) + more})
    assert needed(grown, one, slack_s) >= needed(load, one, slack_s)


@given(loads, ones, slacks, st.floats(1.0, 10.0))
def test_faster_instances_never_need_to_be_more(load: ModelLoad, one: Capability, slack_s: float, times: float) -> None:
    assert needed(load, replace(one, tokens_per_s=times * one.tokens_per_s), slack_s) <= needed(load, one, slack_s)


# --- decode --------------------------------------------------------------------------------------------

TEN = Capability(tokens_per_s=1000.0, max_decodes=10.0)


def decodes(load: DecodeLoad, one: Capability = TEN) -> float:
    return decode_need_of(load, one).instances


def test_prompts_that_wait_ask_for_no_more_than_decodes_at_once() -> None:
    # Four requests per second, each of which decodes for five seconds.
    load = DecodeLoad(coming=200, flow_per_s=4.0, residence_s=5.0)
    assert decodes(load) == 2.0
    assert decodes(replace(load, coming=7)) == 0.7
    assert decodes(replace(load, running=20)) == 2.0, "those that come take the place of those that end"
    assert decodes(replace(load, running=50)) == 5.0
    assert decodes(replace(load, residence_s=inf)) == 20.0, "not known: it may be all"
    assert decodes(replace(load, flow_per_s=0.0)) == 0.0


def test_what_came_within_a_residence_counts_however_fast_it_is_decoded() -> None:
    load = DecodeLoad(running=8, there=8, arrived=30, flow_per_s=10.0, residence_s=5.0)
    assert decodes(load) == 3.0
    assert decodes(replace(load, flow_per_s=4.0)) == 2.0, "no more than prefill lets come"
    assert decodes(replace(load, running=1, there=1)) == 1.0, "no more than there are requests"


def test_kv_on_its_way_counts_beside_what_is_used() -> None:
    load = DecodeLoad(running=6, there=4, coming=6, flow_per_s=100.0, memory=0.9, request_memory=0.2)
    assert decodes(load, Capability(1000.0)) == pytest.approx(0.9 + 8 * 0.2)
    assert decodes(replace(load, flow_per_s=0.0), Capability(1000.0)) == pytest.approx(0.9 + 2 * 0.2)


def test_prefill_instances_decode_only_where_decode_lacks_more_than_prefill_would() -> None:
    assert worth_moving(0.5, prefill_needed=1.0, num_prefill=2) == 1, "prefill does without it"
    assert worth_moving(0.0, prefill_needed=1.0, num_prefill=2) == 0, "decode is only asked for ahead"
    assert worth_moving(0.5, prefill_needed=1.4, num_prefill=2) == 1
    assert worth_moving(0.5, prefill_needed=1.5, num_prefill=2) == 0, "as much as it would gain"
    assert worth_moving(9.0, prefill_needed=9.0, num_prefill=2) == 0, "both lack all of it"
    assert worth_moving(1.6, prefill_needed=2.5, num_prefill=4) == 2
    assert worth_moving(9.0, prefill_needed=0.0, num_prefill=3) == 2, "one stays"
    assert worth_moving(9.0, prefill_needed=0.0, num_prefill=0) == 0


@given(st.data())
def test_more_to_decode_never_asks_for_less(data: st.DataObject) -> None:
    figure = st.floats(0.0, 1e4)
    names = ("running", "coming", "growth", "arrived", "flow_per_s", "residence_s", "memory", "request_memory")
    load = DecodeLoad(**{name: data.draw(figure) for name in names})
    name = data.draw(st.sampled_from(names))
    more = replace(load, **{name: getattr(load, name) + data.draw(figure)})
    assert decodes(more) >= decodes(load) * (1 - 1e-9)
    assert decodes(load) <= load.at_once
