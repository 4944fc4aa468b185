"""What is kept of a simulated run's figures: a digest of all of them, and a few to read.

Floats are rounded to nine significant digits, and to a billionth: from 3.12 on Python's ``sum`` adds floats with less
error, and NumPy and SciPy may round otherwise in other versions.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from bench.sim.requests import Served
from shared.messages.live import LiveReport
from shared.messages.operations import ScaleRecord
from tests.bench.sim.instances import Heard

Kept = dict[str, Any]
"""A case's figures as JSON has them."""


def digest(figures: object) -> str:
    """Of everything in them, by name."""
    text = json.dumps(_rounded(msgspec.to_builtins(figures, enc_hook=_plain)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def latencies(first_s: Sequence[float]) -> Kept:
    """The middle one and the 99th percentile, none between two."""
    in_order = sorted(first_s)
    places = {"ttft_p50_s": 50, "ttft_p99_s": 99}
    return {name: _rounded(in_order[(len(in_order) * q + 99) // 100 - 1]) for name, q in places.items() if in_order}


def batches(reports: Iterable[LiveReport]) -> dict[str, int]:
    """How many there were by the layers that the target ran."""
    counts = Counter(batch.target_layers for report in reports for batch in report.batches)
    return {str(layers): count for layers, count in sorted(counts.items())}


def of_run(
    served: Iterable[Served],
    records: Sequence[ScaleRecord],
    reports: Sequence[LiveReport],
    handed_on: Sequence[tuple[str, str]],
    others: Mapping[str, object],
) -> Kept:
    """``reports``: of pairs. ``handed_on``: requests that another instance took over, and that instance. ``others``:
    what is not read, only compared."""
    served = sorted(served, key=lambda one: one.request.index)
    return {
        "requests": len(served),
        "failed": counted(one.failure for one in served if one.failure is not None),
        "attempts": sum(one.attempts for one in served),
        "tokens": sum(len(one.times_s) for one in served),
        **latencies([one.ttft_s for one in served if one.ttft_s is not None]),
        "handed_on": len(handed_on),
        "operations": counted(record.direction for record in records),
        "pairs": counted(pair.outcome for record in records for pair in record.live),
        "batches_by_target_layers": batches(reports),
        "sha256": digest([served, records, reports, handed_on, others]),
    }


def of_instances(
    heard: Sequence[Heard], reports: Sequence[LiveReport], lost: Sequence[str], carried: Sequence[Mapping[str, int]]
) -> Kept:
    """Of some runs of instances, one after the other. ``lost``: requests of those that died. ``carried``: bytes."""
    failed = [{name: error.code for name, error in one.failed.items()} for one in heard]
    told = [(one.times_s, one.where, one.taken_over, one.ended) for one in heard]
    return {
        "requests_ended": sum(len(one.ended) for one in heard),
        "failed": counted(code for codes in failed for code in codes.values()),
        "lost": len(lost),
        "tokens": sum(len(times_s) for one in heard for times_s in one.times_s.values()),
        **latencies([times_s[0] for one in heard for times_s in one.times_s.values()]),
        "handed_on": sum(len(one.taken_over) for one in heard),
        "pairs": counted(report.outcome for report in reports),
        "batches_by_target_layers": batches(reports),
        "sha256": digest([told, failed, reports, lost, carried]),
    }


def counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _plain(value: object) -> object:
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError(type(value))


def _rounded(value: Any) -> Any:
    match value:
        case dict():
            return {name: _rounded(one) for name, one in value.items()}
        case list() | tuple():
            return [_rounded(one) for one in value]
        case float():
            return round(float(f"{value:.9g}"), 9) + 0.0  # no -0.0
        case _:
            return value
