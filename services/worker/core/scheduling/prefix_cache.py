"""KV that outlives its request: full blocks whose keys and values lie there in every layer, found by what they hold.

A block's key is a chained hash of all tokens up to its end, from a root of its own for each model and scope on
(``shared.prefixes``): only requests of the same scope find it. Blocks that requests hold are counted; what only the
cache holds is as good as free, to everybody who asks the pool, and given up by the time of its last use, ends of
contexts before their beginnings.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from services.worker.core.scheduling.blocks import BlockPool

Key = bytes


class PrefixCache(BlockPool):
    """A ``BlockPool`` that remembers what full blocks hold."""

    def __init__(self, num_blocks: int, block_size: int, prepared: int | None = None) -> None:
        super().__init__(num_blocks, block_size, prepared)
        self._num_holders = array("I", bytes(4 * num_blocks))
        self._key_of: dict[int, Key] = {}
        self._block_of: dict[Key, int] = {}
        self._idle: dict[int, None] = {}
        """Blocks that only the cache holds, the next one to give up first."""
        self.num_changes = 0
        """Of what is found, or of who holds it."""

    @property
    def num_used(self) -> int:
        return self.num_taken - len(self._idle)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_blocks - self.num_used

    def allocate(self, num_blocks: int) -> list[int]:
        if self.can_allocate(num_blocks):
            self._make_free(num_blocks)
        blocks = super().allocate(num_blocks)
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def append(self, block_table: list[int]) -> None:
        self._make_free(1)
        super().append(block_table)
        self._num_holders[block_table[-1]] = 1

    def free(self, blocks: Iterable[int]) -> None:
        holders, key_of = self._num_holders, self._key_of
        self.num_changes += 1
        for block in reversed(list(blocks)):
            if not 0 <= block < self.num_blocks or not holders[block]:
                raise ValueError(f"KV block {block} is not in use")
            holders[block] -= 1
            if holders[block]:
                continue
            if block in key_of:
                self._idle[block] = None
            else:
                super().free((block,))

    def remember(self, block: int, key: Key) -> None:
        """This block, which a request holds, is full and whole. Of two that hold the same the first is remembered."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block] = block, key
            self.num_changes += 1

    def doubt(self, blocks: Iterable[int]) -> None:
        """These are found no more, whoever holds them: what was computed with them was not what it should be."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                self.num_changes += 1
                del self._block_of[key]
                if block in self._idle:
                    del self._idle[block]
                    super().free((block,))

    def find(self, keys: Iterable[Key]) -> list[int]:
        """The blocks of the longest chain of these keys from the first on."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """A request holds these, which were just found, until they are freed."""
        self.num_changes += 1
        for block in blocks:
            if not self._num_holders[block]:
                del self._idle[block]
            self._num_holders[block] += 1

    def num_held(self, blocks: Iterable[int]) -> int:
        """How many of them a request holds already: they cost nothing to hold."""
        return sum(self._num_holders[block] > 0 for block in blocks)

    def num_alone(self, blocks: Sequence[int]) -> int:
        return sum(self._num_holders[block] == 1 for block in blocks)

    def _make_free(self, num_blocks: int) -> None:
        while self._idle and self.num_blocks - self.num_taken < num_blocks:
            self.num_changes += 1
            block = next(iter(self._idle))
            del self._idle[block]
            del self._block_of[self._key_of.pop(block)]
            super().free((block,))

    def check(self, held: Iterable[Iterable[int]]) -> None:
        owned = [block for table in held for block in table]
        expected = [0] * self.num_blocks
        for block in owned:
            expected[block] += 1
        assert list(self._num_holders) == expected, "a KV block has other holders than it counts"
        assert not set(owned) & set(self._idle), "a KV block that a request holds would be given up"
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        assert set(self._idle) <= set(self._key_of)
        super().check([sorted(set(owned)), self._idle])
