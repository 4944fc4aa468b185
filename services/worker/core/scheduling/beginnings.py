"""What the prompts of an instance begin with, by how much of its work it is.

Gateways send prompts that begin alike to the same instances. What so many share that it is too much for them they tell
further apart; only the instances see all gateways' prompts, so they count. A conversation is not told apart, however
long it gets: each of its prompts goes on from the last one. What counts is where prompts part.

Bounded in entries, steps and reports: what is a small part of the work is forgotten first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages.load import MAX_HOT_PREFIXES, HotPrefix
from shared.prefixes import prefix_steps

MAX_ENTRIES = 4096
LEAST_SHARE = 1 / 16
"""Of the work. A beginning of less is not reported, and may be forgotten."""
PARTED_SHARE = 0.2
"""Of a beginning's work. If less of it goes on in other ways than the rest, it is not reported."""
MANY_END = 4
"""So many prompts that end at one beginning are not turns of a conversation."""
HALVE_EVERY = 256
"""Prompts, after which earlier ones count half."""
LOOK_EVERY = 16
"""Prompts, after which it is asked anew what is reported."""


@dataclass(slots=True)
class _Beginning:
    tokens: float
    """Of the prompts that have it."""
    steps: int
    first: bytes
    """The beginning of one step."""
    parent: bytes
    """The one that is a step shorter; empty: there is none."""
    ended_tokens: float = 0.0
    """Of those that do not go on for another step, and how many they are."""
    num_ended: float = 0.0


class Beginnings:
    """Counts prompts."""

    def __init__(self) -> None:
        self.tokens = 0.0
        """Of all prompts, later ones counting more."""
        self.hottest: tuple[HotPrefix, ...] = ()
        """Those of most work."""
        self._known: dict[bytes, _Beginning] = {}
        self._num_counted = 0

    def count(self, root: bytes, token_ids: Sequence[int]) -> None:
        """One more prompt, with the root of its scope."""
        known, size = self._known, len(token_ids)
        self.tokens += size
        first = parent = b""
        for steps, name in enumerate(prefix_steps(root, token_ids), start=1):
            first = first or name
            entry = known.get(name)
            if entry is None:
                known[name] = _Beginning(size, steps, first, parent)
            else:
                entry.tokens += size
            parent = name
        if parent:
            known[parent].ended_tokens += size
            known[parent].num_ended += 1
        self._num_counted += 1
        if self._num_counted % HALVE_EVERY == 0:
            self.tokens /= 2
            for entry in known.values():
                entry.tokens /= 2
                entry.ended_tokens /= 2
                entry.num_ended /= 2
        if len(known) > MAX_ENTRIES:
            least = LEAST_SHARE * self.tokens
            self._known = {name: entry for name, entry in known.items() if entry.tokens >= least}
        if self._num_counted % LOOK_EVERY == 0:
            self.hottest = self._hottest()

    def _hottest(self) -> tuple[HotPrefix, ...]:
        least = LEAST_SHARE * self.tokens
        most_go_on: dict[bytes, float] = {}
        for entry in self._known.values():
            most_go_on[entry.parent] = max(entry.tokens, most_go_on.get(entry.parent, 0.0))
        shown = []
        for name, entry in self._known.items():
            if entry.tokens >= least:
                ended = entry.ended_tokens if entry.num_ended < MANY_END else 0.0
                if entry.tokens - ended - most_go_on.get(name, 0.0) >= PARTED_SHARE * entry.tokens:
                    shown.append((entry.tokens, name, entry))
        shown.sort(key=lambda one: -one[0])
        return tuple(
            HotPrefix(name=name, first=entry.first, steps=entry.steps, tokens=round(tokens))
            for tokens, name, entry in shown[:MAX_HOT_PREFIXES]
        )
