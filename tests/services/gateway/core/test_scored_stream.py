"""A stream whose prompt is scored takes each position once, whoever says it, and no token before all of them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from services.gateway.core.scored_stream import ScoredStream
from services.gateway.core.stream import PartVerdict, Phase
from services.worker.engine.forward_batch import PromptRows
from services.worker.engine.mock.tokens import prompt_logprobs
from shared.messages.generation import SamplingParams, StreamPart
from tests.processes import process

PROMPT = tuple(range(10, 30))


def stream(prompt: tuple[int, ...] = PROMPT) -> ScoredStream:
    sampling = SamplingParams(max_tokens=9, seed=0, prompt_logprobs=2)
    state = ScoredStream("r", "m", prompt, sampling, 0.0)
    state.submitted_to("i", process("w"))
    return state


def page(start: int, end: int, *, attempt: int = 1, num_top: int = 2) -> StreamPart:
    """Of positions ``start <= i < end``."""
    made = prompt_logprobs(start, PromptRows(0, tuple(range(10 + start, 10 + end)), num_top), vocab_size=300)
    return StreamPart(request_id="r", attempt=attempt, offset=0, prompt=made)


def token(offset: int = 0, *, attempt: int = 1, reason: Any = None, ids: tuple[int, ...] = (7,)) -> StreamPart:
    return StreamPart(request_id="r", attempt=attempt, offset=offset, token_ids=ids, finish_reason=reason)


def taken(state: ScoredStream) -> list[int]:
    """Positions that came, in their order."""
    return [position for one in state.take() for position in range(one.start, one.end)]


def test_pages_come_in_order_and_then_tokens() -> None:
    state = stream()
    assert state.prompt_offset == 1
    assert state.accept(page(1, 8)) == (PartVerdict.NEW, 0)
    assert (state.prompt_offset, state.phase) == (8, Phase.RUNNING)
    assert state.accept(token()) == (PartVerdict.GAP, 0)
    assert state.accept(token(ids=(), reason="stop")) == (PartVerdict.GAP, 0)
    assert state.accept(page(8, 20)) == (PartVerdict.NEW, 0)
    assert state.prompt_offset is None
    assert state.accept(token()) == (PartVerdict.NEW, 0)
    assert taken(state) == list(range(1, 20))
    assert taken(state) == []
    assert state.output_token_ids == [7]


def test_what_is_here_is_skipped_and_what_is_beyond_is_a_gap() -> None:
    state = stream()
    assert state.accept(page(3, 8))[0] is PartVerdict.GAP
    state.accept(page(1, 8))
    assert state.accept(page(2, 6))[0] is PartVerdict.DUPLICATE
    assert state.accept(page(1, 8))[0] is PartVerdict.DUPLICATE
    assert state.accept(page(9, 12))[0] is PartVerdict.GAP
    assert state.accept(page(5, 12))[0] is PartVerdict.NEW
    assert taken(state) == list(range(1, 12))


@pytest.mark.parametrize("seed", range(50))
def test_pages_of_several_attempts_in_any_order_come_once(seed: int) -> None:
    chance, state = random.Random(seed), stream()
    for _ in range(1000):
        if state.prompt_offset is None:
            break
        start = chance.randint(1, 19)
        state.accept(page(start, chance.randint(start + 1, 20), attempt=chance.choice([0, state.attempt])))
        if chance.random() < 0.1:
            state.requeued(fault=False)
            state.submitted_to("j", process("w2"))
    assert taken(state) == list(range(1, 20))


def test_an_attempt_that_ends_without_them_is_believed_and_the_next_asks_for_what_lacks() -> None:
    state = stream()
    state.accept(page(1, 8))
    assert state.accept(token(ids=(), reason="error"))[0] is PartVerdict.NEW
    state.requeued(fault=True)
    state.submitted_to("j", process("w2"))
    assert state.sampling.prompt_logprobs == 2
    assert state.accept(page(8, 20, attempt=1))[0] is PartVerdict.FOREIGN
    state.accept(page(1, 20, attempt=2))
    assert state.sampling.prompt_logprobs is None, "a later one computes none of them"
    assert taken(state) == list(range(1, 20))


def test_a_prompt_of_one_token_has_none() -> None:
    state = stream((1,))
    assert state.prompt_offset is None
    assert state.accept(token())[0] is PartVerdict.NEW


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 0},
        {"start": -(2**40)},
        {"start": 2**40},
        {"num_top": 1},
        {"num_top": -1},
        {"num_top": 2**62},
        {"ranks": b""},
        {"logprobs": b"\0" * 7},
        {"logprobs": b"\0" * 2**16},
        {"top_ids": b"\xff" * 4 * 2 * 7},
        {"top_logprobs": b""},
    ],
)
def test_what_no_worker_means_well_with_changes_nothing(changes: dict[str, Any]) -> None:
    state = stream()
    good = page(1, 8)
    assert good.prompt is not None
    wrong = msgspec.structs.replace(good, prompt=msgspec.structs.replace(good.prompt, **changes))
    verdict, _ = state.accept(wrong)
    assert verdict in (PartVerdict.DUPLICATE, PartVerdict.GAP)
    assert (state.prompt_offset, taken(state)) == (1, [])


@pytest.mark.parametrize("part", [page(1, 21), page(1, 8, num_top=3)])
def test_more_than_was_asked_for_is_not_kept(part: StreamPart) -> None:
    state = stream()
    assert state.accept(part)[0] is PartVerdict.DUPLICATE
    assert taken(state) == []


def test_nothing_comes_once_it_is_over() -> None:
    state = stream()
    state.finished()
    assert state.accept(page(1, 8))[0] is PartVerdict.FOREIGN
