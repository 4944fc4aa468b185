"""Room for requests at the instances that are to decode them."""

from __future__ import annotations

import itertools

import pytest

from services.worker.core.kv_admission import room
from shared.errors import BadRequest


def test_a_request_whose_prompt_is_not_computed_asks_for_ever() -> None:
    assert room.is_asked_again(None, 1e9)
    assert room.is_asked_again(5.0, 5.0 + room.ROOM_PATIENCE_S)
    assert not room.is_asked_again(5.0, 5.1 + room.ROOM_PATIENCE_S)


def test_pauses_grow_to_a_limit_and_are_drawn() -> None:
    shares = itertools.chain([0.5, 1.0], itertools.repeat(0.75))
    pauses = list(itertools.islice(room.pauses(lambda low, high: next(shares)), 30))
    assert pauses[:2] == pytest.approx([0.5 * room.RETRY_S, 1.5 * room.RETRY_S])
    assert pauses[-1] == pytest.approx(0.75 * room.MAX_RETRY_S)


def test_a_context_that_is_computed_at_once_leaves_at_once() -> None:
    assert room.chunk_tokens(100, 100, 64) == 0
    assert room.chunk_tokens(100, 64, 64) == 64


@pytest.mark.parametrize(("num_tokens", "context_tokens"), [(0, 0), (100, 0), (50, 101)])
def test_what_never_fits_is_refused(num_tokens: int, context_tokens: int) -> None:
    room.check_fits(99, 100, 100)
    with pytest.raises(BadRequest):
        room.check_fits(num_tokens, context_tokens, 100)
