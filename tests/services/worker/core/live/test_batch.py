"""Batches of prompts: what both members derive from their requests, how short ones share one, whose they become."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.live.batch import MOVES, Batch, Place, Request, SourceBatch, packed, part_from
from services.worker.core.live.life import IllegalPairMove


def requests(*sizes: int) -> list[Request]:
    return [Request((f"r{i}", 1), size) for i, size in enumerate(sizes)]


def batch_in(place: Place) -> SourceBatch:
    """The shortest way there."""
    ways: dict[Place, tuple[Place, ...]] = {Place.WAITING: ()}
    while place not in ways:
        for known, way in list(ways.items()):
            for after in MOVES[known]:
                ways.setdefault(after, (*way, after))
    batch = SourceBatch(Batch("b", (), 1.0))
    for step in ways[place]:
        batch.move_to(step)
    return batch


def test_sizes_are_those_of_the_prefixes() -> None:
    batch = Batch("x", tuple(requests(5, 3)), 1.0)
    assert (batch.lengths, batch.num_tokens) == ((5, 3), 8)
    assert batch.keys == (("r0", 1), ("r1", 1))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([99], [[99]]),
        ([4, 4, 4], [[4, 4], [4]]),
        ([3, 9, 3, 3], [[3], [9], [3, 3]]),
        ([8, 1], [[8], [1]]),
        ([7, 1, 1], [[7, 1], [1]]),
    ],
)
def test_short_prompts_share_a_batch_and_long_ones_have_their_own(sizes: list[int], expected: list[list[int]]) -> None:
    found = packed(requests(*sizes), 8, 99)
    assert [[r.num_tokens for r in pack] for pack in found] == expected


@given(st.lists(st.integers(1, 30)), st.integers(1, 20))
def test_packing_keeps_everybody_and_the_order(sizes: list[int], most_tokens: int) -> None:
    waiting = requests(*sizes)
    packs = list(packed(waiting, most_tokens, 99))
    assert [r for pack in packs for r in pack] == waiting
    for pack in packs:
        assert pack
        assert len(pack) == 1 or sum(r.num_tokens for r in pack) <= most_tokens
    for pack, following in itertools.pairwise(packs):
        assert sum(r.num_tokens for r in pack) + following[0].num_tokens > most_tokens, "it would have fitted"


def test_a_batch_never_needs_more_seats_than_allowed() -> None:
    packs = list(packed(requests(*[1] * 10), 100, 4))
    assert [len(pack) for pack in packs] == [4, 4, 2]


@given(st.integers(1, 500), st.integers(1, 40))
def test_parts_of_a_layer_are_about_equal_and_cover_it(num_tokens: int, most_tokens: int) -> None:
    ends = [0]
    while ends[-1] < num_tokens:
        ends.append(part_from(ends[-1], num_tokens, most_tokens))
    sizes = [end - begin for begin, end in itertools.pairwise(ends)]
    assert sum(sizes) == num_tokens
    assert max(sizes) <= most_tokens
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-num_tokens // most_tokens), "no more than it takes"


def test_every_place_has_its_moves_and_can_be_reached() -> None:
    assert set(MOVES) == set(Place)
    for place in Place:
        assert batch_in(place).place is place


@pytest.mark.parametrize(("place", "wanted"), list(itertools.product(Place, Place)))
def test_only_the_moves_of_the_table_are_made(place: Place, wanted: Place) -> None:
    batch = batch_in(place)
    if wanted in MOVES[place]:
        batch.move_to(wanted)
        assert batch.place is wanted
    else:
        with pytest.raises(IllegalPairMove, match=f"batch b is {place} and cannot be {wanted}"):
            batch.move_to(wanted)
        assert batch.place is place


def test_whose_a_batch_has_become_it_stays() -> None:
    for place in (Place.BEGUN, Place.TAKEN, Place.BACK, Place.IN_DOUBT, Place.UNWANTED):
        assert not MOVES[place]
