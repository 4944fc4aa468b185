from __future__ import annotations

import pytest

from services.worker.core.scheduling import gateways as gateways_module
from services.worker.core.scheduling.gateways import FIRST_LEASE_S, Gateways, Gone

ALWAYS_S = 1e9
"""Our own connection has been up for so long."""


def test_a_later_process_of_an_id_replaces_the_earlier_ones_by_heartbeat_or_by_request() -> None:
    for speak in (
        lambda g: g.beat("gw", "3", 5.0, 1.0),
        lambda g: g.spoke("gw", "3", 1.0),
    ):
        gateways = Gateways()
        assert gateways.spoke("gw", "1", 0.0) is None
        gateways.spoke("other", "1", 0.0)
        gone = speak(gateways)
        assert gone == Gone("gw", "3", earlier=True)
        assert speak(gateways) is None, "they are gone once"
        assert [gone.had("gw", i) for i in ("1", "2", "3", "4")] == [True, True, False, False]
        assert not gone.had("other", "1")


def test_what_a_dead_process_sent_and_came_late_ends_with_the_next_heartbeat() -> None:
    gateways = Gateways()
    gateways.beat("gw", "2", 5.0, 0.0)
    assert gateways.spoke("gw", "1", 0.1) is None, "nothing is refused, clocks may disagree"
    assert gateways.beat("gw", "2", 5.0, 1.0) == Gone("gw", "2", earlier=True)


def test_a_process_is_not_kept_alive_by_another_one_of_its_id() -> None:
    gateways = Gateways()
    gateways.beat("gw", "5", 2.0, 0.0)
    assert gateways.beat("gw", "4", 2.0, 1.5) is None, "its clock is behind"
    assert gateways.silent(2.5, ALWAYS_S) == [(Gone("gw", "5"), 2.0)]
    assert gateways.silent(2.5, ALWAYS_S) == []


def test_silence_counts_only_as_long_as_we_could_hear() -> None:
    gateways = Gateways()
    gateways.beat("gw", "1", 2.0, 0.0)
    assert gateways.silent(9.0, 1.0) == []
    assert gateways.silent(9.0, 2.5) == [(Gone("gw", "1"), 2.0)]


def test_a_gateway_that_was_never_heard_has_time_to_beat() -> None:
    gateways = Gateways()
    gateways.spoke("gw", "1", 0.0)
    assert gateways.silent(FIRST_LEASE_S, ALWAYS_S) == []
    assert gateways.silent(FIRST_LEASE_S + 1, ALWAYS_S) == [(Gone("gw", "1"), FIRST_LEASE_S)]


def test_of_too_many_processes_those_are_forgotten_that_were_silent_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateways_module, "MAX_PROCESSES", 10)
    gateways = Gateways()
    for second in range(1000):
        gateways.beat(f"odd-{second}", "", 3600.0, float(second))
        gateways.beat("gw", f"{1000 - second}", 3600.0, float(second))
        gateways.spoke("gw-1", "1", float(second))
        gateways.beat("gw-1", "1", 5.0, float(second))
    # Whoever speaks is watched.
    assert (Gone("gw-1", "1"), 5.0) in gateways.silent(1010.0, ALWAYS_S)
    assert len(gateways.silent(1e6, ALWAYS_S)) <= 10
