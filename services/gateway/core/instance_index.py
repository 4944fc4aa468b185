"""The instances of a model that may take a request, found by rank without looking at all of them.

A tournament tree over the instances: a node knows the best rank, the most capacity and the longest context below it. A
change costs O(log n). A search follows the best rank and skips subtrees without capacity: usually one path, and more
only where the best-ranked instances have no capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

Rank = tuple[tuple[float, ...], str]
"""Lower is better; of equal ones the lower id is."""
_NEVER: Rank = ((math.inf,), "")


class InstanceIndex:
    """Each instance offers something, or nothing."""

    def __init__(self, instance_ids: Iterable[str] = ()) -> None:
        self._leaves: dict[str, int] = {}
        self._ids: list[str] = []
        """By leaf; empty where there is none."""
        self._free: list[int] = []
        """Leaves without an instance."""
        self._size = 0
        self._rank: list[Rank] = []
        self._capacity: list[float] = []
        self._context: list[float] = []
        self.keep(instance_ids)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._leaves

    def keep(self, instance_ids: Iterable[str]) -> None:
        """These instances are there, and no others. Those that were keep their offers; new ones offer nothing."""
        there = set(instance_ids)
        for instance_id in sorted(self._leaves.keys() - there):
            self.withdraw(instance_id)
            leaf = self._leaves.pop(instance_id)
            self._ids[leaf] = ""
            self._free.append(leaf)
        if not self._size or len(there) > self._size:
            self._grow(len(there))
        for instance_id in sorted(there - self._leaves.keys()):
            leaf = self._free.pop()
            self._ids[leaf], self._leaves[instance_id] = instance_id, leaf

    def offer(self, instance_id: str, rank: tuple[float, ...], *, free_tokens: float, context_tokens: float) -> None:
        """The instance takes prompts of up to ``free_tokens``, of requests of up to ``context_tokens`` in all."""
        self._set(self._leaves[instance_id], (rank, instance_id), free_tokens, context_tokens)

    def withdraw(self, instance_id: str) -> None:
        """The instance takes nothing now."""
        self._set(self._leaves[instance_id], _NEVER, -1.0, -1.0)

    def rank_of(self, instance_id: str, prompt_tokens: int, context_tokens: int) -> tuple[float, ...] | None:
        """What the instance offers to such a request; None: nothing."""
        leaf = self._leaves.get(instance_id)
        if leaf is None:
            return None
        node = self._size + leaf
        if self._capacity[node] < prompt_tokens or self._context[node] < context_tokens:
            return None
        return self._rank[node][0]

    def best(self, prompt_tokens: int, context_tokens: int, avoid: Set[str]) -> str | None:
        """The instance with the lowest rank, then id, that has capacity; one of ``avoid`` only if there is no other."""
        found = self._search(prompt_tokens, context_tokens, avoid)
        if found is None and avoid:
            found = self._search(prompt_tokens, context_tokens, frozenset())
        return found

    def _search(self, prompt_tokens: int, context_tokens: int, avoid: Set[str]) -> str | None:
        ranks, capacities, contexts, size = self._rank, self._capacity, self._context, self._size
        best: str | None = None
        best_rank = _NEVER
        nodes = [1]
        while nodes:
            node = nodes.pop()
            if ranks[node] >= best_rank or capacities[node] < prompt_tokens or contexts[node] < context_tokens:
                continue
            if node >= size:
                instance_id = self._ids[node - size]
                if instance_id not in avoid:
                    best, best_rank = instance_id, ranks[node]
                continue
            left, right = 2 * node, 2 * node + 1
            # The better half last, that is, looked at first.
            nodes += (right, left) if ranks[left] <= ranks[right] else (left, right)
        return best

    def _grow(self, least: int) -> None:
        """At least twice as large as it was: what comes one by one costs no more than at once."""
        before, size = self._size, 1 << max(0, max(least, 2 * self._size) - 1).bit_length()
        below = slice(before, 2 * before)
        ranks, capacities, contexts = self._rank[below], self._capacity[below], self._context[below]
        self._size = size
        self._rank, self._capacity, self._context = [_NEVER] * (2 * size), [-1.0] * (2 * size), [-1.0] * (2 * size)
        self._ids += [""] * (size - before)
        self._free += range(size - 1, before - 1, -1)
        for leaf, known in enumerate(zip(ranks, capacities, contexts, strict=True)):
            self._set(leaf, *known)

    def _set(self, leaf: int, rank: Rank, capacity: float, context: float) -> None:
        ranks, capacities, contexts = self._rank, self._capacity, self._context
        node = self._size + leaf
        ranks[node], capacities[node], contexts[node] = rank, capacity, context
        node //= 2
        while node:
            left, right = 2 * node, 2 * node + 1
            ranks[node] = min(ranks[left], ranks[right])
            capacities[node] = max(capacities[left], capacities[right])
            contexts[node] = max(contexts[left], contexts[right])
            node //= 2
