from __future__ import annotations

from typing import Any

import pytest

from bench.replay.plan import Shape, plan_requests, prompt_of
from bench.traces.request import Trace, TraceRequest
from shared.errors import BadRequest

TRACE = Trace("t", tuple(TraceRequest(float(second), 100, 40) for second in range(10)))


def test_speed_and_window_move_the_due_times() -> None:
    planned = plan_requests(TRACE, Shape(speed=2.0, start_at_s=3.0, window_s=4.0))
    assert [request.due_s for request in planned] == [0.0, 0.5, 1.0, 1.5]
    assert [request.index for request in planned] == [0, 1, 2, 3]


def test_scales_round_and_keep_at_least_one_token() -> None:
    (first, *_) = plan_requests(TRACE, Shape(input_scale=0.001, output_scale=1.5, max_requests=1))
    assert (first.input_tokens, first.output_tokens, first.shortened) == (1, 60, False)


def test_caps_shorten_and_say_so() -> None:
    (first, *_) = plan_requests(TRACE, Shape(max_input_tokens=30, max_output_tokens=8))
    assert (first.input_tokens, first.output_tokens, first.shortened) == (30, 8, True)


@pytest.mark.parametrize(
    ("context", "expected"), [(1000, (100, 40)), (120, (80, 40)), (60, (30, 30)), (2, (1, 1)), (140, (100, 40))]
)
def test_a_request_is_made_to_fit_the_context(context: int, expected: tuple[int, int]) -> None:
    (first, *_) = plan_requests(TRACE, Shape(context_tokens=context))
    assert (first.input_tokens, first.output_tokens) == expected
    assert first.shortened == (expected != (100, 40))


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(BadRequest, match="no requests"):
        plan_requests(TRACE, Shape(start_at_s=50))


@pytest.mark.parametrize(
    "wrong",
    [{"speed": 0}, {"speed": float("inf")}, {"input_scale": -1}, {"max_requests": 0}, {"window_s": 0},
     {"start_at_s": -1}, {"max_output_tokens": 0}, {"context_tokens": 1}],
)  # fmt: skip
def test_a_senseless_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        Shape(**wrong)


def test_prompts_depend_on_seed_and_index_only() -> None:
    prompt = prompt_of(1, 2, 50, token_ids=range(10, 250))
    assert prompt == prompt_of(1, 2, 50, token_ids=range(10, 250))
    assert prompt != prompt_of(1, 3, 50, token_ids=range(10, 250))
    assert len(prompt) == 50
    assert all(10 <= token < 250 for token in prompt)
