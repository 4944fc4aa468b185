"""How large the simulated cluster is, and what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass

WORKERS_PER_HOST = 8
REPORT_INTERVAL_S = 0.1
MAX_TOKENS = 4
"""Of an answer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that decides what is done."""

    workers: int = 1000
    models: int = 500
    """Each with one instance that serves from the beginning to the end."""
    seconds: float = 60.0
    """Of the measurement."""
    rate: float = 200.0
    """Requests per second, over all gateways."""
    scales: float = 2.0
    """Scale operations per second: as many out as in."""
    gateways: int = 2
    fleets: int = 2
    """Processes that the simulated workers run in."""
    load_s: float = 0.2
    """What loading a model takes a simulated worker."""
    out_s: float = 3.0
    """How long an instance stays that a scale operation made."""
    report_interval_s: float = REPORT_INTERVAL_S

    @property
    def probes(self) -> int:
        """Models without an instance, on which the scale operations are made: one is out for a few seconds."""
        return max(2, round(self.scales * 4))

    @property
    def hosts(self) -> int:
        return -(-self.workers // WORKERS_PER_HOST)
