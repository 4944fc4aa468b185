"""What runs add up to: figures of a repetition, their medians, and how far they would differ by chance. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from bench.evaluate.saved_run import SavedRun
from bench.replay.document import RequestRow
from bench.replay.objectives import FACTOR, Slo

BLOCK_S = 10.0
RESAMPLES = 300
_TAILS = (2.5, 97.5)
_Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Judged:
    """A run, with the objectives of its repetition. Relative ones need a run of ``static-full``."""

    run: SavedRun
    relative: Slo | None
    absolute: Slo

    @property
    def is_void(self) -> bool:
        """It does not count."""
        return bool(self.run.document.void)


def relative_slo(static_full: SavedRun) -> Slo | None:
    """Five times its means (the paper, section 6.2). None: nothing was completed, or the run is void."""
    result = static_full.document.result
    if static_full.document.void or result.ttft_s is None or result.tbt_s is None:
        return None
    return Slo(FACTOR * result.ttft_s.mean, FACTOR * result.tbt_s.mean)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of a system: of one run, or of several that are pooled."""

    ttft_mean_s: float | None
    ttft_p99_s: float | None
    tbt_mean_s: float | None
    """Over all gaps between tokens."""
    tbt_p99_s: float | None
    slo_attainment: float | None
    """Of all requests, within five times the means of ``static-full``. None: that was not measured."""
    slo_attainment_absolute: float
    goodput_requests_per_s: float
    """Within the absolute objectives."""
    gpu_seconds: float
    mean_instances: float
    host_cache_bytes_max: int | None
    host_copies_max: float | None
    nic_bytes: dict[str, int]
    requests: int
    failed: int
    """Unfinished ones among them."""
    scale_out_s: tuple[float, ...]
    """Seconds from the trigger until all of an operation's instances served."""


@dataclass(frozen=True, slots=True)
class Block:
    """The requests that were due within some seconds of one run."""

    requests: int
    within: int | None
    """The relative objectives; None: there are none."""
    within_absolute: int
    ttft_s: _Values
    gaps_s: _Values


def blocks(judged: Iterable[Judged]) -> list[Block]:
    """By ``BLOCK_S`` of each run."""
    return [block for one in judged for _, block in _blocks_of(one)]


def _blocks_of(one: Judged) -> Iterator[tuple[int, Block]]:
    """With their numbers."""
    rows: dict[int, list[tuple[RequestRow, tuple[float, ...]]]] = defaultdict(list)
    for row, gaps_s in zip(one.run.document.records, one.run.gaps_s, strict=True):
        rows[math.floor(row.due_s / BLOCK_S)].append((row, gaps_s))
    for number, held in sorted(rows.items()):
        good = [(row, gaps_s) for row, gaps_s in held if row.failure is None]
        yield (
            number,
            Block(
                requests=len(held),
                within=None if one.relative is None else sum(_meets(one.relative, row) for row, _ in good),
                within_absolute=sum(_meets(one.absolute, row) for row, _ in good),
                ttft_s=np.array([row.ttft_s for row, _ in good if row.ttft_s is not None]),
                gaps_s=np.array([gap_s for _, gaps_s in good for gap_s in gaps_s]),
            ),
        )


def _meets(slo: Slo, row: RequestRow) -> bool:
    return slo.meets_ttft(row) and slo.meets_tbt(row)


