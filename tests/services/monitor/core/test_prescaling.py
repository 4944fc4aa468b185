from __future__ import annotations

from services.monitor.core.prescaling import MARKED, Rise


def test_a_rise_is_marked_until_it_is_usual() -> None:
    rise = Rise()
    assert not rise.follow(0.0, 0.0, 5.0)
    assert rise.follow(0.2, 0.1, 5.0), "the first need after none"
    for step in range(1, 400):
        rise.follow(1.0, 0.1 + step / 10, 5.0)
    assert not rise.follow(1.4, 40.1, 5.0)
    for step in range(1, 11):
        assert rise.follow(3.0, 40.1 + step / 10, 5.0)
    marked = [rise.follow(3.0, 42.0 + step / 10, 5.0) for step in range(200)]
    assert marked == sorted(marked, reverse=True)
    assert 10 < marked.count(True) < 100, "about as long as it takes until what came is decoded"


def test_what_was_needed_long_ago_is_not_usual() -> None:
    rise = Rise()
    rise.follow(8.0, 0.0, 5.0)
    rise.follow(0.0, 10.0, 5.0)
    assert rise.follow(1.0, 100.0, 5.0)
    assert rise.usual * MARKED < 1.0
