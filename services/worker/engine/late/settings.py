"""How late an engine is, and what goes wrong in it by itself."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.device.late import LateTiming
from services.worker.engine.late.failures import LateFailures


@dataclass(frozen=True, kw_only=True)
class LateSettings:
    """Of a worker whose engine computes later than it is called."""

    timing: LateTiming
    failures: LateFailures
