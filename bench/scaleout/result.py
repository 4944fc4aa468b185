"""What ``bench scaleout`` measured, and the document that ``--json`` writes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.messages.scaling import ScaleRecord

GIB = 1024**3
NO_HOST_COPIES = (
    "a scale operation makes no host copy: weights go from one worker's arena to the next, and disk is read into it"
)


@dataclass(frozen=True, slots=True)
class Run:
    """One scale operation."""

    strategy: str
    num_targets: int
    seconds: float
    """Trigger to the last target serving."""
    transfer_s: float
    """First byte to all bytes loaded and verified, of the target that took longest."""
    cpu_s: float
    """Of all workers together; the kernel's work for the network outside of them is not in it."""
    num_bytes: int
    """Loaded by all targets."""
    received_bytes: tuple[int, ...]
    """By target: what its interface counted."""
    targets: tuple[tuple[str, float, float, float], ...]
    """(worker, ms from trigger to first byte, to loaded, to serving)."""
    page_cache: str
    """``cold`` or ``warm`` where the checkpoint was read, else empty."""

    @classmethod
    def of(
        cls, strategy: str, record: ScaleRecord, cpu_s: float, received_bytes: tuple[int, ...], page_cache: str
    ) -> Run:
        """From a record whose targets all serve."""
        targets = tuple(
            (t.worker_id, t.first_byte_ms or 0.0, t.loaded_ms or 0.0, t.serving_ms or 0.0) for t in record.targets
        )
        return cls(
            strategy=strategy,
            num_targets=len(targets),
            seconds=max(serving for *_, serving in targets) / 1000,
            transfer_s=max(loaded - first for _, first, loaded, _ in targets) / 1000,
            cpu_s=cpu_s,
            num_bytes=record.bytes,
            received_bytes=received_bytes,
            targets=targets,
            page_cache=page_cache,
        )

    @property
    def cpu_s_per_gib(self) -> float:
        return self.cpu_s / (self.num_bytes / GIB)


@dataclass(frozen=True, slots=True)
class Result:
    """Everything of one call."""

    num_hosts: int
    rate_gbps: float
    """Nominal, per direction."""
    model_bytes: int
    goodput_gbps: tuple[float, ...]
    """Of plain TCP transfers of as many bytes over the same link, between the runs."""
    runs: tuple[Run, ...]
    worker_env: tuple[tuple[str, str], ...]

    @property
    def ideal_s(self) -> float:
        """The model's bytes at the median goodput."""
        return self.model_bytes * 8 / (statistics.median(self.goodput_gbps) * 1e9)

    @property
    def nominal_s(self) -> float:
        """The model's bytes at the nominal rate, headers not counted."""
        return self.model_bytes * 8 / (self.rate_gbps * 1e9)

    def strategies(self) -> tuple[tuple[str, int], ...]:
        """(strategy, number of targets), in the order of the first run of each."""
        return tuple(dict.fromkeys((r.strategy, r.num_targets) for r in self.runs))

    def of(self, strategy: str, num_targets: int) -> Sequence[Run]:
        return [r for r in self.runs if (r.strategy, r.num_targets) == (strategy, num_targets)]

    def seconds(self, strategy: str, num_targets: int) -> float:
        """Median over the repetitions."""
        return statistics.median(r.seconds for r in self.of(strategy, num_targets))

    def transfer_s(self, strategy: str, num_targets: int) -> float:
        return statistics.median(r.transfer_s for r in self.of(strategy, num_targets))

    def cpu_s_per_gib(self, strategy: str, num_targets: int) -> float:
        return statistics.median(r.cpu_s_per_gib for r in self.of(strategy, num_targets))

    def line_share(self, strategy: str, num_targets: int) -> float:
        """Of the nominal rate that each target received at on average, from trigger to serving."""
        return self.nominal_s / self.seconds(strategy, num_targets)

    def document(self) -> dict[str, Any]:
        """Numbers of targets are keys, as JSON has them: strings."""
        document: dict[str, Any] = {
            "hosts": self.num_hosts,
            "model_bytes": self.model_bytes,
            "rate_gbps": self.rate_gbps,
            "nominal_s": round(self.nominal_s, 4),
            "goodput_gbps": [round(g, 4) for g in self.goodput_gbps],
            "ideal_s": round(self.ideal_s, 4),
            "host_bytes_cached": 0,
            "host_bytes_cached_why": NO_HOST_COPIES,
            "worker_env": dict(self.worker_env),
        }
        for strategy, count in self.strategies():
            key = str(count)
            for name, value in (
                (f"{strategy}_s", self.seconds(strategy, count)),
                (f"{strategy}_of_ideal", self.seconds(strategy, count) / self.ideal_s),
                (f"{strategy}_transfer_s", self.transfer_s(strategy, count)),
                (f"{strategy}_cpu_s_per_gib", self.cpu_s_per_gib(strategy, count)),
            ):
                document.setdefault(name, {})[key] = round(value, 4)
            if strategy != "disk":
                share = round(self.line_share(strategy, count), 4)
                document.setdefault(f"{strategy}_line_share", {})[key] = share
        document["page_cache"] = next((r.page_cache for r in self.runs if r.page_cache), "")
        document["runs"] = [
            {
                "strategy": r.strategy,
                "targets": r.num_targets,
                "seconds": round(r.seconds, 4),
                "transfer_s": round(r.transfer_s, 4),
                "cpu_s": round(r.cpu_s, 3),
                "received_bytes": r.received_bytes,
                "target_ms": r.targets,
            }
            for r in self.runs
        ]
        return document
