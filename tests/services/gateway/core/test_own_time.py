from __future__ import annotations

import pytest

from services.gateway.core.failure_detector import ECHO_S, MAX_STEP_S, OwnTime


def ticked(own: OwnTime, *at_s: float) -> float:
    for now_s in at_s:
        own.tick(now_s)
    return own.now_s


def test_it_goes_with_the_clock_while_ticks_come_in_time() -> None:
    assert ticked(OwnTime(), 5.0, 5.05, 5.1, 5.2) == pytest.approx(0.2)


def test_it_stands_still_while_the_process_does() -> None:
    assert ticked(OwnTime(), 5.0, 65.0, 65.05) == pytest.approx(MAX_STEP_S + 0.05)


def test_it_stands_still_while_nothing_comes_back_over_the_bus() -> None:
    own = OwnTime()
    own.tick(0.0)
    own.echoed(0.0)
    silent = ticked(own, *(0.05 * step for step in range(1, 100)))
    assert silent == pytest.approx(ECHO_S, abs=0.051)
    own.echoed(4.95)
    assert ticked(own, 5.0) == pytest.approx(silent + 0.05)
