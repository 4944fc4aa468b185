"""The result file of a replay: written by ``blitzscale replay --json``, read by ``blitzscale report``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.replay.objectives import Attainment, Slo
from bench.replay.observations import Cluster
from bench.replay.plan import PlannedRequest
from bench.replay.record import Collector, Result, Sample, void_reasons
from bench.replay.series import Series, quantiles
from shared.errors import BadRequest


@dataclass(frozen=True, slots=True)
class About:
    """What was replayed where."""

    trace: str
    url: str
    model: str
    seed: int
    speed: float
    scale_rate: float
    spread_seconds: bool
    """The trace's arrivals are known to the second only, and were spread within theirs."""
    skipped_rows: int
    unsorted_rows: int
    started_at_s: float
    """Unix time."""
    concurrency_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Distributions:
    """Values at 0, 0.1, 0.2 ... 100 per cent; empty where there are none."""

    ttft_s: tuple[float, ...]
    tbt_s: tuple[float, ...]
    e2e_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request. Times from its due time; a failed one has those that it got to."""

    index: int
    due_s: float
    lag_s: float
    ttft_s: float | None
    mean_gap_s: float | None
    max_gap_s: float | None
    e2e_s: float
    input_tokens: int
    output_tokens: int
    failure: str | None


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one replay. docs/benchmarks.md explains the keys that do not explain themselves."""

    about: About
    result: Result
    void: tuple[str, ...]
    slo: Attainment | None
    distributions: Distributions
    series: Series
    cluster: Cluster | None
    records: tuple[RequestRow, ...]
    samples: tuple[Sample, ...] = ()
    label: str = ""
    """What reports call it; not in the file."""

    @classmethod
    def of(
        cls,
        about: About,
        requests: Sequence[PlannedRequest],
        collector: Collector,
        *,
        slo: Slo | None,
        cluster: Cluster | None,
    ) -> Document:
        """Add up what there is."""
        result = Result.of(collector)
        good = [record for record in collector.records if record.failure is None]
        attainment = None
        if slo is not None:
            attainment = Attainment.of(slo, good, planned=result.planned, duration_s=result.duration_s)
        rows = tuple(
            RequestRow(
                index=record.index,
                due_s=record.due_s,
                lag_s=record.lag_s,
                ttft_s=record.ttft_s,
                mean_gap_s=record.mean_gap_s,
                max_gap_s=max(record.gaps_s, default=None),
                e2e_s=record.e2e_s,
                input_tokens=record.input_tokens,
                output_tokens=record.output_tokens,
                failure=record.failure.kind if record.failure else None,
            )
            for record in sorted(collector.records, key=lambda record: record.index)
        )
        return cls(
            about=about,
            result=result,
            void=void_reasons(
                result,
                concurrency_limit=about.concurrency_limit,
                not_observed_s=cluster.not_observed_s if cluster is not None else 0.0,
            ),
            slo=attainment,
            distributions=Distributions(
                ttft_s=quantiles(record.ttft_s for record in good if record.ttft_s is not None),
                tbt_s=quantiles(gap for record in good for gap in record.gaps_s),
                e2e_s=quantiles(record.e2e_s for record in good),
            ),
            series=Series.of((request.due_s for request in requests), collector.records),
            cluster=cluster,
            records=rows,
            samples=tuple(sorted(collector.samples, key=lambda sample: sample.index)),
        )

    def judged_by(self, slo: Slo) -> Document:
        """The same with other objectives."""
        good = [record for record in self.records if record.failure is None]
        planned, duration_s = self.result.planned, self.result.duration_s
        return msgspec.structs.replace(self, slo=Attainment.of(slo, good, planned=planned, duration_s=duration_s))

    def flat(self) -> dict[str, object]:
        """As in the file: what was replayed and the figures are keys of the whole."""
        whole = msgspec.structs.asdict(self)
        del whole["label"]
        about, result = whole.pop("about"), whole.pop("result")
        return {**msgspec.to_builtins(about), **msgspec.to_builtins(result), **whole}


def read_document(path: Path) -> Document:
    """A result file. Raises ``BadRequest`` for one that is missing, or not of a replay."""
    try:
        raw = path.read_bytes()
        head = msgspec.json.decode(raw, type=_Head)
        return msgspec.structs.replace(
            head.whole(msgspec.json.decode(raw, type=About), msgspec.json.decode(raw, type=Result)), label=path.stem
        )
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", param="file") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"{path} is no result of `blitzscale replay --json`: {error}", param="file") from error


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The file's keys that are objects or lists."""

    void: tuple[str, ...]
    slo: Attainment | None
    distributions: Distributions
    series: Series
    cluster: Cluster | None
    records: tuple[RequestRow, ...]

    def whole(self, about: About, result: Result) -> Document:
        return Document(about=about, result=result, **msgspec.structs.asdict(self))
