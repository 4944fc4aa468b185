"""What is outstanding between one worker and one model. Times are monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OutstandingHold:
    """A copy that a worker was told to hold."""

    num_bytes: int
    until_s: float
    reported: bool = False


@dataclass(slots=True)
class Avoided:
    """A worker failed to hold a model."""

    until_s: float
    failures: int
    over: bool = False
    """It may be asked again; the failures still count."""


@dataclass(frozen=True, slots=True)
class Loading:
    """A placed copy that loads, as reported."""

    model: str
    serial: int
    since_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Leaving:
    """A process that said that it stops."""

    incarnation: str
    until_s: float


@dataclass(slots=True)
class Entry:
    """What is outstanding between one worker and one model."""

    hold: OutstandingHold | None = None
    drop_until_s: float | None = None
    to_disk: bool = False
    """What is dropped is the last copy in any memory, and the model stays on disk."""
    avoided: Avoided | None = None
    given_up_until_s: float | None = None
    loading: Loading | None = None
    overdue: bool = False

    @property
    def is_empty(self) -> bool:
        return not (
            self.hold or self.drop_until_s is not None or self.avoided or self.given_up_until_s is not None
        ) and not (self.loading or self.overdue)
