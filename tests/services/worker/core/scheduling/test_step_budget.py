"""Prompt tokens per step, from the objective for the time between two tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.scheduling.prompt_cost import num_pairs
from services.worker.core.scheduling.schedule import ScheduledBatch
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.step_budget import (
    FIRST_TOKENS,
    LEAST_TOKENS,
    PROMPTS_SHARE,
    ROUND_TOKENS,
    USED_SHARE,
    StepBudgets,
)
from tests.records import profile
from tests.services.worker.core.scheduling.harness import config, request, sampled

CHUNK, MOST = 512, 2048
BASE_S, REQUEST_S, TOKEN_S, PAIR_S = 0.010, 0.001, 1e-4, 1e-8

Step = tuple[int, int, int, float]
"""Start of a chunk, its tokens, decodes and the seconds they took."""
steps = st.lists(
    st.tuples(st.integers(0, 100_000), st.integers(0, 600), st.integers(0, 100), st.floats(1e-6, 10.0)).filter(
        lambda s: s[1] + s[2] > 0
    ),
    max_size=40,
)


def budgets(slo_tbt_s: float, history: Iterable[Step] = ()) -> StepBudgets:
    made = StepBudgets(config(max_batch_tokens=MOST, prefill_chunk_tokens=CHUNK))
    made.slo_tbt_s = slo_tbt_s
    for start, count, decodes, took_s in history:
        made.stepped(count, num_pairs(start, count), decodes, took_s)
    return made


def known(slo_tbt_s: float) -> StepBudgets:
    """It has measured the engine of these constants."""
    decodes = [(0, 0, n, BASE_S + n * REQUEST_S) for n in (1, 8, 64)]
    prompts = [(at, CHUNK, 8, seconds_of(CHUNK, num_pairs(at, CHUNK), 8)) for at in range(0, 16 * CHUNK, CHUNK)]
    return budgets(slo_tbt_s, [*decodes, *prompts])


def seconds_of(count: int, pairs: int, decodes: int) -> float:
    return BASE_S + decodes * REQUEST_S + count * TOKEN_S + pairs * PAIR_S


@given(steps, st.floats(0.001, 10.0))
def test_a_step_of_prompts_alone_has_its_full_budget(history: list[Step], slo_s: float) -> None:
    budget = budgets(slo_s, history).next()
    assert [budget.take(0, 10_000) for _ in range(5)] == [CHUNK, CHUNK, CHUNK, CHUNK, 0]
    assert budget.num_tokens == MOST


@given(steps, st.integers(1, 3000))
def test_without_an_objective_steps_are_as_large_as_they_may(history: list[Step], decodes: int) -> None:
    assert budgets(0.0, history).next(decodes).take(0, 10_000) == max(0, min(CHUNK, MOST - decodes))


@given(steps, st.floats(0.001, 10.0), st.integers(1, 200), st.lists(st.integers(0, 100_000), min_size=1, max_size=6))
def test_prompts_never_take_longer_than_is_left_and_never_get_nothing(
    history: list[Step], slo_s: float, decodes: int, starts: list[int]
) -> None:
    made = budgets(slo_s, history)
    budget = made.next(decodes)
    taken = [budget.take(start, 10_000) for start in starts]
    assert taken[0] >= LEAST_TOKENS
    assert sum(taken) == budget.num_tokens <= MOST - decodes
    assert budget.num_pairs == sum(num_pairs(start, count) for start, count in zip(starts, taken, strict=True))
    left_s = max(USED_SHARE * slo_s - made.speed.decode_s(decodes), PROMPTS_SHARE * slo_s)
    assert budget.num_tokens <= LEAST_TOKENS or made.cost.seconds(budget.num_tokens, budget.num_pairs) <= left_s * 1.01


@given(st.integers(1, 60), st.integers(0, 20_000), st.floats(0.02, 1.0))
def test_more_decodes_longer_contexts_and_tighter_objectives_never_mean_more(
    decodes: int, start: int, slo_s: float
) -> None:
    room = known(slo_s).next(decodes).room(start)
    assert known(slo_s).next(decodes + 5).room(start) <= room
    assert known(slo_s).next(decodes).room(start + 3000) <= room
    assert known(slo_s * 0.7).next(decodes).room(start) <= room


def test_the_time_that_decodes_leave_is_used() -> None:
    made = known(0.06)
    count = made.next(8).take(0, 10_000)
    left_s = USED_SHARE * 0.06 - (BASE_S + 8 * REQUEST_S)
    assert left_s - ROUND_TOKENS * TOKEN_S * 1.3 < count * TOKEN_S + num_pairs(0, count) * PAIR_S < left_s * 1.03


def test_the_first_step_beside_decodes_is_a_small_one() -> None:
    prompts_only = [(0, CHUNK, 0, 0.001)] * 5
    assert budgets(10.0, prompts_only).next(1).take(0, 10_000) == FIRST_TOKENS
    assert budgets(10.0).next(1).take(0, 10_000) == LEAST_TOKENS


# --- with a scheduler, and an engine of known speed ------------------------------------------------------


def serve(
    slo_s: float, engine_s: Callable[[ScheduledBatch], float], *, decodes: int = 4, prompt_tokens: int = 20_000
) -> list[tuple[ScheduledBatch, float]]:
    """Requests decode, then a long prompt comes: the steps until it is computed, with their times."""
    scheduler = Scheduler(config(num_blocks=20_000, prefill_chunk_tokens=CHUNK, max_queued_tokens=10**6))
    scheduler.budgets.slo_tbt_s = slo_s
    for number in range(decodes):
        scheduler.add(request(f"d{number}", 100, 100_000))
    ran: list[tuple[ScheduledBatch, float]] = []
    long = request("long", prompt_tokens)
    while not long.output:
        batch = scheduler.schedule()
        assert batch is not None
        took_s = engine_s(batch)
        scheduler.budgets.stepped(batch.num_prefill_tokens, batch.num_pairs, batch.num_decode_tokens, took_s)
        scheduler.complete(batch, [sampled(p.sequence) for p in batch.slices if p.sample])
        if len(ran) == 10:
            scheduler.add(long)
        ran.append((batch, took_s))
        assert len(ran) < 5000, "the prompt does not advance"
    return [step for step in ran[11:] if step[0].num_prefill_tokens]


def engine(batch: ScheduledBatch) -> float:
    return seconds_of(batch.num_prefill_tokens, batch.num_pairs, batch.num_decode_tokens)


def test_decodes_keep_their_objective_while_a_long_prompt_is_computed() -> None:
    ran = serve(0.05, engine)
    assert max(took_s for _, took_s in ran) <= 0.05
    # What the objective leaves is used, after a few steps that grow to it.
    assert min(took_s for _, took_s in ran[4:-1]) > 0.6 * 0.05
    first, last = ran[4][0], ran[-3][0]
    assert last.num_prefill_tokens < first.num_prefill_tokens, "later tokens attend to more"


def test_without_the_rule_they_would_not() -> None:
    assert max(took_s for _, took_s in serve(0.0, engine)) > 0.05


@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_make_it_flap(seed: int) -> None:
    draw = random.Random(seed)
    ran = serve(0.1, lambda batch: engine(batch) * draw.uniform(0.85, 1.15), prompt_tokens=8000)
    sizes = [batch.num_prefill_tokens for batch, _ in ran[4:-1]]
    assert all(0.6 < b / a < 1.7 for a, b in pairwise(sizes))
    assert sum(took_s > 0.1 for _, took_s in ran) <= len(ran) // 20


def test_an_objective_that_decodes_alone_break_does_not_starve_prompts() -> None:
    ran = serve(0.005, engine, prompt_tokens=2000)
    assert max(took_s for _, took_s in ran) < BASE_S + 4 * REQUEST_S + LEAST_TOKENS * TOKEN_S * 1.5


def test_an_engine_whose_steps_cost_the_same_whatever_is_in_them_is_not_kept_small() -> None:
    ran = serve(0.1, lambda _: 0.2, prompt_tokens=8000)
    assert ran[-2][0].num_prefill_tokens == CHUNK


def test_what_a_profile_says_counts_before_the_first_step() -> None:
    made = budgets(0.1)
    made.expect(profile())
    left_s = USED_SHARE * 0.1 - profile().decode_fit.step_s(8, 0)
    budget = made.next(8)
    assert budget.take(0, 10_000) == FIRST_TOKENS
    assert made.cost.seconds(budget.num_tokens, budget.num_pairs) == pytest.approx(
        FIRST_TOKENS * 0.0008 + num_pairs(0, FIRST_TOKENS) * 0.000001
    )
    assert made.next(60).take(0, 10_000) < FIRST_TOKENS < left_s / 0.0008


def stalled_once(*, alone: Iterable[int], num_steps: int) -> StepBudgets:
    """The only step of 64 decodes alone took 3 s. Healthy steps of as many with prompts follow, and of others alone."""
    made = budgets(0.1, [(0, 0, n, BASE_S + n * REQUEST_S) for n in alone])
    made.stepped(0, 0, 64, 3.0)
    for number in range(num_steps):
        count = made.next(64).take(0, 10_000)
        made.stepped(count, num_pairs(0, count), 64, BASE_S + 64 * REQUEST_S + count * 0.001)
        for n in alone if number % 10 == 0 else ():
            made.stepped(0, 0, n, BASE_S + n * REQUEST_S)
    return made


@pytest.mark.parametrize("alone", [(), (8,), (1, 8, 32)])
def test_a_stall_in_the_only_step_of_its_size_is_forgotten(alone: tuple[int, ...]) -> None:
    made = stalled_once(alone=alone, num_steps=2000)
    sizes = []
    for _ in range(20):
        count = made.next(64).take(0, 10_000)
        sizes.append(count)
        made.stepped(count, num_pairs(0, count), 64, BASE_S + 64 * REQUEST_S + count * 0.001)
    assert max(sizes) <= 2 * LEAST_TOKENS
