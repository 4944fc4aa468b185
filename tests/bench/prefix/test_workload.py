from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from bench.prefix.checkpoint import CONTEXT_TOKENS
from bench.prefix.workload import OUTPUT_TOKENS, TOKEN_IDS, WORKLOADS, Plan, chosen, make_plan, prompts
from shared.errors import BadRequest
from shared.prefixes import STEP_TOKENS

PER_S, SECONDS = 4.0, 30.0
every_workload = pytest.mark.parametrize("workload", WORKLOADS)


def begins_alike(plan: Plan) -> Counter[tuple[int, ...]]:
    """How many requests begin with each first step."""
    return Counter(prompt[:STEP_TOKENS] for prompt in prompts(plan, 0))


@every_workload
def test_a_plan_depends_on_its_seed_alone(workload: str) -> None:
    plan = make_plan(workload, 3, PER_S, SECONDS)
    assert plan == make_plan(workload, 3, PER_S, SECONDS)
    assert plan != make_plan(workload, 4, PER_S, SECONDS)
    assert prompts(plan, 3) == prompts(plan, 3)


@every_workload
def test_no_seed_asks_much_more_or_less_than_another(workload: str) -> None:
    for seed in range(6):
        assert abs(len(make_plan(workload, seed, PER_S, SECONDS)) - PER_S * SECONDS) <= 0.1 * PER_S * SECONDS
        assert abs(len(make_plan(workload, seed, 0.5, 4.0)) - 2) <= 1


@every_workload
def test_requests_come_in_the_order_of_time_and_fit_the_model(workload: str) -> None:
    plan = make_plan(workload, 0, PER_S, SECONDS)
    assert [one.number for one in plan] == list(range(len(plan)))
    assert all(early.at_s <= late.at_s for early, late in pairwise(plan))
    assert plan[0].at_s >= 0
    assert plan[-1].at_s < SECONDS
    for one, prompt in zip(plan, prompts(plan, 0), strict=True):
        assert 0 < len(prompt) <= CONTEXT_TOKENS - OUTPUT_TOKENS[1]
        assert set(prompt) <= set(TOKEN_IDS)
        assert OUTPUT_TOKENS[0] <= one.output_tokens <= OUTPUT_TOKENS[1]


def test_a_turn_continues_the_one_before_it_with_its_answer() -> None:
    plan = make_plan("turns", 1, PER_S, SECONDS)
    whole = prompts(plan, 1)
    later = [one for one in plan if one.after is not None]
    assert len(later) > len(plan) / 2
    assert max(Counter(one.after for one in later).values()) == 1
    for one in later:
        assert one.after is not None
        before = whole[one.after]
        assert whole[one.number][: len(before)] == before
        assert len(whole[one.number]) == len(before) + plan[one.after].output_tokens + len(one.tokens)
        assert one.at_s > plan[one.after].at_s


def test_as_many_turns_come_at_the_begin_as_at_the_end() -> None:
    plans = [make_plan("turns", seed, PER_S, SECONDS) for seed in range(20)]
    first = sum(one.at_s < SECONDS / 3 for plan in plans for one in plan)
    last = sum(one.at_s > SECONDS * 2 / 3 for plan in plans for one in plan)
    assert first / last == pytest.approx(1.0, abs=0.15)


def test_few_system_prompts_begin_all_requests_and_one_of_them_many() -> None:
    plan = make_plan("system", 0, PER_S, SECONDS)
    shared = begins_alike(plan)
    assert len(shared) <= 6
    assert shared.most_common(1)[0][1] > len(plan) / 4
    assert len({prompt[-STEP_TOKENS:] for prompt in prompts(plan, 0)}) == len(plan)


def test_documents_are_asked_about_several_times() -> None:
    plan = make_plan("documents", 0, PER_S, SECONDS)
    shared = begins_alike(plan)
    assert 8 <= len(shared) <= 20
    assert len(plan) / len(shared) > 5


def test_nothing_is_shared_where_nothing_shall_be() -> None:
    assert set(begins_alike(make_plan("none", 0, PER_S, SECONDS)).values()) == {1}


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(BadRequest, match="workloads are"):
        make_plan("other", 0, 1.0, 10.0)
    with pytest.raises(BadRequest, match="less than one") as refused:
        make_plan("turns", 0, 0.01, 10.0)
    assert refused.value.param == "seconds"
    with pytest.raises(BadRequest, match="not 'turns,other'"):
        chosen("turns,other")
    with pytest.raises(BadRequest, match="workloads must be"):
        chosen(" ,")
    assert chosen("none, turns") == ("turns", "none")
