"""Models whose only host copy one failure takes together with all instances, and since when. Monotonic seconds."""

from __future__ import annotations

from itertools import takewhile

from services.pool.core.copies import Key
from shared.failure_domains import FailureDomain


class ExposedCopies:
    """In the order in which they became so: moments never go back."""

    def __init__(self) -> None:
        self.due: dict[str, None] = {}
        """Hashes of those that have been so for long enough, as ``ripen`` was told."""
        self._exposed: dict[str, tuple[Key, FailureDomain]] = {}
        self._since_s: dict[str, float] = {}
        """Of those that are not due."""

    def put(self, model_hash: str, key: Key | None, domain: FailureDomain, now_s: float) -> None:
        """The model's only copy, and what it has in common with all instances; None: it has no one copy."""
        exposed = (key, domain) if key is not None and domain else None
        if self._exposed.get(model_hash) == exposed:
            return
        self.due.pop(model_hash, None)
        self._since_s.pop(model_hash, None)
        if exposed is None:
            del self._exposed[model_hash]
        else:
            self._exposed[model_hash] = exposed
            self._since_s[model_hash] = now_s

    def ripen(self, moment_s: float) -> list[str]:
        """Those that have been so since then or for longer are due; returns the new ones, the first first."""
        ripe = [h for h, _ in takewhile(lambda entry: entry[1] <= moment_s, self._since_s.items())]
        for model_hash in ripe:
            del self._since_s[model_hash]
            self.due[model_hash] = None
        return ripe

    def of(self, model_hash: str) -> tuple[Key, FailureDomain] | None:
        """The copy of a model, and what it has in common with all instances; None if it is not exposed."""
        return self._exposed.get(model_hash)
