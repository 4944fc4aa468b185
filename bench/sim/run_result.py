"""What one simulated run came to, in the terms of a replay, and the figures that systems are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from bench.replay.document import About, Document
from bench.replay.objectives import Attainment, Slo
from bench.replay.observations import Cluster
from bench.replay.plan import PlannedRequest
from bench.replay.record import Collector, RequestRecord


@dataclass(frozen=True, slots=True)
class RunResult:
    """One system's run."""

    system: str
    requests: tuple[PlannedRequest, ...]
    records: tuple[RequestRecord, ...]
    """Of the requests that ended, in the order of the trace."""
    duration_s: float
    """From the first arrival to the end of the run."""
    cluster: Cluster
    num_events: int
    """Of the simulation."""
    zero_s: float = 0.0
    """That requests' due times count from, in the time of records and operations."""
    num_died: int = 0
    """Workers, each time that one died."""

    @property
    def mean_instances(self) -> float:
        """From the first arrival to the end for which GPU seconds are counted, in GPUs."""
        return self.cluster.gpu_seconds / max(1e-9, self.cluster.end_s - self.cluster.begin_s)

    def judged_by(self, slo: Slo) -> Attainment:
        """How many requests meet the objectives; failed and unfinished ones do not."""
        good = [record for record in self.records if record.failure is None]
        return Attainment.of(slo, good, planned=len(self.requests), duration_s=self.duration_s)

    def document(self, about: About, slo: Slo | None) -> Document:
        """As of a replay, for figures and reports. All gaps of all requests are looked at one by one."""
        collector = Collector(
            planned=len(self.requests),
            shortened=sum(request.shortened for request in self.requests),
            elapsed_s=self.duration_s,
            records=list(self.records),
        )
        document = Document.of(about, self.requests, collector, slo=slo, cluster=self.cluster)
        return msgspec.structs.replace(document, label=self.system)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A system's row. Latencies cover the requests that were completed; ``tbt_*`` all gaps between their tokens."""

    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tbt_mean_s: float | None
    tbt_p99_s: float | None
    slo_attainment: float
    """Within five times ``static-full``'s mean time to the first token and mean gap; if it does not run, another's."""
    slo_attainment_absolute: float
    gpu_seconds: float
    """Of all GPUs that hold an instance, from the first arrival to the last."""
    gpu_seconds_by_role: dict[str, float]
    host_cache_bytes_max: int
    nic_bytes: dict[str, int]
    requests: int
    failed: int
    unfinished: int
    """Had not ended when the simulation did: neither completed nor failed."""
    scale_outs: int
    """Operations that loaded instances."""
    scale_out_p50_s: float | None
    scale_out_max_s: float | None
    """From the trigger until the last instance served."""
    mean_gpus: float
    split: tuple[int, int] | None = None
    """Prefill and decode instances of a system that does not scale."""
    died: int = 0
    """Workers, each time that one died."""


def figures(result: RunResult, relative: Slo, absolute: Slo, split: tuple[int, int] | None = None) -> Figures:
    """A system's row, by these objectives."""
    good = [record for record in result.records if record.failure is None]
    ttft = np.array([record.ttft_s for record in good if record.ttft_s is not None])
    gaps = all_gaps(good)
    outs = [
        operation.trigger_to_serving_ms / 1000
        for operation in result.cluster.operations
        if operation.direction == "out" and operation.num_bytes and operation.trigger_to_serving_ms is not None
    ]
    cluster = result.cluster
    failures = [record.failure.kind for record in result.records if record.failure is not None]
    unfinished = failures.count("unfinished")
    return Figures(
        ttft_mean_s=_mean(ttft),
        ttft_p50_s=_percentile(ttft, 50),
        ttft_p99_s=_percentile(ttft, 99),
        tbt_mean_s=_mean(gaps),
        tbt_p99_s=_percentile(gaps, 99),
        slo_attainment=result.judged_by(relative).share,
        slo_attainment_absolute=result.judged_by(absolute).share,
        gpu_seconds=cluster.gpu_seconds,
        gpu_seconds_by_role=cluster.gpu_seconds_by_role,
        host_cache_bytes_max=cluster.host_cache_max_bytes or 0,
        nic_bytes={str(purpose): count for purpose, count in (cluster.nic_bytes or {}).items()},
        requests=len(result.requests),
        failed=len(failures) - unfinished,
        unfinished=unfinished,
        scale_outs=len(outs),
        scale_out_p50_s=_percentile(np.array(outs), 50),
        scale_out_max_s=max(outs, default=None),
        mean_gpus=result.mean_instances,
        split=split,
        died=result.num_died,
    )


def means(result: RunResult) -> tuple[float | None, float | None]:
    """Mean time to the first token and mean gap, of which the relative objectives are a multiple."""
    good = [record for record in result.records if record.failure is None]
    return _mean(np.array([r.ttft_s for r in good if r.ttft_s is not None])), _mean(all_gaps(good))


def all_gaps(records: Sequence[RequestRecord]) -> npt.NDArray[np.float64]:
    """Of all these requests, one after the other."""
    found = [np.asarray(record.gaps_s, dtype=np.float64) for record in records if len(record.gaps_s)]
    return np.concatenate(found) if found else np.empty(0)


def _mean(values: npt.NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def _percentile(values: npt.NDArray[np.float64], q: float) -> float | None:
    return float(np.percentile(values, q)) if len(values) else None
