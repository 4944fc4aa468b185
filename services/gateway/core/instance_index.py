"""The instances of a model that may take a request, found by rank without looking at all of them.

A tournament tree over the instances in the order of their ids: a node knows the best rank, the most capacity and the
longest context below it. A change costs O(log n). A search follows the best rank and skips subtrees without capacity:
usually one path, and more only where the best-ranked instances have no capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

Rank = tuple[float, ...]
"""Lower is better."""
_NEVER: Rank = (math.inf,)


class InstanceIndex:
    """Of instances that are given once; each offers something, or nothing."""

    def __init__(self, instance_ids: Iterable[str]) -> None:
        self._ids = sorted(instance_ids)
        self._leaves = {instance_id: leaf for leaf, instance_id in enumerate(self._ids)}
        self._size = 1 << max(0, len(self._ids) - 1).bit_length()
        self._rank: list[Rank] = [_NEVER] * (2 * self._size)
        self._capacity: list[float] = [-1.0] * (2 * self._size)
        self._context: list[float] = [-1.0] * (2 * self._size)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._leaves

    def offer(self, instance_id: str, rank: tuple[float, ...], *, free_tokens: float, context_tokens: float) -> None:
        """The instance takes prompts of up to ``free_tokens``, of requests of up to ``context_tokens`` in all."""
        leaf = self._leaves[instance_id]
        self._set(leaf, (*rank, leaf), free_tokens, context_tokens)

    def withdraw(self, instance_id: str) -> None:
        """The instance takes nothing now."""
        self._set(self._leaves[instance_id], _NEVER, -1.0, -1.0)

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
