"""The binomial pipeline: everyone gets everything in as few steps as there can be, one block each way at a time."""

from __future__ import annotations

import math

import pytest

from bench.sim.binomial import binomial_pipeline


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("num_receivers", [*range(1, 18), 31, 32])
def test_everyone_gets_everything_in_as_few_steps_as_there_can_be(num_receivers: int, num_blocks: int) -> None:
    steps = binomial_pipeline(num_receivers, num_blocks)
    assert len(steps) == math.ceil(math.log2(num_receivers + 1)) + num_blocks - 1
    held = [set(range(num_blocks)), *[set[int]() for _ in range(num_receivers)]]
    for step in steps:
        assert len({send.source for send in step}) == len(step), "one block out at a time"
        assert len({send.target for send in step}) == len(step), "one block in at a time"
        for send in step:
            assert send.block in held[send.source]
            assert send.block not in held[send.target]
        for send in step:
            held[send.target].add(send.block)
    assert all(len(blocks) == num_blocks for blocks in held)


def test_the_source_begins_with_any_block() -> None:
    steps = binomial_pipeline(3, 8, first_block=6)
    from_source = [send.block for step in steps for send in step if send.source == 0]
    assert from_source[:8] == [6, 7, 0, 1, 2, 3, 4, 5]


def test_nothing_to_send() -> None:
    with pytest.raises(ValueError, match="0 receivers"):
        binomial_pipeline(0, 4)
