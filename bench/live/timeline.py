"""A burst over time, in buckets: layers by each side, first tokens, and when the weights were complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.messages.operations import LiveRecord

BUCKET_S = 0.05
_EDGE = 1e-9


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times in seconds since the burst."""

    bucket_s: float
    start_s: float
    """Of the first bucket of layers: when the pair began."""
    source_layers: tuple[int, ...]
    """Layers of prompt batches run per bucket."""
    target_layers: tuple[int, ...]
    first_tokens_s: tuple[float, ...]
    """In ascending order."""
    loaded_s: float
    """The target has everything."""
    ended_s: float | None = None
    """The pair was dissolved. Afterwards no layers are counted."""

    @classmethod
    def of(
        cls, live: LiveRecord | None, *, trigger_s: float, loaded_s: float, first_tokens_s: Sequence[float]
    ) -> Timeline:
        """``trigger_s``: the scale operation's trigger, since the burst. Without a pair there are no layers."""
        if live is None:
            return cls(BUCKET_S, 0.0, (), (), tuple(sorted(first_tokens_s)), loaded_s)
        return cls(
            bucket_s=live.bucket_ms / 1000,
            start_s=trigger_s + (live.started_ms or 0.0) / 1000,
            source_layers=live.source_layers,
            target_layers=live.target_layers,
            first_tokens_s=tuple(sorted(first_tokens_s)),
            loaded_s=loaded_s,
            ended_s=None if live.ended_ms is None else trigger_s + live.ended_ms / 1000,
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """By both sides, per bucket."""
        count = max(len(self.source_layers), len(self.target_layers))
        sides = (self.source_layers, self.target_layers)
        return tuple(sum(side[i] for side in sides if i < len(side)) for i in range(count))

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """First tokens that came, per bucket from the burst on."""
        if not self.first_tokens_s:
            return ()
        counts = [0] * (int(self.first_tokens_s[-1] / self.bucket_s + _EDGE) + 1)
        for at_s in self.first_tokens_s:
            counts[int(at_s / self.bucket_s + _EDGE)] += 1
        return tuple(counts)

    def layers_per_s(self, until_s: float) -> float | None:
        """Mean of both sides together over the buckets that end by ``until_s``; None: there is none."""
        count = int((until_s - self.start_s) / self.bucket_s + _EDGE)
        counted = self.layers[: max(0, count)]
        return sum(counted) / (len(counted) * self.bucket_s) if counted else None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "bucket_s": self.bucket_s,
            "start_s": round(self.start_s, 4),
            "source_layers": self.source_layers,
            "target_layers": self.target_layers,
            "first_tokens": self.first_tokens,
            "first_tokens_s": [round(at_s, 4) for at_s in self.first_tokens_s],
            "loaded_s": round(self.loaded_s, 4),
            "ended_s": None if self.ended_s is None else round(self.ended_s, 4),
        }
