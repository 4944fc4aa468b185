from __future__ import annotations

import pytest

from services.worker.weights.flow import BURST_S, TokenBucket

RATE = 1e9 / 8
"""Bytes per second of 1 Gbps."""


@pytest.mark.parametrize("message_bytes", [1_000, 250_000, 8_000_000])
def test_the_rate_holds_for_messages_of_any_size(message_bytes: int) -> None:
    bucket, now_s, sent = TokenBucket(1.0, 0.0), 0.0, 0
    while now_s < 1.0:
        wait_s = bucket.take(message_bytes, now_s)
        if wait_s > 0:
            now_s += wait_s
        else:
            sent += message_bytes
    assert sent == pytest.approx(RATE * now_s, abs=2 * message_bytes + RATE * BURST_S)


def test_idle_time_saves_no_more_than_a_burst() -> None:
    bucket = TokenBucket(1.0, 0.0)
    sent = 0
    while bucket.take(1000, 100.0) == 0:
        sent += 1000
    assert sent == pytest.approx(RATE * BURST_S, abs=1000)


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        TokenBucket(0.0, 0.0)
