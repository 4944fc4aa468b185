from __future__ import annotations

import pytest

from services.worker.core.scheduling import gateways as gateways_module
from services.worker.core.scheduling.gateways import FIRST_LEASE_S, Gateways, Gone

ALWAYS_S = 1e9
"""Our own connection has been up for so long."""


@pytest.mark.parametrize(("old", "new"), [("1", "2"), ("2", "1")])
def test_whoever_begins_to_beat_replaces_the_others_of_its_id_whatever_their_names_are(old: str, new: str) -> None:
    gateways = Gateways()
    gateways.beat("gw", old, 5.0, 0.0)
    gateways.spoke("other", old, 0.0)
    gone = gateways.beat("gw", new, 5.0, 1.0)
    assert gone == Gone("gw", new, others=True)
    assert gateways.beat("gw", new, 5.0, 1.0) is None, "they are gone once"
    assert [gone.had("gw", i) for i in (old, "3", new)] == [True, True, False]
    assert not gone.had("other", old)


@pytest.mark.parametrize(("old", "new"), [("1", "2"), ("2", "1")])
def test_what_a_dead_process_sent_and_came_late_ends_with_the_next_heartbeat(old: str, new: str) -> None:
    gateways = Gateways()
    gateways.beat("gw", new, 5.0, 0.0)
    gateways.spoke("gw", old, 0.1)
    assert gateways.beat("gw", new, 5.0, 1.0) == Gone("gw", new, others=True)


@pytest.mark.parametrize(("old", "new"), [("1", "2"), ("2", "1")])
def test_a_process_that_was_left_is_not_gone_back_to(old: str, new: str) -> None:
    gateways = Gateways()
    gateways.beat("gw", old, 5.0, 0.0)
    gateways.beat("gw", new, 5.0, 1.0)
    assert gateways.beat("gw", old, 5.0, 2.0) is None
    assert gateways.beat("gw", new, 5.0, 3.0) == Gone("gw", new, others=True)


def test_a_process_is_not_kept_alive_by_another_one_of_its_id() -> None:
    gateways = Gateways()
    gateways.beat("gw", "5", 2.0, 0.0)
    gateways.spoke("gw", "4", 1.5)
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
