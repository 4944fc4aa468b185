"""What ``bench scaleout`` measured, and the document that ``--json`` writes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.scaleout.background import Background
from bench.scaleout.rows import HOST_CACHE, HOST_CACHE_MISS, Row
from shared.messages.operations import ScaleRecord

GIB = 1024**3
_CACHING = (HOST_CACHE_MISS, HOST_CACHE)


@dataclass(frozen=True, slots=True)
class Run:
    """One scale operation."""

    row: Row
    num_targets: int
    seconds: float
    """Trigger to the last target serving."""
    transfer_s: float
    """First piece there to all bytes loaded and verified, of the target that took longest."""
    cpu_s: float
    """Of all workers together; the kernel's work for the network outside of them is not in it."""
    num_bytes: int
    """Loaded by all targets."""
    received_bytes: tuple[int, ...]
    """By target: what its interface counted."""
    sent_bytes: tuple[int, ...]
    """By host: what its interface counted. In a chain no host sends more than one copy, in a star one sends all."""
    targets: tuple[tuple[str, float, float, float], ...]
    """(worker, ms from trigger to the first piece there, to loaded, to serving)."""
    local: tuple[str, ...]
    """Targets that held a copy in host memory themselves: their bytes need not cross a link."""
    host_bytes: int
    """Of all copies in host memory, in the whole lab, once it was over."""
    explain: tuple[str, ...]
    """The plan's reasons."""

    @classmethod
    def of(
        cls,
        row: Row,
        record: ScaleRecord,
        *,
        cpu_s: float,
        received_bytes: tuple[int, ...],
        sent_bytes: tuple[int, ...],
        local: tuple[str, ...],
        host_bytes: int,
    ) -> Run:
        """From a record whose targets all serve."""
        targets = tuple(
            (t.worker_id, t.first_byte_ms or 0.0, t.loaded_ms or 0.0, t.serving_ms or 0.0) for t in record.targets
        )
        return cls(
            row=row,
            num_targets=len(targets),
            seconds=max(serving for *_, serving in targets) / 1000,
            transfer_s=max(loaded - first for _, first, loaded, _ in targets) / 1000,
            cpu_s=cpu_s,
            num_bytes=record.bytes,
            received_bytes=received_bytes,
            sent_bytes=sent_bytes,
            targets=targets,
            local=local,
            host_bytes=host_bytes,
            explain=record.explain,
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
    background: Background | None = None

    @property
    def ideal_s(self) -> float:
        """The model's bytes at the median goodput."""
        return self.model_bytes * 8 / (statistics.median(self.goodput_gbps) * 1e9)

    @property
    def nominal_s(self) -> float:
        """The model's bytes at the nominal rate, headers not counted."""
        return self.model_bytes * 8 / (self.rate_gbps * 1e9)

    @property
    def host_bytes_cached(self) -> int:
        """Host memory that held copies while our own strategies scaled; of all hosts together, at most."""
        return max((r.host_bytes for r in self.runs if r.row not in _CACHING), default=0)

    @property
    def host_cache_bytes_cached(self) -> int:
        """The same under ``host-cache``, of the copies that it keeps and the one that the pool has placed."""
        return max((r.host_bytes for r in self.runs if r.row in _CACHING), default=0)

    def rows(self) -> tuple[tuple[Row, int], ...]:
        """(row, number of targets), in the order of the first run of each."""
        return tuple(dict.fromkeys((r.row, r.num_targets) for r in self.runs))

    def of(self, row: Row, num_targets: int) -> Sequence[Run]:
        return [r for r in self.runs if (r.row, r.num_targets) == (row, num_targets)]

    def seconds(self, row: Row, num_targets: int) -> float:
        """Median over the repetitions."""
        return statistics.median(r.seconds for r in self.of(row, num_targets))

    def transfer_s(self, row: Row, num_targets: int) -> float:
        return statistics.median(r.transfer_s for r in self.of(row, num_targets))

    def cpu_s_per_gib(self, row: Row, num_targets: int) -> float:
        return statistics.median(r.cpu_s_per_gib for r in self.of(row, num_targets))

    def line_share(self, row: Row, num_targets: int) -> float:
        """Of the nominal rate that each target received at on average, from trigger to serving."""
        return self.nominal_s / self.seconds(row, num_targets)

    def document(self) -> dict[str, Any]:
        """Numbers of targets are keys, as JSON has them: strings."""
        document: dict[str, Any] = {
            "hosts": self.num_hosts,
            "model_bytes": self.model_bytes,
            "rate_gbps": self.rate_gbps,
            "nominal_s": round(self.nominal_s, 4),
            "goodput_gbps": [round(g, 4) for g in self.goodput_gbps],
            "ideal_s": round(self.ideal_s, 4),
            "host_bytes_cached": self.host_bytes_cached,
            "worker_env": dict(self.worker_env),
        }
        for row, count in self.rows():
            key = str(count)
            for name, value in (
                (f"{row.key}_s", self.seconds(row, count)),
                (f"{row.key}_of_ideal", self.seconds(row, count) / self.ideal_s),
                (f"{row.key}_transfer_s", self.transfer_s(row, count)),
                (f"{row.key}_cpu_s_per_gib", self.cpu_s_per_gib(row, count)),
            ):
                document.setdefault(name, {})[key] = round(value, 4)
            if row.over_network:
                share = round(self.line_share(row, count), 4)
                document.setdefault(f"{row.key}_line_share", {})[key] = share
            if row in _CACHING:
                document["host_cache_bytes_cached"] = self.host_cache_bytes_cached
        if self.background is not None:
            document["background"] = self.background.document()
        document["runs"] = [
            {
                "strategy": r.row.name,
                "page_cache": r.row.page_cache,
                "targets": r.num_targets,
                "seconds": round(r.seconds, 4),
                "transfer_s": round(r.transfer_s, 4),
                "cpu_s": round(r.cpu_s, 3),
                "received_bytes": r.received_bytes,
                "sent_bytes": r.sent_bytes,
                "target_ms": r.targets,
                "local_targets": r.local,
                "host_bytes": r.host_bytes,
                "explain": r.explain,
            }
            for r in self.runs
        ]
        return document
