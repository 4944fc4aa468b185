from __future__ import annotations

from services.pool.core.grace import Grace


def test_a_started_pool_waits_one_lease() -> None:
    grace = Grace(2.0, 0.0)
    grace.observe(0.0, bus_since_s=-5.0, store_ok=True)
    assert not grace.over(1.9)
    assert grace.remaining_s(0.5) == 1.5
    assert grace.over(2.0)


def test_a_bus_outage_restarts_the_wait() -> None:
    grace = Grace(2.0, 0.0)
    grace.observe(0.0, bus_since_s=0.0, store_ok=True)
    grace.observe(5.0, bus_since_s=None, store_ok=True)
    assert not grace.over(5.0)
    assert grace.remaining_s(5.0) == 2.0
    grace.observe(6.0, bus_since_s=5.9, store_ok=True)
    assert not grace.over(7.9)
    assert grace.over(8.0)


def test_a_reconnect_between_two_looks_restarts_the_wait() -> None:
    grace = Grace(2.0, 0.0)
    grace.observe(0.0, bus_since_s=0.0, store_ok=True)
    grace.observe(5.0, bus_since_s=4.9, store_ok=True)
    assert not grace.over(6.0)


def test_a_redis_outage_restarts_the_wait() -> None:
    grace = Grace(2.0, 0.0)
    grace.observe(0.0, bus_since_s=0.0, store_ok=True)
    grace.observe(5.0, bus_since_s=0.0, store_ok=False)
    grace.observe(5.2, bus_since_s=0.0, store_ok=True)
    assert not grace.over(7.1)
    assert grace.over(7.2)
