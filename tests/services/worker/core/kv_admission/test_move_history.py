"""Which requests may move again, and how fast their KV went."""

from __future__ import annotations

import pytest

from services.worker.core.kv_admission.move_history import AGAIN_S, ASSUMED_BYTES_PER_S, MoveHistory

R = ("r", 1)


def test_a_request_tries_to_move_no_more_often() -> None:
    history = MoveHistory()
    assert history.may_try(R, None, 10.0)
    history.tried(R, 10.0)
    assert not history.may_try(R, None, 10.0 + 0.9 * AGAIN_S)
    assert history.may_try(("r", 2), None, 10.0)
    assert history.may_try(R, None, 10.0 + AGAIN_S)


def test_one_that_has_come_rests() -> None:
    history = MoveHistory()
    assert not history.may_try(R, 10.0, 10.0 + 0.9 * AGAIN_S)
    assert history.may_try(R, 10.0, 10.0 + AGAIN_S)


def test_half_of_the_estimate_is_the_last_move() -> None:
    history = MoveHistory()
    assert history.bytes_per_s == ASSUMED_BYTES_PER_S
    history.measured(10**9, 0.25)
    assert history.bytes_per_s == pytest.approx((ASSUMED_BYTES_PER_S + 4e9) / 2)
    history.measured(10**9, 0.0)
    assert history.bytes_per_s < 1e16
