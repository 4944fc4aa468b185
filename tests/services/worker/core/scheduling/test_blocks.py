"""The KV block pool."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.core.scheduling.blocks import BlockPool


def test_a_fresh_pool_hands_out_one_ascending_run():
    pool = BlockPool(16, 4)
    assert pool.allocate(5) == [0, 1, 2, 3, 4]
    assert pool.num_used == 5


def test_two_sequences_grow_without_breaking_their_runs():
    pool = BlockPool(64, 4)
    tables = [pool.allocate(4), pool.allocate(4), pool.allocate(4)]
    for _ in range(6):
        for table in tables:
            pool.append(table)
    for table in tables:
        assert table == list(range(table[0], table[0] + 10))
    pool.check(tables)


def test_scattered_free_blocks_are_used_when_no_run_is_long_enough():
    pool = BlockPool(6, 4)
    pool.allocate(6)
    pool.free([0, 2, 4])
    assert pool.allocate(3) == [0, 2, 4]


def test_more_blocks_than_free_are_refused_and_nothing_changes():
    pool = BlockPool(4, 4)
    table = pool.allocate(3)
    with pytest.raises(ValueError, match="2 KV blocks wanted, 1 free"):
        pool.allocate(2)
    pool.check([table])


@pytest.mark.parametrize("block", [0, -1, 4])
def test_freeing_a_block_that_is_not_in_use_is_refused(block):
    with pytest.raises(ValueError, match="not in use"):
        BlockPool(4, 4).free([block])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_no_block_is_lost_or_doubled_whatever_happens(moves):
    pool = BlockPool(24, 4)
    tables: list[list[int]] = []
    for kind, number in moves:
        if kind == 0 and pool.can_allocate(number):
            tables.append(pool.allocate(number))
            assert tables[-1] == sorted(tables[-1])
        elif kind == 1 and tables and pool.can_allocate(1):
            pool.append(tables[number % len(tables)])
        elif kind == 2 and tables:
            pool.free(tables.pop(number % len(tables)))
        pool.check(tables)
