from __future__ import annotations

from services.monitor.core.windows import CounterWindow, MaxWindow


def test_a_counter_window_forgets_what_is_older() -> None:
    window = CounterWindow(1.0)
    for at_s, value in ((0.0, 100), (0.5, 110), (1.0, 150)):
        window.add(at_s, value)
    assert window.growth(1.0) == 50
    assert window.growth(3.0) == 0


def test_growth_whose_time_is_not_known_better_counts_by_the_share_of_its_time() -> None:
    window = CounterWindow(10.0)
    window.add(0.0, 0)
    window.add(2.0, 100)
    window.add(4.0, 300)
    assert window.growth(4.0, 2.0) == 200
    assert window.growth(4.0, 1.0) == 100
    assert window.growth(4.0, 3.0) == 250
    assert window.growth(5.0, 2.0) == 100


def test_a_burst_counts_whole_until_it_is_old() -> None:
    window = CounterWindow(10.0)
    window.burst(1.0, 50)
    window.add(1.0, 1000)
    assert window.growth(1.5, 0.5) == 50
    assert window.growth(1.6, 0.5) == 0


def test_a_counter_that_falls_was_restarted() -> None:
    window = CounterWindow(10.0)
    for at_s, value in ((0.0, 100), (1.0, 7), (2.0, 9)):
        window.add(at_s, value)
    assert window.growth(2.0) == 9


def test_the_first_value_is_no_growth() -> None:
    window = CounterWindow(10.0)
    window.add(0.0, 1000)
    assert window.growth(0.0) == 0


def test_a_max_window_keeps_the_peak_for_a_window() -> None:
    window = MaxWindow(2.0)
    for at_s, value in ((0.0, 1.0), (1.0, 5.0), (2.0, 2.0)):
        window.add(at_s, value)
    assert window.largest(2.0) == 5.0
    window.add(3.5, 1.0)
    assert window.largest(3.5) == 2.0
    assert window.full(2.0)
    assert not MaxWindow(2.0).full(9.0)
