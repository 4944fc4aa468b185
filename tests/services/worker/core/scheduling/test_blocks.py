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


def test_of_equally_wide_gaps_the_lowest_is_used():
    pool = BlockPool(32, 16)
    pool.free(pool.allocate(32)[20:26])
    pool.free(range(4, 10))
    pool.free(range(14, 16))
    assert pool.allocate(2) == [6, 7]


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


def test_sequences_lie_in_the_prepared_blocks_apart_from_each_other():
    pool = BlockPool(10_000, 16, prepared=256)
    tables = [pool.allocate(3) for _ in range(16)]
    assert max(table[-1] for table in tables) < 256
    for _ in range(8):
        for table in tables:
            pool.append(table)
    for table in tables:
        assert table == list(range(table[0], table[0] + 11))
    pool.check(tables)


def test_more_blocks_are_wanted_before_sequences_lie_in_them():
    pool = BlockPool(100, 4, prepared=16)
    tables: list[list[int]] = []
    wanted = [pool.wanted_blocks]
    while pool.can_allocate(2):
        tables.append(pool.allocate(2))
        wanted.append(pool.wanted_blocks)
        assert pool.num_used == pool.num_blocks or max(tables[-1]) < wanted[-2]
    assert wanted == sorted(wanted)
    assert (wanted[0], wanted[-1]) == (16, 100)
    pool.check(tables)
    for table in tables[1:]:
        pool.free(table)
    assert pool.wanted_blocks == 100


def test_a_sequence_longer_than_what_is_prepared_gets_one_run():
    pool = BlockPool(1000, 4, prepared=8)
    short, long = pool.allocate(2), pool.allocate(500)
    assert long == list(range(long[0], long[0] + 500))
    pool.check([short, long])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60), st.sampled_from([None, 1, 6]))
@settings(max_examples=150, deadline=None)
def test_no_block_is_lost_or_doubled_whatever_happens(moves, prepared):
    pool = BlockPool(24, 4, prepared)
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


def test_how_often_a_block_was_freed_is_counted_once_somebody_asks():
    pool = BlockPool(8, 16)
    pool.free(pool.allocate(8))
    counted = pool.count_freed()
    assert list(counted) == [0] * 8
    pool.allocate(8)
    pool.free([2, 5])
    pool.allocate(2)
    pool.free([5])
    assert pool.count_freed() is counted
    assert list(counted) == [0, 0, 1, 0, 0, 2, 0, 0]
