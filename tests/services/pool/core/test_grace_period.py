from __future__ import annotations

from services.pool.core.grace_period import GracePeriod


def test_a_started_pool_waits_one_lease() -> None:
    grace_period = GracePeriod(2.0)
    grace_period.observe(0.0, bus_since_s=-5.0, store_ok=True)
    assert not grace_period.over(1.9)
    assert grace_period.remaining_s(0.5) == 1.5
    assert grace_period.over(2.0)


def test_a_bus_outage_restarts_the_wait() -> None:
    grace_period = GracePeriod(2.0)
    grace_period.observe(0.0, bus_since_s=0.0, store_ok=True)
    grace_period.observe(5.0, bus_since_s=None, store_ok=True)
    assert not grace_period.over(5.0)
    assert grace_period.remaining_s(5.0) == 2.0
    grace_period.observe(6.0, bus_since_s=5.9, store_ok=True)
    assert not grace_period.over(7.9)
    assert grace_period.over(8.0)


def test_a_reconnect_between_two_looks_restarts_the_wait() -> None:
    grace_period = GracePeriod(2.0)
    grace_period.observe(0.0, bus_since_s=0.0, store_ok=True)
    grace_period.observe(5.0, bus_since_s=4.9, store_ok=True)
    assert not grace_period.over(6.0)


def test_a_redis_outage_restarts_the_wait() -> None:
    grace_period = GracePeriod(2.0)
    grace_period.observe(0.0, bus_since_s=0.0, store_ok=True)
    grace_period.observe(5.0, bus_since_s=0.0, store_ok=False)
    grace_period.observe(5.2, bus_since_s=0.0, store_ok=True)
    assert not grace_period.over(7.1)
    assert grace_period.over(7.2)


def test_who_knows_all_waits_for_nobody_until_something_breaks() -> None:
    grace_period = GracePeriod(2.0, knows_all=True)
    assert not grace_period.over(0.0), "nothing is known of the connections"
    grace_period.observe(0.5, bus_since_s=None, store_ok=False)
    grace_period.observe(1.0, bus_since_s=0.9, store_ok=True)
    assert grace_period.over(1.0)
    assert grace_period.remaining_s(1.0) == 0.0
    grace_period.observe(2.0, bus_since_s=0.9, store_ok=False)
    assert not grace_period.over(2.0)
    grace_period.observe(3.0, bus_since_s=0.9, store_ok=True)
    assert not grace_period.over(4.9)
    assert grace_period.over(5.0)


def test_a_reconnection_between_two_looks_ends_knowing_all() -> None:
    grace_period = GracePeriod(2.0, knows_all=True)
    grace_period.observe(1.0, bus_since_s=0.9, store_ok=True)
    grace_period.observe(2.0, bus_since_s=1.9, store_ok=True)
    assert not grace_period.over(3.9)
    assert grace_period.over(4.0)


def test_silence_does_not_count_for_a_lease_after_the_process_itself_stood_still() -> None:
    grace_period = GracePeriod(2.0)
    for tick in range(20):
        grace_period.observe(tick * 0.2, bus_since_s=0.0, store_ok=True)
    assert grace_period.silence_counts(3.8)
    grace_period.observe(7.0, bus_since_s=0.0, store_ok=True)
    assert grace_period.over(7.0), "what is granted has no need to wait"
    for tick in range(1, 10):
        grace_period.observe(7.0 + tick * 0.2, bus_since_s=0.0, store_ok=True)
        assert not grace_period.silence_counts(7.0 + tick * 0.2)
    grace_period.observe(9.0, bus_since_s=0.0, store_ok=True)
    assert grace_period.silence_counts(9.0)
