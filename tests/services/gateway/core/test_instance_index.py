from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.instance_index import InstanceIndex

Offer = tuple[int, int, int]
"""Outstanding tokens, room, context."""

names = st.integers(0, 12).map(lambda n: f"i{n:02}")
offers = st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 4))


@given(
    known=st.sets(names),
    changes=st.lists(st.tuples(names, st.none() | offers), max_size=40),
    prompt=st.integers(0, 4),
    context=st.integers(0, 4),
    avoid=st.frozensets(names),
)
def test_the_best_is_what_a_look_at_all_would_find(
    known: set[str], changes: list[tuple[str, Offer | None]], prompt: int, context: int, avoid: frozenset[str]
) -> None:
    index = InstanceIndex(known)
    current: dict[str, Offer] = {}
    for name, offer in changes:
        if name not in index:
            continue
        if offer is None:
            index.withdraw(name)
            current.pop(name, None)
        else:
            index.offer(name, (offer[0], 0), free_tokens=offer[1], context_tokens=offer[2])
            current[name] = offer
    fitting = [(name in avoid, o[0], name) for name, o in current.items() if o[1] >= prompt and o[2] >= context]
    assert index.best(prompt, context, avoid) == (min(fitting)[2] if fitting else None)


@given(steps=st.lists(st.tuples(st.sets(names), st.lists(st.tuples(names, st.integers(0, 3)), max_size=6)), max_size=6))
def test_instances_that_stay_keep_their_offers_and_those_that_come_offer_nothing(
    steps: list[tuple[set[str], list[tuple[str, int]]]],
) -> None:
    index = InstanceIndex()
    current: dict[str, int] = {}
    for there, made in steps:
        index.keep(there)
        current = {name: rank for name, rank in current.items() if name in there}
        for name, rank in made:
            if name in index:
                index.offer(name, (rank, 0), free_tokens=1, context_tokens=1)
                current[name] = rank
        best = min(((rank, name) for name, rank in current.items()), default=None)
        assert index.best(1, 1, frozenset()) == (best[1] if best is not None else None)
        assert all((name in index) == (name in there) for name in (f"i{n:02}" for n in range(13)))


def test_a_search_does_not_look_at_all_instances() -> None:
    class Counted(int):
        looks = 0

        def __eq__(self, other: object) -> bool:  # tuples ask this before they ask which is less
            Counted.looks += 1
            return super().__eq__(other)

        __hash__ = int.__hash__

    size = 4096
    index = InstanceIndex(f"i{n:04}" for n in range(size))
    for n in range(size):
        index.offer(f"i{n:04}", (Counted(n * 7919 % size), 0), free_tokens=100, context_tokens=1000)
    Counted.looks = 0
    assert index.best(10, 10, frozenset()) == "i0000"
    assert 0 < Counted.looks < 100
