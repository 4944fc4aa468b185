"""Places of instances: two each, evenly, and nothing moves that need not."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.gateway.core.rendezvous import NUM_PLACES, Rendezvous


def placed(rendezvous: Rendezvous) -> list[list[str]]:
    return [list(rendezvous.of(place)) for place in range(NUM_PLACES)]


def made(*names: str, secret: bytes = b"s") -> Rendezvous:
    rendezvous = Rendezvous(secret)
    rendezvous.keep(names)
    return rendezvous


def test_gateways_that_saw_instances_come_and_go_in_another_order_agree() -> None:
    draw = random.Random(4)
    names = [f"i{n}" for n in range(12)]
    ours = made(*names)
    theirs = Rendezvous(b"s")
    for _ in range(40):
        theirs.keep(draw.sample(names, draw.randint(0, len(names))))
        theirs.of(draw.randrange(NUM_PLACES))
    theirs.keep(names)
    assert placed(ours) == placed(theirs)


def test_a_place_has_two_instances_if_there_are_two() -> None:
    assert made().of(3) == []
    assert made("a").of(3) == ["a"]
    assert all(len(set(found)) == 2 for found in placed(made("a", "b", "c")))


@pytest.mark.parametrize("num", [2, 4, 10])
def test_each_has_its_share(num: int) -> None:
    firsts = Counter(found[0] for found in placed(made(*(f"i{n}" for n in range(num)))))
    assert len(firsts) == num
    assert max(firsts.values()) < 1.2 * NUM_PLACES / num


def test_one_that_comes_takes_its_share_and_the_others_keep_theirs() -> None:
    rendezvous = made("a", "b", "c", "d")
    before = placed(rendezvous)
    rendezvous.keep(["a", "b", "c", "d", "e"])
    moved = [(old, new) for old, new in zip(before, placed(rendezvous), strict=True) if old[0] != new[0]]
    assert 0.15 * NUM_PLACES < len(moved) < 0.25 * NUM_PLACES
    assert all(new == ["e", old[0]] for old, new in moved)


def test_what_goes_leaves_its_places_to_their_second() -> None:
    rendezvous = made("a", "b", "c", "d")
    before = placed(rendezvous)
    rendezvous.keep(["a", "b", "d"])
    for old, new in zip(before, placed(rendezvous), strict=True):
        assert [name for name in old if name != "c"] == new[: len(old) - ("c" in old)]


def test_without_the_secret_nobody_knows_the_places() -> None:
    same = sum(
        a == b for a, b in zip(placed(made("a", "b", "c")), placed(made("a", "b", "c", secret=b"t")), strict=True)
    )
    assert same < 0.3 * NUM_PLACES


def test_a_place_that_is_known_costs_no_look_at_the_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = made(*(f"i{n}" for n in range(1000)))
    rendezvous.of(1)
    numbered: list[str] = []
    number = rendezvous._number
    monkeypatch.setattr(Rendezvous, "_number", lambda self, place, name: numbered.append(name) or number(place, name))
    rendezvous.of(1)
    rendezvous.keep([*(f"i{n}" for n in range(1000)), "new"])
    rendezvous.of(1)
    assert numbered == ["new"]
