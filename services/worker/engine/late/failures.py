"""What goes wrong in a late engine by itself: none of it is a fault of the callers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.completion import Completion, Landed
from shared.errors import Internal
from shared.messages.common import ErrorInfo


class InjectedFailure(RuntimeError):
    """What the engine was told to fail with."""


@dataclass(frozen=True, kw_only=True)
class LateFailures:
    """Drawn by a seed, in the order in which operations run."""

    seed: int = 0
    row_share: float = 0.0
    """Of the rows that are sampled: they have an error for a token."""
    step_share: float = 0.0
    """Of the operations that compute: they do nothing and fail."""
    device_after: int | None = None
    """So many operations that compute are run; from then on every operation fails."""


class FailingDevice:
    """Fails as it is told to. On the streams' threads, one operation at a time."""

    def __init__(self, failures: LateFailures) -> None:
        self._failures = failures
        self._chance = random.Random(failures.seed)
        self._num_computed = 0

    def strike(self, *, computes: bool) -> None:
        """An operation is next. Raises ``InjectedFailure`` where it is to fail."""
        failures = self._failures
        if failures.device_after is not None and self._num_computed >= failures.device_after:
            raise InjectedFailure("the device is lost, as it was told to be")
        if computes:
            self._num_computed += 1
            if self._chance.random() < failures.step_share:
                raise InjectedFailure("a step fails, as it was told to")

    def rows(self, sampled: Completion[list[Sampled]]) -> Completion[list[Sampled]]:
        """What was sampled, with errors in the rows that fail."""
        if not self._failures.row_share or sampled.error is not None:
            return sampled
        error = ErrorInfo.of(Internal("a row fails, as it was told to"))
        tokens = [
            Sampled(-1, error=error) if self._chance.random() < self._failures.row_share else token
            for token in sampled.result()
        ]
        return Landed(tokens, device_s=sampled.device_s)
