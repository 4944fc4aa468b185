"""What a step takes by what is in it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.step_fit import DensePoint, StepFit

FIT = StepFit(
    dense=(
        DensePoint(num_tokens=10, seconds=1.0),
        DensePoint(num_tokens=20, seconds=1.0),
        DensePoint(num_tokens=40, seconds=2.0),
    ),
    prompts_s=0.1,
    prompt_token_s=0.01,
    pair_s=0.001,
    decodes_s=0.2,
    request_s=0.02,
    context_token_s=0.002,
    error=0.0,
)
PROMPTS_S = 0.1 + 20 * 0.01 + 210 * 0.001
DECODES_S = 0.2 + 10 * 0.02 + 500 * 0.002


def test_prompts_alone_decodes_alone_and_both() -> None:
    assert FIT.step_s(20, 210, 0, 0) == pytest.approx(1.0 + PROMPTS_S)
    assert FIT.step_s(0, 0, 10, 500) == pytest.approx(1.0 + DECODES_S)
    assert FIT.step_s(20, 210, 10, 500) == pytest.approx(1.5 + PROMPTS_S + DECODES_S)
    assert FIT.step_s(0, 0, 0, 0) == 0.0


def test_before_the_first_size_its_time_counts_and_beyond_the_last_its_speed() -> None:
    bare = msgspec.structs.replace(FIT, prompts_s=0.0, prompt_token_s=0.0)
    assert [bare.step_s(n, 0, 0, 0) for n in (1, 10, 30, 40, 80)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 4.0])


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100), st.integers(0, 1000))
def test_more_never_takes_less(prompt_tokens: int, more_tokens: int, num_decodes: int, context_tokens: int) -> None:
    before = FIT.step_s(prompt_tokens, 0, num_decodes, context_tokens)
    assert FIT.step_s(prompt_tokens + more_tokens, more_tokens, num_decodes, context_tokens) >= before
    assert FIT.step_s(prompt_tokens, 0, num_decodes + 1, context_tokens + 1) >= before


@pytest.mark.parametrize("dense", [((20, 1.0), (10, 2.0)), ((10, 1.0), (10, 1.0)), ((10, 2.0), (20, 1.0))])
def test_sizes_rise_and_times_never_fall(dense: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="comes after"):
        msgspec.structs.replace(FIT, dense=tuple(DensePoint(num_tokens=n, seconds=s) for n, s in dense))