def figures(judged: Sequence[Judged], *, num_gpus: int = 1) -> Figures:
    """Of runs that are pooled, at least one. ``num_gpus``: of an instance."""
    parts = blocks(judged)
    ttft, gaps = _joined(part.ttft_s for part in parts), _joined(part.gaps_s for part in parts)
    documents = [one.run.document for one in judged]
    clusters = [d.cluster for d in documents if d.cluster is not None]
    planned = sum(d.result.planned for d in documents)
    within = sum(part.within or 0 for part in parts)
    absolute = sum(part.within_absolute for part in parts)
    cached = [c.host_cache_max_bytes for c in clusters if c.host_cache_max_bytes is not None]
    nic: dict[str, int] = defaultdict(int)
    for cluster in clusters:
        for purpose, num_bytes in (cluster.nic_bytes or {}).items():
            nic[purpose] += num_bytes
    return Figures(
        ttft_mean_s=_mean(ttft),
        ttft_p99_s=_p99(ttft),
        tbt_mean_s=_mean(gaps),
        tbt_p99_s=_p99(gaps),
        slo_attainment=within / planned if all(one.relative is not None for one in judged) else None,
        slo_attainment_absolute=absolute / planned,
        goodput_requests_per_s=absolute / sum(one.run.plan.window.seconds for one in judged),
        gpu_seconds=num_gpus * sum(c.gpu_seconds for c in clusters),
        mean_instances=statistics.fmean(one.run.mean_instances for one in judged),
        host_cache_bytes_max=max(cached, default=None),
        host_copies_max=max(
            (
                c.host_cache_max_bytes / c.weights_bytes
                for c in clusters
                if c.host_cache_max_bytes is not None and c.weights_bytes
            ),
            default=None,
        ),
        nic_bytes=dict(nic),
        requests=planned,
        failed=sum(d.result.failed + d.result.unfinished for d in documents),
        scale_out_s=tuple(
            operation.trigger_to_serving_ms / 1000
            for cluster in clusters
            for operation in cluster.operations
            if operation.direction == "out" and operation.trigger_to_serving_ms is not None
        ),
    )


def medians(of: Sequence[Figures]) -> Figures:
    """Of repetitions, each figure by itself, of those that have it; durations of operations are listed together."""
    found: dict[str, object] = {}
    for name in Figures.__struct_fields__:
        values = [value for one in of if (value := getattr(one, name)) is not None]
        if name == "scale_out_s":
            found[name] = tuple(value for one in values for value in one)
        elif name == "nic_bytes":
            found[name] = {key: round(statistics.median(v[key] for v in values)) for key in values[0]}
        elif not values:
            found[name] = None
        else:
            median = statistics.median(values)
            found[name] = round(median) if all(isinstance(value, int) for value in values) else median
    return msgspec.convert(found, Figures)


class Interval(msgspec.Struct, frozen=True):
    """Holds 95 of 100 resamplings."""

    low: float
    high: float


def intervals(judged: Sequence[Judged], *, seed: int, resamples: int = RESAMPLES) -> dict[str, Interval]:
    """Of the figures of requests, by resampling blocks of 10 s of the trace, each with all of its repetitions: neither
    requests of one burst nor repetitions of a request are independent. A figure that was not measured has none."""
    same: dict[tuple[float, int], list[Block]] = defaultdict(list)
    for one in judged:
        for number, block in _blocks_of(one):
            same[one.run.plan.window.start_s, number].append(block)
    if not same:
        return {}
    parts = list(same.values())
    of: dict[str, Callable[[list[Block]], float | None]] = {
        "ttft_mean_s": lambda drawn: _mean(_joined(part.ttft_s for part in drawn)),
        "ttft_p99_s": lambda drawn: _p99(_joined(part.ttft_s for part in drawn)),
        "tbt_mean_s": lambda drawn: _mean(_joined(part.gaps_s for part in drawn)),
        "tbt_p99_s": lambda drawn: _p99(_joined(part.gaps_s for part in drawn)),
        "slo_attainment_absolute": lambda drawn: _share(drawn, lambda part: part.within_absolute),
        "slo_attainment": lambda drawn: _share(drawn, lambda part: part.within),
    }
    random_ = random.Random(f"bootstrap/{seed}")
    values: dict[str, list[float]] = defaultdict(list)
    for _ in range(resamples):
        drawn = [block for part in random_.choices(parts, k=len(parts)) for block in part]
        for name, figure in of.items():
            if (value := figure(drawn)) is not None:
                values[name].append(value)
    return {name: Interval(*(float(edge) for edge in np.percentile(found, _TAILS))) for name, found in values.items()}


def _joined(of: Iterable[_Values]) -> _Values:
    return np.concatenate([np.empty(0), *of])


def _mean(values: _Values) -> float | None:
    return float(values.mean()) if values.size else None


def _p99(values: _Values) -> float | None:
    return float(np.percentile(values, 99)) if values.size else None


def _share(drawn: list[Block], count: Callable[[Block], int | None]) -> float | None:
    """Of the requests of blocks that are counted."""
    counted = [(number, part.requests) for part in drawn if (number := count(part)) is not None]
    return sum(number for number, _ in counted) / sum(of for _, of in counted) if counted else None
