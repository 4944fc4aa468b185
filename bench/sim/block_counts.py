"""KV blocks that are only counted: which they are matters to no one where nothing is computed."""

from __future__ import annotations

from collections.abc import Iterable

from services.worker.core.scheduling.blocks import BlockPool


class BlockCounts(BlockPool):
    """Every block is block 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(1, block_size)
        self.num_blocks = num_blocks
        self._num_counted = 0

    @property
    def num_used(self) -> int:
        return self._num_counted

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_blocks - self._num_counted

    def allocate(self, num_blocks: int) -> list[int]:
        """See ``BlockPool.allocate``."""
        if not self.can_allocate(num_blocks):
            raise ValueError(f"{num_blocks} KV blocks wanted, {self.num_blocks - self._num_counted} free")
        self._num_counted += max(0, num_blocks)
        return [0] * num_blocks

    def append(self, block_table: list[int]) -> None:
        """See ``BlockPool.append``."""
        block_table += self.allocate(1)

    def free(self, blocks: Iterable[int]) -> None:
        """See ``BlockPool.free``."""
        self._num_counted -= len(list(blocks))
        if self._num_counted < 0:
            raise ValueError("a KV block is not in use")

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """See ``BlockPool.check``."""
        assert sum(len(list(table)) for table in held) == self._num_counted
