"""What the placement decides."""

from __future__ import annotations

from dataclasses import dataclass

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
    waiting: frozenset[str] = frozenset()
    """Names of those of them that only wait for their turn."""
    unfinished: bool = False
    """There was more to look at than one look may: it goes on with the next."""
