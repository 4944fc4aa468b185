"""When each model was last used: had an instance, in any state. Monotonic seconds."""

from __future__ import annotations

import math


class ModelUsage:
    """Follows what is observed since this pool leads; an earlier use counts as one when it began to."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}
        self._known_s: dict[str, float] = {}

    def know(self, model_hash: str, now_s: float) -> None:
        """The model is registered."""
        self._known_s.setdefault(model_hash, now_s)

    def forget(self, model_hash: str) -> None:
        """It is not any more."""
        self._used_s.pop(model_hash, None)
        self._known_s.pop(model_hash, None)

    def observe(self, model_hash: str, now_s: float, *, in_use: bool) -> None:
        """Whether the model has an instance now."""
        if in_use:
            self._used_s[model_hash] = math.inf
        elif self._used_s.get(model_hash) == math.inf:
            self._used_s[model_hash] = now_s

    def used_s(self, model_hash: str) -> float:
        """When it was last seen in use; infinite while it is, negatively so if it never was."""
        return self._used_s.get(model_hash, -math.inf)

    def unused_since_s(self, model_hash: str) -> float:
        """Since when it certainly has not been in use; infinite while it is."""
        return max(self.used_s(model_hash), self._known_s.get(model_hash, -math.inf))
