"""Figures of runs, and what a system makes of those of the base. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.prefix.load import Answered
from bench.prefix.systems import BASE
from bench.stats import Summary

MEAN_AIM, P99_AIM = 0.5, 1.0
"""Of ``turns``, over the base."""
ANY_MEAN_AIM = 1.02
"""Of every workload."""
IMBALANCE_AIM = 1.25
_FIGURES = ("hit_rate", "ttft_mean_s", "ttft_p99_s", "computed_tokens", "imbalance")
_RATIOS = ("ttft_mean_s", "ttft_p99_s", "computed_tokens")


@dataclass(frozen=True, slots=True)
class Run:
    """One system on one plan."""

    workload: str
    system: str
    seed: int
    warm_s: float
    """What was to be asked before is in no figure but the failures."""
    answers: tuple[Answered, ...]
    computed: Mapping[str, int]
    """Prompt tokens after ``warm_s``, by instance."""
    lasting: frozenset[str]
    """The instances that were there all the time."""
    scaled_s: float
    """How long the instance took that was asked for half-way."""

    @property
    def measured(self) -> list[Answered]:
        """After the warm-up, with those that failed."""
        return [one for one in self.answers if one.planned.at_s >= self.warm_s]

    @property
    def errors(self) -> list[str]:
        """Of all requests."""
        return [one.streamed.error for one in self.answers if one.streamed.error]

    @property
    def ttfts_s(self) -> list[float]:
        """Of the measured ones that had a token."""
        return [one.streamed.ttft_s for one in self.measured if one.streamed.ttft_s is not None]

    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        usages = [one.streamed.usage for one in self.measured if one.streamed.usage is not None]
        ttft = Summary.of(self.ttfts_s)
        asked = sum(usage.prompt_tokens for usage in usages)
        return {
            "workload": self.workload,
            "system": self.system,
            "seed": self.seed,
            "requests": len(self.answers),
            "measured": len(self.measured),
            "failed": len(self.errors),
            "errors": sorted(set(self.errors))[:5],
            "late_turns": sum(one.late for one in self.measured),
            "prompt_tokens": asked,
            "hit_rate": round(sum(usage.cached_tokens for usage in usages) / asked, 4) if asked else None,
            "ttft_mean_s": round(ttft.mean, 4) if ttft else None,
            "ttft_p50_s": round(ttft.p50, 4) if ttft else None,
            "ttft_p99_s": round(ttft.p99, 4) if ttft else None,
            "computed_tokens": sum(self.computed.values()),
            "imbalance": imbalance(self.computed.get(instance, 0) for instance in sorted(self.lasting)),
            "computed_tokens_by_instance": [self.computed[instance] for instance in sorted(self.computed)],
            "scaled_s": round(self.scaled_s, 2),
        }


def imbalance(tokens: Iterable[int]) -> float | None:
    """The most over the mean; None where nothing was computed."""
    found = list(tokens)
    return round(max(found) * len(found) / sum(found), 3) if sum(found) else None


def rows(runs: Sequence[Run]) -> list[dict[str, object]]:
    """By workload and system: medians over the seeds, sums of requests, and ratios to the base on the same seed.

    ``*_all_s``: of the requests of all seeds together, of which a run has few.
    """
    pooled = {
        (workload, system): Summary.of(
            ttft_s for run in runs if (run.workload, run.system) == (workload, system) for ttft_s in run.ttfts_s
        )
        for workload, system in dict.fromkeys((run.workload, run.system) for run in runs)
    }
    documents = {(run.workload, run.system, run.seed): run.document() for run in runs}
    found = []
    for (workload, system), ttft in pooled.items():
        seeds = [seed for one, other, seed in documents if (one, other) == (workload, system)]
        of_seeds = [documents[workload, system, seed] for seed in seeds]
        row: dict[str, object] = {"workload": workload, "system": system, "seeds": len(seeds)}
        row |= {name: sum(_number(each[name]) for each in of_seeds) for name in ("requests", "measured", "failed")}
        for name in _FIGURES:
            row[name] = _median([_number(each[name]) for each in of_seeds if each[name] is not None])
        for name in _RATIOS:
            bases = [documents.get((workload, BASE, seed), {}).get(name) for seed in seeds]
            ratios = [
                round(_number(each[name]) / _number(base), 3)
                for each, base in zip(of_seeds, bases, strict=True)
                if each[name] is not None and base
            ]
            row[f"{name}_of_{BASE}"] = _median(ratios)
            row[f"{name}_of_{BASE}_range"] = [min(ratios), max(ratios)] if ratios else None
        row |= _together(ttft, pooled.get((workload, BASE)))
        found.append(row)
    return found


def _together(ttft: Summary | None, base: Summary | None) -> dict[str, object]:
    return {
        "ttft_mean_all_s": round(ttft.mean, 4) if ttft else None,
        "ttft_p99_all_s": round(ttft.p99, 4) if ttft else None,
        f"ttft_mean_all_s_of_{BASE}": round(ttft.mean / base.mean, 3) if ttft and base else None,
        f"ttft_p99_all_s_of_{BASE}": round(ttft.p99 / base.p99, 3) if ttft and base else None,
    }


def aims(rows: Iterable[Mapping[str, object]], system: str) -> list[dict[str, object]]:
    """What is aimed at by a system beside what it came to; ``met`` None: not measured."""
    found = []
    for row in rows:
        if row["system"] != system:
            continue
        mean, p99 = f"ttft_mean_s_of_{BASE}", f"ttft_p99_s_of_{BASE}"
        wanted = {mean: ANY_MEAN_AIM, "imbalance": IMBALANCE_AIM}
        if row["workload"] == "turns":
            wanted |= {mean: MEAN_AIM, p99: P99_AIM}
        for name, most in wanted.items():
            value = row[name]
            met = None if value is None else _number(value) <= most
            found.append({"workload": row["workload"], "figure": name, "aim": most, "value": value, "met": met})
    return found


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 4) if values else None


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value
