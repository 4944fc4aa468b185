"""What is kept of measurements."""

from __future__ import annotations

from bench.decisions.stopwatch import Decision, Stopwatch


def test_only_what_has_a_state_is_kept() -> None:
    stopwatch = Stopwatch()
    with stopwatch("pool", "heartbeat"):
        pass
    assert not stopwatch.times_us()
    stopwatch.state = "quiet"
    for _ in range(3):
        with stopwatch("pool", "heartbeat"):
            pass
    (times,) = stopwatch.times_us().values()
    assert list(stopwatch.times_us()) == [Decision("quiet", "pool", "heartbeat")]
    assert len(times) == 3
    assert min(times) >= 0.0
