from __future__ import annotations

from itertools import product

import pytest

from bench.evaluate.order import check, shuffled
from bench.systems import find
from shared.errors import BadRequest

SYSTEMS = tuple(find(n) for n in ("blitz", "sllm", "static-half", "blitz-colocated", "static-colocated-half"))


def test_every_system_once_in_an_order_by_seed() -> None:
    orders = [shuffled(SYSTEMS, seed, r, w) for seed, r, w in product(range(3), repeat=3)]
    assert all(sorted(s.name for s in order) == sorted(s.name for s in SYSTEMS) for order in orders)
    assert len(set(orders)) > 5
    assert shuffled(SYSTEMS, 1, 2, 0) == shuffled(SYSTEMS, 1, 2, 0)


def test_half_follows_the_system_whose_size_it_has() -> None:
    for seed in range(30):
        names = [system.name for system in shuffled(SYSTEMS, seed, 0, 0)]
        assert names.index("blitz") < names.index("static-half")
        assert names.index("blitz-colocated") < names.index("static-colocated-half")


def test_half_without_it_is_refused() -> None:
    check(SYSTEMS)
    with pytest.raises(BadRequest, match="blitz-colocated"):
        check((find("blitz"), find("static-colocated-half")))
