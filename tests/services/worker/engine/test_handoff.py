"""Slots of positions, and what is refused of what two engines hand each other."""

import pytest

from services.worker.engine.handoff import check_batch, host_bytes, slots_of
from shared.errors import BadRequest
from tests.services.worker.engine.batches import forward, slice_of


def slots(tables, lengths):
    return slots_of(tables, lengths, block_size=4, num_blocks=10).tolist()


def test_slots_follow_the_block_table_sequence_after_sequence() -> None:
    assert slots([(9, 2), (5,)], [6, 3]) == [36, 37, 38, 39, 8, 9, 20, 21, 22]


def test_blocks_beyond_the_tokens_are_not_looked_at() -> None:
    assert slots([(1, 99)], [4]) == [4, 5, 6, 7]


def test_no_sequences_and_no_tokens_have_no_slots() -> None:
    assert slots([], []) == slots([()], [0]) == []


@pytest.mark.parametrize(
    ("tables", "lengths", "message"),
    [
        ([(1,)], [5], "5 tokens in 1 blocks of 4"),
        ([(1,)], [-1], "-1 tokens"),
        ([(1,), (2,)], [1], "2 block tables for 1 sequences"),
        ([(1, 10)], [5], r"blocks 1\.\.10 of a pool of 10"),
        ([(-1,)], [1], r"blocks -1\.\.-1"),
    ],
)
def test_tables_that_cannot_hold_the_tokens_are_refused(tables, lengths, message) -> None:
    with pytest.raises(BadRequest, match=message):
        slots(tables, lengths)


def test_bytes_are_those_of_the_buffer_whatever_holds_them() -> None:
    buffer = bytearray(8)
    flat = host_bytes(memoryview(buffer).cast("H"), 8, "KV")
    flat[7] = 5
    assert buffer[7] == 5


def test_a_buffer_of_another_size_is_refused() -> None:
    with pytest.raises(BadRequest, match="hidden states: 7 bytes, expected 8"):
        host_bytes(bytes(7), 8, "hidden states")


def test_a_batch_without_slices_is_refused() -> None:
    with pytest.raises(BadRequest, match="without slices"):
        check_batch(forward(), 4)
    check_batch(forward(slice_of(1, (1,) * 4, 0, (0,), True)), 4)
