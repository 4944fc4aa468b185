from __future__ import annotations

from typing import Any

import pytest

from services.gateway.core.stream import PartVerdict, Phase, StreamState
from shared.messages.generation import DecodePlace, SamplingParams, StreamPart
from tests.processes import INCARNATION, process


def stream(max_tokens: int = 10, **sampling: Any) -> StreamState:
    state = StreamState(
        request_id="r",
        model="m",
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, **sampling),
        arrived_at_s=0.0,
        end_token_ids=frozenset({99}),
    )
    state.submitted_to("i", process("w"))
    return state


def part(offset: int, *token_ids: int, attempt: int = 1, reason: Any = None) -> StreamPart:
    return StreamPart(request_id="r", attempt=attempt, offset=offset, token_ids=token_ids, finish_reason=reason)


def test_parts_in_order_are_taken() -> None:
    state = stream()
    assert state.accept(part(0, 7, 8)) == (PartVerdict.NEW, 0)
    assert state.accept(part(2, 9, reason="stop")) == (PartVerdict.NEW, 0)
    assert state.output_token_ids == [7, 8, 9]
    assert state.phase is Phase.RUNNING


def test_overlap_is_skipped_and_repetition_dropped() -> None:
    state = stream()
    state.accept(part(0, 7, 8))
    assert state.accept(part(0, 7, 8)) == (PartVerdict.DUPLICATE, 2)
    assert state.accept(part(1, 8, 9)) == (PartVerdict.NEW, 1)
    assert state.output_token_ids == [7, 8, 9]


@pytest.mark.parametrize(("told", "known"), [(0, 0), (1, 1), (2, 2), (3, 2), (10**15, 2), (-5, 0)])
def test_the_first_token_says_what_was_cached_and_no_more_than_the_prompt(told: int, known: int) -> None:
    state = stream()
    first = StreamPart(request_id="r", attempt=1, offset=0, token_ids=(7,), cached_tokens=told)
    assert state.accept(first) == (PartVerdict.NEW, 0)
    # Computed again elsewhere, the context may be there too: the client is told of its prompt.
    later = StreamPart(request_id="r", attempt=1, offset=1, token_ids=(8,), cached_tokens=1)
    assert state.accept(later) == (PartVerdict.NEW, 0)
    assert state.cached_tokens == known


def test_a_terminal_part_without_news_still_ends_the_stream() -> None:
    state = stream()
    state.accept(part(0, 7))
    assert state.accept(part(0, 7, reason="stop")) == (PartVerdict.NEW, 1)
    assert state.accept(part(1, reason="stop")) == (PartVerdict.NEW, 0)


def test_a_gap_takes_nothing() -> None:
    state = stream()
    assert state.accept(part(1, 8)) == (PartVerdict.GAP, 0)
    assert state.accept(part(1, reason="stop")) == (PartVerdict.GAP, 0)
    assert state.output_token_ids == []


def test_an_empty_part_is_no_progress() -> None:
    state = stream()
    assert state.accept(part(0))[0] is PartVerdict.DUPLICATE
    assert state.phase is Phase.SUBMITTED


def hears(state: StreamState, worker: str, heard: StreamPart) -> bool:
    """Whether the stream follows to ``worker`` when it sends this part."""
    verdict, _ = state.accept(heard)
    return state.taken_over(heard, verdict, instance_id=f"i-{worker}", worker=process(worker))


def test_a_worker_that_takes_over_says_so_before_its_first_token() -> None:
    state = stream()
    assert not hears(state, "w", part(0))
    assert hears(state, "v", part(0))
    assert (state.worker, state.instance_id, state.phase) == (process("v"), "i-v", Phase.SUBMITTED)
    assert not hears(state, "v", part(0, 7))
    assert state.output_token_ids == [7]


def test_a_worker_whose_first_word_was_lost_has_taken_over_by_its_tokens() -> None:
    state = stream()
    assert hears(state, "v", part(0, 7))
    other = stream()
    assert hears(other, "v", part(1, 8))
    assert (other.worker, other.output_token_ids) == (process("v"), [])


