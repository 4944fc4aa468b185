"""Since when copies that loads left on their hosts are of no use there. Monotonic seconds."""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

from services.pool.core.copies import Held, Key


class UnusedCopies:
    """In the order in which they became unused: moments never go back."""

    def __init__(self) -> None:
        self._since: dict[Key, tuple[Held, float]] = {}
        self._of_model: dict[str, set[Key]] = {}

    def put(self, model_hash: str, unused: Collection[Held], now_s: float) -> None:
        """These copies of a model, and no others, are unused now."""
        held_of = {held.key: held for held in unused}
        known = self._of_model.pop(model_hash, set())
        for key in known - held_of.keys():
            del self._since[key]
        for key, held in sorted(held_of.items()):
            # Replacing a value keeps its place.
            self._since[key] = held, self._since[key][1] if key in known else now_s
        if held_of:
            self._of_model[model_hash] = set(held_of)

    def before(self, moment_s: float) -> list[tuple[Held, float]]:
        """Those that are unused since then or for longer, and since when; the longest unused first."""
        return list(takewhile(lambda entry: entry[1] <= moment_s, self._since.values()))
