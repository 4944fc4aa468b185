"""What the placement decides, and what it knows of its earlier decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.pool.core.copies import Key
from shared.messages.copies import CopySource
from shared.messages.registry import ModelRecord, Unplaced


@dataclass(frozen=True, slots=True)
class Hold:
    """Have a worker load and keep a host copy."""

    worker_id: str
    record: ModelRecord
    sources: tuple[CopySource, ...]
    """In order of preference; empty: from disk."""
    reason: str

    @property
    def key(self) -> Key:
        return self.worker_id, self.record.model_hash


@dataclass(frozen=True, slots=True)
class Drop:
    """Have a worker retire a host copy and, once that is confirmed, free it."""

    worker_id: str
    model: str
    model_hash: str
    reason: str

    @property
    def key(self) -> Key:
        return self.worker_id, self.model_hash


@dataclass(frozen=True, slots=True)
class Placement:
    """What to do now, and which models have no host copy and none on its way."""

    steps: tuple[Hold | Drop, ...]
    unplaced: tuple[Unplaced, ...]
    hopeless: frozenset[str] = frozenset()
    """Hashes of those of them that no worker can hold as things are, not even once room is made."""


@dataclass(frozen=True, slots=True)
class Outstanding:
    """What earlier decisions led to, as far as the reports do not show it yet."""

    holds: Mapping[Key, int] = field(default_factory=dict)
    """Bytes of copies that workers were told to hold."""
    drops: Collection[Key] = frozenset()
    """Copies that workers were told to drop."""
    avoided: Collection[Key] = frozenset()
    """Workers that failed to hold a model a short while ago."""
    given_up: Collection[Key] = frozenset()
    """Last copies that their workers want to get rid of: to be replaced elsewhere."""
    overdue: Collection[Key] = frozenset()
    """Copies that have been loading for so long that they do not count."""
    leaving: Collection[str] = frozenset()
    """Workers that stop: what they hold is to be replaced, and they get nothing new."""