def test_what_a_former_worker_says_late_takes_nothing_back() -> None:
    state = stream()
    state.accept(part(0, 7))
    assert hears(state, "v", part(1))
    for late in (part(0, 7), part(0), part(1), part(3, 9)):
        assert not hears(state, "w", late), late
    assert state.worker == process("v")
    # New tokens can only come from who has it.
    assert hears(state, "w", part(1, 8))
    assert not hears(state, "v", part(2))


def test_repetitions_and_other_attempts_take_nothing_over() -> None:
    state = stream()
    state.accept(part(0, 7, 8))
    for heard in (part(0, 7), part(0, 7, 8), part(1), part(2, attempt=2), part(2, 9, attempt=0)):
        assert not hears(state, "v", heard), heard
    assert state.worker == process("w")


def test_an_end_can_come_from_who_took_over() -> None:
    state = stream()
    state.accept(part(0, 7))
    assert hears(state, "v", part(1, reason="stop"))


def test_a_decode_worker_is_followed_with_its_first_new_token_at_the_latest() -> None:
    state = stream()
    state.accept(part(0, 7))
    # It sends the first token, too: that may have been lost, and was not.
    assert not hears(state, "v", part(0, 7))
    assert hears(state, "v", part(1, 8))
    assert (state.worker, state.output_token_ids) == (process("v"), [7, 8])
    lost = stream()
    assert hears(lost, "v", part(0, 7))
    assert not hears(lost, "w", part(0, 7))
    assert (lost.worker, lost.output_token_ids) == (process("v"), [7])


def test_a_decode_instance_is_avoided_once_it_may_have_had_the_request() -> None:
    place = DecodePlace(worker_id="d", incarnation=INCARNATION, instance_id="i-d")
    state = StreamState("r", "m", (1, 2), SamplingParams(max_tokens=9, seed=0), 0.0)
    state.submitted_to("i", process("w"), place)
    state.requeued(fault=True)
    assert (state.avoid, state.decode_at) == ({"i"}, None)
    state.submitted_to("j", process("v"), place)
    state.accept(part(0, 7, attempt=2))
    state.requeued(fault=True)
    assert state.avoid == {"i", "j", "i-d"}
    state.submitted_to("k", process("x"))
    state.accept(part(1, 8, attempt=3))
    assert hears(state, "y", part(2, 9, attempt=3))
    state.requeued(fault=True)
    assert state.avoid == {"i", "j", "i-d", "i-y"}


def test_the_next_attempt_starts_with_nobodys_past() -> None:
    state = stream()
    assert hears(state, "v", part(0))
    state.requeued(fault=True)
    assert state.avoid == {"i-v"}
    state.submitted_to("j", process("x"))
    assert hears(state, "w", part(0, attempt=2))


def test_other_attempts_are_foreign() -> None:
    state = stream()
    state.accept(part(0, 7))
    state.requeued(fault=True)
    assert state.accept(part(1, 8))[0] is PartVerdict.FOREIGN
    state.submitted_to("j", process("v"))
    assert state.accept(part(1, 8))[0] is PartVerdict.FOREIGN
    assert state.accept(part(1, 8, attempt=2)) == (PartVerdict.NEW, 0)
    state.finished()
    assert state.accept(part(2, 9, attempt=2))[0] is PartVerdict.FOREIGN


def test_faults_are_counted_and_avoided_fullness_is_not() -> None:
    state = stream()
    state.requeued(fault=False)
    assert (state.failures, state.avoid) == (0, set())
    state.submitted_to("i", process("w"))
    state.requeued(fault=True)
    assert (state.failures, state.avoid, state.attempt) == (1, {"i"}, 2)


def test_illegal_moves_raise() -> None:
    state = stream()
    with pytest.raises(ValueError, match="submitted"):
        state.submitted_to("j", process("v"))
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
