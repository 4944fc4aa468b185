"""The life of a pair: its table, and that nothing else is possible."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from services.worker.core.live.life import (
    ENDED,
    TRANSITIONS,
    IllegalPairMove,
    PairLife,
    PairState,
    check_target,
    why_no_source,
)
from shared.errors import Conflict, NotFound
from tests.services.worker.live.members import assignment


def life_in(state: PairState) -> PairLife:
    """The shortest way there."""
    ways: dict[PairState, tuple[PairState, ...]] = {PairState.OFFERED: ()}
    while state not in ways:
        for known, way in list(ways.items()):
            for after in TRANSITIONS[known]:
                ways.setdefault(after, (*way, after))
    life = PairLife()
    for step in ways[state]:
        life.move_to(step)
    return life


def test_every_state_has_its_moves_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(PairState)
    for state in PairState:
        assert life_in(state).state is state
    assert {PairState.DISSOLVED, PairState.FAILED} == ENDED


@pytest.mark.parametrize(("state", "wanted"), list(itertools.product(PairState, PairState)))
def test_only_the_moves_of_the_table_are_made(state: PairState, wanted: PairState) -> None:
    life = life_in(state)
    if wanted in TRANSITIONS[state]:
        life.move_to(wanted)
        assert life.state is wanted
    else:
        with pytest.raises(IllegalPairMove, match=f"{state} cannot become {wanted}"):
            life.move_to(wanted)
        assert life.state is state


def test_a_whole_life() -> None:
    life = PairLife()
    for state in (PairState.REDIRECTING, PairState.COOPERATING, PairState.LOADED):
        life.move_to(state)
        assert not life.ended
    life.move_to(PairState.DISSOLVED)
    assert life.ended


@pytest.mark.parametrize("state", PairState)
def test_whatever_lives_can_fail_once(state: PairState) -> None:
    life = life_in(state)
    assert life.fail() == (state not in ENDED)
    assert not life.fail()
    assert life.state is (state if state in ENDED else PairState.FAILED)
    assert life.ended


def test_an_illegal_move_is_a_conflict_to_other_processes() -> None:
    assert issubclass(IllegalPairMove, Conflict)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"left_s": -0.1}, "it came too late"),
        ({"instance_id": ""}, "its source is not here any more"),
        ({"instance_id": "another"}, "its source is not here any more"),
        ({"state": "draining"}, "its source is draining"),
        ({"role": "decode"}, "its source is a decode instance"),
        ({"role": "prefill"}, ""),
        ({"as_source": "x"}, "the source is in x"),
        ({"as_target": "x"}, "its source still finishes what it kept of x"),
    ],
)
def test_why_a_pair_is_not_made(changes: dict[str, Any], reason: str) -> None:
    facts: dict[str, Any] = {"left_s": 1.0, "instance_id": "instance-of-w0", "state": "serving", "role": "colocated"}
    assert why_no_source(assignment(), **(facts | changes)) == reason


def test_only_an_instance_that_loads_under_this_lease_is_a_target() -> None:
    check_target(assignment(), instance_id="instance-of-w1", epoch=2, state="loading")
    with pytest.raises(NotFound):
        check_target(assignment(), instance_id="", epoch=2, state="loading")
    with pytest.raises(Conflict):
        check_target(assignment(), instance_id="instance-of-w1", epoch=3, state="loading")
    with pytest.raises(Conflict):
        check_target(assignment(), instance_id="instance-of-w1", epoch=2, state="serving")
