"""What came of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.stats import Summary
from bench.streamed import Streamed


@dataclass(frozen=True, slots=True)
class Alone:
    """Long prompts, one after the other, with nothing beside them."""

    answers: tuple[Streamed, ...]
    num_tokens: int
    """Of each prompt."""

    @property
    def prefill_s(self) -> float:
        """From the request to the first token."""
        return _mean(a.tokens_s[0] for a in self.answers if a.tokens_s)

    @property
    def second_s(self) -> float:
        """Between the first token and the second."""
        return _mean(a.gaps_s[0] for a in self.answers if a.gaps_s)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The whole workload."""

    answers: tuple[Streamed, ...]

    def document(self) -> dict[str, object]:
        """Over all requests, and all gaps between tokens."""
        ttft = Summary.of(a.ttft_s for a in self.answers if a.ttft_s is not None)
        tbt = Summary.of(gap for a in self.answers for gap in a.gaps_s)
        failed = [a.error for a in self.answers if a.error]
        return {
            "requests": len(self.answers),
            "failed": len(failed),
            "errors": sorted(set(failed))[:5],
            **_figures("ttft", ttft),
            **_figures("tbt", tbt),
        }


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """At one rate of the links."""

    goodput_gbps: float
    """Of plain TCP, in this run."""
    kv_bytes: int
    """Of each lone prompt."""
    alone: Alone
    loaded: Loaded | None = None

    @property
    def transfer_s(self) -> float:
        """The KV of a prompt on the link, with nothing beside it."""
        return self.kv_bytes * 8 / self.goodput_gbps / 1e9

    def kv_share(self) -> float:
        """What the transfer takes, of the time of prefill."""
        return self.transfer_s / self.alone.prefill_s

    def delay_s(self, colocated: Alone) -> float:
        """How much later the second token comes than where the KV stays: the end of the transfer, and the hand-over."""
        return self.alone.second_s - colocated.second_s

    def hidden_share(self, colocated: Alone) -> float:
        """How much of the transfer took place while the prompt was still computed. The hand-over counts as transfer."""
        return 1 - self.delay_s(colocated) / self.transfer_s

    def document(self, colocated: Alone) -> dict[str, object]:
        """As JSON shows it."""
        return {
            "goodput_gbps": round(self.goodput_gbps, 4),
            "kv_share": round(self.kv_share(), 3),
            "transfer_alone_s": round(self.transfer_s, 4),
            "second_token_later_s": round(self.delay_s(colocated), 4),
            "kv_hidden_share": round(self.hidden_share(colocated), 3),
            "loaded": None if self.loaded is None else self.loaded.document(),
        }


@dataclass(frozen=True, slots=True)
class Mutation:
    """An instance that changed its role. Milliseconds from the planner's decision."""

    role: str
    told_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """Everything but the burst."""

    workers: int
    colocated_alone: Alone
    colocated: Loaded
    sweep: tuple[Disaggregated, ...]
    """The named proportion first."""
    mutations: tuple[Mutation, ...]

    def tokens_identical(self) -> bool:
        """Whether every request had the same answer wherever it was answered."""
        alone = [self.colocated_alone.answers, *(d.alone.answers for d in self.sweep)]
        loaded = [self.colocated.answers, *(d.loaded.answers for d in self.sweep if d.loaded is not None)]
        return same_texts(alone) and same_texts(loaded)

    @property
    def failed(self) -> int:
        """Requests without an answer, in all runs."""
        runs = [self.colocated_alone.answers, self.colocated.answers]
        for point in self.sweep:
            runs += [point.alone.answers, point.loaded.answers if point.loaded is not None else ()]
        return sum(bool(a.error) for answers in runs for a in answers)

    def document(self) -> dict[str, object]:
        """As JSON shows it."""
        named = self.sweep[0]
        told = Summary.of(m.told_ms for m in self.mutations)
        return {
            "workers": self.workers,
            "failed": self.failed,
            "modes": {
                "colocated": self.colocated.document(),
                "disaggregated": {} if named.loaded is None else named.loaded.document(),
            },
            "kv_hidden_share": round(named.hidden_share(self.colocated_alone), 3),
            "prefill_alone_s": round(self.colocated_alone.prefill_s, 4),
            "decode_step_alone_s": round(self.colocated_alone.second_s, 4),
            "sweep": [point.document(self.colocated_alone) for point in self.sweep],
            "mutation_ms": None if told is None else round(told.p50, 1),
            "mutation_max_ms": None if told is None else round(told.max, 1),
            "mutations": len(self.mutations),
            "tokens_identical": self.tokens_identical(),
        }


def same_texts(runs: Sequence[Iterable[Streamed]]) -> bool:
    """Whether requests of one number have one text in all runs. Those that failed are counted elsewhere."""
    texts: dict[int, str] = {}
    return all(texts.setdefault(a.number, a.text) == a.text for run in runs for a in run if not a.error)


def _figures(name: str, summary: Summary | None) -> dict[str, float | None]:
    if summary is None:
        return {f"{name}_mean_s": None, f"{name}_p50_s": None, f"{name}_p99_s": None, f"{name}_max_s": None}
    rows = {"mean": summary.mean, "p50": summary.p50, "p99": summary.p99, "max": summary.max}
    return {f"{name}_{key}_s": round(value, 4) for key, value in rows.items()}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else float("nan")
