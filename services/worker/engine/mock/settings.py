"""What the mock is told to do: the time that its batches take, and what goes wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MockTiming:
    """Seconds that a batch takes. All zero: as fast as Python."""

    step_overhead_s: float = 0.0
    """Per batch, where it is embedded or resumed."""
    layer_base_s: float = 0.0
    """Per layer and batch: reading the weights."""
    layer_per_token_s: float = 0.0
    """Per layer and token of the batch."""
    layer_per_context_token_s: float = 0.0
    """Per layer and token of KV that the batch's slices attend to."""
    head_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MockFaults:
    """What a batch with one of these tokens does to the mock, for tests of faults. None: nothing."""

    raise_token: int | None = None
    """Its layers raise."""
    kill_token: int | None = None
    """The process dies in its layers, as of a fault in native code."""

    def strike(self, token_ids: Sequence[int]) -> None:
        """Do it."""
        if self.kill_token in token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.raise_token in token_ids:
            raise RuntimeError(f"the mock fails on token {self.raise_token}, as it was told to")
