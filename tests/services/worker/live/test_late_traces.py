"""Pairs of every kind (``traces``) whose engines compute later than they are called, in orders that differ by a seed.

Tokens are those of one engine, each request ends once, nothing is left, and no engine finds that somebody took for done
what was not.
"""

from __future__ import annotations

import os

import pytest

from services.worker.device.late import LateOrder
from tests.services.worker.live.traces import CASES, trace

ORDERS: tuple[LateOrder, ...] = ("copies_first", "copies_last", "drawn")
NUM_SEEDS = int(os.environ.get("LATE_PAIR_SEEDS", "1"))
"""Of each case and order."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_a_pair_of_late_engines(name: str, order: LateOrder) -> None:
    for seed in range(1, NUM_SEEDS + 1):
        trace(CASES[name], seed, order)
