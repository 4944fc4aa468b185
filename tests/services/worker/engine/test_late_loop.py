"""The engine loop on its thread, over engines that compute later than they are called."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter

import pytest

from services.worker.engine.late.failures import LateFailures
from tests.services.worker.engine.late_loops import Mishaps, drawn, late_loop, plain_texts

SEEDS_FACTOR = int(os.environ.get("LATE_LOOP_SEEDS_FACTOR", "1"))
"""Times as many seeds."""
ORDERS = ("copies_first", "copies_last", "drawn")
DELAYS_S = (0.0, 0.001)
NUM_REQUESTS = 50
OFTEN = ("surplus", "preempted", "cancelled", "held", "lent", "taken back", "adopted", "behind", "waited for all")
MOST_BROKEN_SHARE = 0.2
"""Of the runs in which steps fail: where one fails, fails again by itself, and so does the probe, the engine counts as
broken."""


def run_mishaps(
    kind: str, happened: Counter[str], order: str, delay_s: float, seed: int, failures: LateFailures | None = None
) -> None:
    chance = random.Random(f"{order} {delay_s} {seed}")
    asked = drawn(chance, NUM_REQUESTS, scored_share=0.3)
    plain = plain_texts(kind, asked)
    timing = {"order": order, "seed": seed, "delay_s": delay_s}
    with late_loop(kind, failures, happened=happened, **timing) as one:
        Mishaps(one, asked, chance).run()
        one.thread.stop()
        assert one.thread.join(60)
        happened["runs"] += 1
        if failures is not None and one.broke:
            happened["broken"] += 1
            assert [error.code for error in one.broke] == ["engine_broken"]
            one.check_end()
        else:
            one.end()
        one.check_texts(plain, exact=kind == "mock")
        for text in one.said.texts.values():
            happened["errors"] += text.end is not None and text.end.error is not None
            assert failures is not None or text.end is None or text.end.error is None
            happened["scored"] += len(text.prompt) > 1


def run_all_seeds(kind: str, num_seeds: int, **failures: float) -> Counter[str]:
    happened = Counter[str]()
    for order, delay_s, seed in itertools.product(ORDERS, DELAYS_S, range(SEEDS_FACTOR * num_seeds)):
        try:
            failing = LateFailures(seed=seed, **failures) if failures else None  # type: ignore[arg-type]
            run_mishaps(kind, happened, order, delay_s, seed, failing)
        except BaseException as error:
            error.add_note(f"{kind}, {order}, delays of {delay_s} s, seed {seed}, {failures}")
            raise
    return happened


@pytest.mark.parametrize(("kind", "num_seeds", "least"), [("mock", 3, 20), ("llama", 1, 5)])
def test_requests_get_the_tokens_of_the_plain_engine_whatever_happens_in_flight(
    kind: str, num_seeds: int, least: int
) -> None:
    happened = run_all_seeds(kind, num_seeds)
    assert happened["scored"] >= least
    assert {name: happened[name] for name in OFTEN if happened[name] < least} == {}


@pytest.mark.parametrize(("kind", "num_seeds", "least"), [("mock", 3, 20), ("llama", 1, 5)])
def test_steps_that_fail_are_run_again_without_what_was_begun_behind_them(
    kind: str, num_seeds: int, least: int
) -> None:
    happened = run_all_seeds(kind, num_seeds, step_share=0.02)
    assert {name: happened[name] for name in (*OFTEN, "behind a failed one") if happened[name] < least} == {}
    assert happened["broken"] <= max(1, MOST_BROKEN_SHARE * happened["runs"])


@pytest.mark.parametrize(("kind", "num_seeds"), [("mock", 2), ("llama", 1)])
def test_a_row_that_fails_ends_its_request_alone(kind: str, num_seeds: int) -> None:
    happened = run_all_seeds(kind, num_seeds, row_share=0.03)
    assert happened["errors"] >= 20
    assert happened["broken"] == 0
