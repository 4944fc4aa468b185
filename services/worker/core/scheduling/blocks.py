"""The KV pool's blocks: which are free, and who gets which.

A sequence's blocks are handed out as one ascending run wherever a run is long enough, and
grow at their end while the next block is free: attention on the CPU reads a contiguous run
as a view and must gather a scattered one. To leave neighbours room to grow, a new run goes
into the middle of the widest gap below the *reach*. Memory that was never used costs its first user time (0.3 to 7 ms
per huge page, of which a block has one per layer for K and for V), so the reach begins with the blocks that are
prepared, and doubles when half of the blocks below it are used.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class BlockPool:
    """``num_blocks`` KV blocks of ``block_size`` tokens, of which the first ``prepared`` are used first.

    Free blocks are kept as maximal runs, by first block and by last block, so that taking and
    returning a block costs O(1) and placing a new run O(number of runs).
    """

    def __init__(self, num_blocks: int, block_size: int, prepared: int | None = None) -> None:
        """``prepared``: None is all of them."""
        if num_blocks <= 0 or block_size <= 0:
            raise ValueError(f"a KV pool needs blocks: {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_free = num_blocks
        self._reach = num_blocks if prepared is None else min(num_blocks, max(1, prepared))
        self._last_of: dict[int, int] = {0: num_blocks - 1}
        """First block of each free run -> its last block."""
        self._first_of: dict[int, int] = {num_blocks - 1: 0}
        """Last block of each free run -> its first block."""
        self._used = bytearray(num_blocks)
        self._times_freed: array[int] | None = None

    @property
    def num_used(self) -> int:
        return self.num_taken

    @property
    def num_taken(self) -> int:
        """That are in no free run."""
        return self.num_blocks - self._num_free

    @property
    def wanted_blocks(self) -> int:
        """So many of the first blocks should be prepared by now: it tells of the reach before it grows."""
        return self._reach if 4 * self.num_taken <= self._reach else min(self.num_blocks, 2 * self._reach)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self._num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """Take ``num_blocks`` blocks, ascending; one run if any free run is long enough.

        Raises ``ValueError`` when fewer are free: ask ``can_allocate`` first.
        """
        if num_blocks > self._num_free:
            raise ValueError(f"{num_blocks} KV blocks wanted, {self._num_free} free")
        if num_blocks <= 0:
            return []
        while 2 * (self.num_taken + num_blocks) > self._reach < self.num_blocks:
            self._extend_reach()
        first, last = self._widest()
        while self._width((first, last)) < num_blocks and self._reach < self.num_blocks:
            self._extend_reach()
            first, last = self._widest()
        spare = self._width((first, last)) - num_blocks
        if spare >= 0:
            start = first if first == 0 else first + spare // 2
            self._take(first, last, start, start + num_blocks - 1)
            return list(range(start, start + num_blocks))
        taken: list[int] = []
        for first, last in self._widest_first():
            count = min(last - first + 1, num_blocks - len(taken))
            self._take(first, last, first, first + count - 1)
            taken.extend(range(first, first + count))
            if len(taken) == num_blocks:
                break
        taken.sort()
        return taken

    def _extend_reach(self) -> None:
        self._reach = min(self.num_blocks, 2 * self._reach)

    def _width(self, run: tuple[int, int]) -> int:
        """Blocks of a free run (first, last) below the reach; 0 or less if it lies beyond."""
        return min(run[1] + 1, self._reach) - run[0]

    def _widest(self) -> tuple[int, int]:
        """The first of ``_widest_first``. A loop, as each request asks for it: to sort a few hundred runs takes seven
        times as long."""
        reach, most, widest = self._reach, -self.num_blocks, (0, 0)
        for first, last in self._last_of.items():
            width = (last + 1 if last < reach else reach) - first
            if width > most or (width == most and first < widest[0]):
                most, widest = width, (first, last)
        return widest

    def _widest_first(self) -> list[tuple[int, int]]:
        """The free runs; among equals the lowest first, so that placement is deterministic."""
        return sorted(self._last_of.items(), key=lambda run: (-self._width(run), run[0]))

    def append(self, block_table: list[int]) -> None:
        """Grow ``block_table`` by one block, the one behind its last if that is free.

        Raises ``ValueError`` when no block is free.
        """
        if block_table:
            block = block_table[-1] + 1
            last = self._last_of.get(block)
            if last is None and block < self.num_blocks and not self._used[block]:
                raise AssertionError(f"free block {block} behind a used one starts no free run")
            if last is not None:
                self._take(block, last, block, block)
                block_table.append(block)
                return
        block_table.extend(self.allocate(1))

    def num_alone(self, blocks: Sequence[int]) -> int:
        """How many blocks of a request nobody else holds."""
        return len(blocks)

    def count_freed(self) -> Sequence[int]:
        """How often each block was freed since this was first asked; it goes on counting. Who uses blocks later than it
        was told of them sees here whether they are still the same ones."""
        if self._times_freed is None:
            self._times_freed = array("Q", bytes(8 * self.num_blocks))
        return self._times_freed

    def free(self, blocks: Iterable[int]) -> None:
        """Return blocks. Raises ``ValueError`` for one that is not in use."""
        times_freed = self._times_freed
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self._used[block]:
                raise ValueError(f"KV block {block} is not in use")
            self._used[block] = 0
            self._num_free += 1
            if times_freed is not None:
                times_freed[block] += 1
            first = last = block
            if block and not self._used[block - 1]:
                first = self._first_of.pop(block - 1)
                del self._last_of[first]
            if block + 1 < self.num_blocks and not self._used[block + 1]:
                last = self._last_of.pop(block + 1)
                del self._first_of[last]
            self._last_of[first] = last
            self._first_of[last] = first

    def _take(self, run_first: int, run_last: int, first: int, last: int) -> None:
        """Take ``first..last`` out of the free run ``run_first..run_last``."""
        del self._last_of[run_first], self._first_of[run_last]
        if run_first < first:
            self._last_of[run_first] = first - 1
            self._first_of[first - 1] = run_first
        if last < run_last:
            self._last_of[last + 1] = run_last
            self._first_of[run_last] = last + 1
        count = last - first + 1
        self._used[first : last + 1] = b"\1" * count
        self._num_free -= count

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Assert that ``held`` (the block tables) and the free runs partition the pool. For tests."""
        owned = [block for table in held for block in table]
        assert len(owned) == len(set(owned)), "a KV block has two owners"
        free = [block for first, last in self._last_of.items() for block in range(first, last + 1)]
        assert sorted(owned + free) == list(range(self.num_blocks)), "a KV block is lost"
        assert len(free) == self._num_free
        assert {last: first for first, last in self._last_of.items()} == self._first_of
        assert all(first == 0 or self._used[first - 1] for first in self._last_of), "free runs are not maximal"
