from __future__ import annotations

from typing import Any

import pytest

from services.gateway.core.stream import Phase, StreamState, Verdict
from shared.messages.generation import SamplingParams, StreamPart


def stream(max_tokens: int = 10, **sampling: Any) -> StreamState:
    state = StreamState(
        request_id="r",
        model="m",
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, **sampling),
        arrived_at_s=0.0,
        end_token_ids=frozenset({99}),
    )
    state.submitted_to("i", "w")
    return state


def part(offset: int, *token_ids: int, attempt: int = 1, reason: Any = None) -> StreamPart:
    return StreamPart(request_id="r", attempt=attempt, offset=offset, token_ids=token_ids, finish_reason=reason)


def test_parts_in_order_are_taken() -> None:
    state = stream()
    assert state.accept(part(0, 7, 8)) == (Verdict.NEW, 0)
    assert state.accept(part(2, 9, reason="stop")) == (Verdict.NEW, 0)
    assert state.output_token_ids == [7, 8, 9]
    assert state.phase is Phase.RUNNING


def test_overlap_is_skipped_and_repetition_dropped() -> None:
    state = stream()
    state.accept(part(0, 7, 8))
    assert state.accept(part(0, 7, 8)) == (Verdict.DUPLICATE, 2)
    assert state.accept(part(1, 8, 9)) == (Verdict.NEW, 1)
    assert state.output_token_ids == [7, 8, 9]


def test_a_terminal_part_without_news_still_ends_the_stream() -> None:
    state = stream()
    state.accept(part(0, 7))
    assert state.accept(part(0, 7, reason="stop")) == (Verdict.NEW, 1)
    assert state.accept(part(1, reason="stop")) == (Verdict.NEW, 0)


def test_a_gap_takes_nothing() -> None:
    state = stream()
    assert state.accept(part(1, 8)) == (Verdict.GAP, 0)
    assert state.accept(part(1, reason="stop")) == (Verdict.GAP, 0)
    assert state.output_token_ids == []


def test_an_empty_part_is_no_progress() -> None:
    state = stream()
    assert state.accept(part(0))[0] is Verdict.DUPLICATE
    assert state.phase is Phase.SUBMITTED


def test_other_attempts_are_foreign() -> None:
    state = stream()
    state.accept(part(0, 7))
    state.requeued(fault=True)
    assert state.accept(part(1, 8))[0] is Verdict.FOREIGN
    state.submitted_to("j", "v")
    assert state.accept(part(1, 8))[0] is Verdict.FOREIGN
    assert state.accept(part(1, 8, attempt=2)) == (Verdict.NEW, 0)
    state.finished()
    assert state.accept(part(2, 9, attempt=2))[0] is Verdict.FOREIGN


def test_faults_are_counted_and_avoided_fullness_is_not() -> None:
    state = stream()
    state.requeued(fault=False)
    assert (state.failures, state.avoid) == (0, set())
    state.submitted_to("i", "w")
    state.requeued(fault=True)
    assert (state.failures, state.avoid, state.attempt) == (1, {"i"}, 2)


def test_illegal_moves_raise() -> None:
    state = stream()
    with pytest.raises(ValueError, match="submitted"):
        state.submitted_to("j", "v")
    state.requeued(fault=False)
    with pytest.raises(ValueError, match="queued"):
        state.requeued(fault=False)


def test_a_stream_knows_when_only_its_end_is_missing() -> None:
    state = stream(max_tokens=2)
    assert state.ended() is None
    state.accept(part(0, 7))
    assert state.ended() is None
    state.accept(part(1, 99))
    assert state.ended() == "stop"
    full = stream(max_tokens=1)
    full.accept(part(0, 7))
    assert full.ended() == "length"
    early = stream(min_tokens=1)
    early.accept(part(0, 99))
    assert early.ended() is None
