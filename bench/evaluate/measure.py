"""An evaluation: which runs are needed, in which order, and which of them are there already."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import msgspec

from bench.evaluate import search
from bench.evaluate.figures import Judged, relative_slo
from bench.evaluate.models import Model
from bench.evaluate.order import base_of, shuffled
from bench.evaluate.run import GPU
from bench.evaluate.saved_run import Plan, Runs, SavedRun, digest
from bench.evaluate.windows import Window, Windows
from bench.lab.errors import LabFailed
from bench.replay.document import Document
from bench.replay.objectives import Slo
from bench.systems import Split, System, find
from bench.traces.request import Trace
from bench.traces.scaling import scale_rate
from shared.messages.common import Role
from shared.profile import Profile

Say = Callable[[str], None]
Run = Callable[[System, Plan, Trace], Awaitable[SavedRun]]
Simulated = Callable[[System, Plan, Trace], Document]
HOLDS = 0.99
"""Of the requests that can be within the absolute objectives at all: at such rates ``static-full`` holds."""
HARDER = 1.5
"""Splits are compared at a rate that the first one does not carry: below, they differ little."""
REFERENCE = "static-full"
ALONE_SHARE = 0.9
MAX_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """What is evaluated. The trace's arrivals are spread within their seconds already, and not scaled."""

    trace: Trace
    spread_seconds: bool
    model: Model
    systems: tuple[System, ...]
    windows: Windows
    scale: float | Literal["half"]
    repetitions: int
    seed: int
    workers: int
    nic_gbps: float
    lead_in_s: float
    give_back_s: float
    """For how long all systems keep an instance without need."""
    search: Literal["simulated", "lab"] = "simulated"
    """Whether rate and splits are searched in the simulator, or by runs in the lab."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Of a search."""

    scale_rate: float
    requests_per_s: float
    """In the tuning window, on average."""
    system: str
    instances: dict[Role, int]
    attainment: float
    """Of the absolute objectives."""
    attainable: float
    """The share of requests that could attain them (``attainable``)."""
    cost: float
    """Mean TTFT and mean gap, as shares of them, added up."""
    void: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """A void run shows nothing, and does not hold; nor does one without a request that could."""
        return not self.void and self.attainable > 0 and self.attainment >= HOLDS * self.attainable


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What was searched for."""

    scale_rate: float
    highest: float | None
    """At which ``static-full`` holds; None: not asked for."""
    limited_by_machine: bool
    """The search ended at runs that are void: the system might carry more than this machine can show."""
    splits: dict[str, dict[Role, int]]
    """By system that does not scale; of those that have half, by their number of instances too."""
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """All runs, by repetition and window, then by system."""

    found: Found
    runs: tuple[tuple[dict[str, SavedRun], ...], ...]

    def judged(self, repetition: int, window: int, system: str, model: Model) -> Judged:
        """With the objectives of its repetition. Raises ``KeyError``."""
        runs = self.runs[repetition][window]
        reference = relative_slo(runs[REFERENCE]) if REFERENCE in runs else None
        return Judged(runs[system], reference, model.slo)


class Evaluation:
    """``run`` it once."""

    def __init__(self, setting: Setting, run: Run, simulated: Simulated, runs: Runs, say: Say) -> None:
        self._setting = setting
        self._run = run
        self._simulated = simulated
        self._runs = runs
        self._say = say
        self._profile = setting.model.profile()
        self._trace = lru_cache(maxsize=1)(self._scaled)
        self._steps: list[Step] = []
        self._splits: dict[tuple[int, float], Split] = {}

    async def run(self) -> Outcome:
        """Raises what a run raises; finished runs are saved."""
        setting = self._setting
        highest = None
        if setting.scale == "half":
            highest, best = await self._highest()
            factor = highest / 2
            self._splits[setting.workers, factor] = best
            self._say(f"{REFERENCE} holds up to {highest:.3g} times the trace's rate; all systems get {factor:.3g}")
        else:
            factor = setting.scale
        splits: dict[str, dict[Role, int]] = {}
        repetitions = []
        for repetition in range(setting.repetitions):
            windows = []
            for number, window in enumerate(setting.windows.measured):
                saved: dict[str, SavedRun] = {}
                for system in shuffled(setting.systems, setting.seed, repetition, number):
                    instances = await self._instances(system, factor, saved)
                    if not system.scales:
                        total = sum(instances.values())
                        splits[system.name if system.size == "full" else f"{system.name} ({total})"] = instances
                    saved[system.name] = await self._saved(
                        self._plan("measured", system, window, instances, factor, repetition), factor
                    )
                windows.append(saved)
            repetitions.append(tuple(windows))
        found = Found(
            scale_rate=factor,
            highest=highest,
            limited_by_machine=highest is not None and self._is_limited(highest),
            splits=splits,
            steps=tuple(self._steps),
        )
        return Outcome(found, tuple(repetitions))

    async def _instances(self, system: System, factor: float, saved: dict[str, SavedRun]) -> dict[Role, int]:
        if system.scales:
            return dict.fromkeys(system.roles, 1)
        mean = saved[base_of(system)].mean_instances if system.size == "half" else 0.0
        number = system.num_instances(self._setting.workers, mean)
        if system.serving == "colocated":
            return {"colocated": number}
        split = await self._best_split(number, factor)
        return {"prefill": split.prefill, "decode": split.decode}

    async def _highest(self) -> tuple[float, Split]:
        """Of ``static-full``, in its best split. Raises ``LabFailed`` where nothing holds."""
        tuning, slo = self._setting.windows.tuning, self._setting.model.slo
        prompts = [r.input_tokens for r in self._setting.trace.requests if tuning.start_s <= r.arrival_s < tuning.end_s]
        if not attainable(self._profile, slo, prompts):
            raise LabFailed(
                f"an idle instance computes no prompt of the tuning window {tuning} in time: there is no rate to take "
                "half of"
            )
        splits = find(REFERENCE).splits(self._setting.workers)
        first = splits[(len(splits) - 1) // 2]
        held = await search.highest(lambda factor: self._holds(first, factor), 1.0)
        if held is None:
            raise LabFailed(
                f"{REFERENCE} keeps the objectives for {HOLDS:.0%} of the requests at no rate that was tried: "
                f"{min(step.scale_rate for step in self._steps):g} times the trace's is the lowest"
            )
        best = await self._best_split(self._setting.workers, held * HARDER)
        if best == first:
            return held, first
        more = await search.highest(lambda factor: self._holds(best, factor), held * HARDER, end=4 * held)
        return max(held, more or 0.0), best

    def _is_limited(self, highest: float) -> bool:
        beyond = [step for step in self._steps if step.scale_rate > highest and not step.holds]
        return bool(min(beyond, key=lambda step: step.scale_rate).void) if beyond else False

    async def _holds(self, split: Split, factor: float) -> bool:
        return (await self._try(split, factor)).holds

    async def _best_split(self, number: int, factor: float) -> Split:
        if (number, factor) not in self._splits:
            splits = find(REFERENCE).splits(number)

            async def score(split: Split) -> search.Score:
                step = await self._try(split, factor)
                return step.attainment, -step.cost

            self._splits[number, factor] = await search.best(splits, score, (len(splits) - 1) // 2)
        return self._splits[number, factor]

    async def _try(self, split: Split, factor: float) -> Step:
        instances: dict[Role, int] = {"prefill": split.prefill, "decode": split.decode}
        plan = self._plan("tuning", find(REFERENCE), self._setting.windows.tuning, instances, factor, 0)
        document = await self._tried(plan, factor)
        result, slo = document.result, self._setting.model.slo
        means = [
            (summary.mean if summary is not None else math.inf) / (limit_s or math.inf)
            for summary, limit_s in ((result.ttft_s, slo.ttft_s), (result.tbt_s, slo.tbt_s))
        ]
        step = Step(
            scale_rate=factor,
            requests_per_s=result.planned / plan.window.seconds,
            system=plan.system,
            instances=instances,
            attainment=document.slo.share if document.slo is not None else 0.0,
            attainable=attainable(self._profile, slo, (row.input_tokens for row in document.records)),
            cost=sum(means),
            void=document.void,
        )
        if step not in self._steps:
            self._steps.append(step)
        return step

    async def _tried(self, plan: Plan, factor: float) -> Document:
        if self._setting.search == "lab":
            return (await self._saved(plan, factor)).document
        document = await asyncio.to_thread(self._simulated, find(plan.system), plan, self._trace(factor))
        self._say(f"simulated: {_line(plan, document)}")
        return document

    def _plan(
        self,
        purpose: Literal["tuning", "measured"],
        system: System,
        window: Window,
        instances: dict[Role, int],
        factor: float,
        repetition: int,
    ) -> Plan:
        setting = self._setting
        return Plan(
            purpose=purpose,
            trace=setting.trace.name,
            digest=digest(self._trace(factor), window, setting.lead_in_s),
            spread_seconds=setting.spread_seconds,
            model=setting.model.name,
            slo_ttft_s=setting.model.slo.ttft_s,
            slo_tbt_s=setting.model.slo.tbt_s,
            workers=setting.workers,
            nic_gbps=setting.nic_gbps,
            system=system.name,
            settings=dict(system.environ(give_back_s=setting.give_back_s)),
            instances=instances,
            window=window,
            scale_rate=factor,
            seed=setting.seed,
            repetition=repetition,
        )

    def _scaled(self, factor: float) -> Trace:
        return scale_rate(self._setting.trace, factor, seed=self._setting.seed)

    async def _saved(self, plan: Plan, factor: float) -> SavedRun:
        """The run of a plan: the one that is saved, or a new one. A void one is repeated once."""
        known = self._runs.find(plan)
        if known is not None:
            self._say(f"{plan.name}: there already{_voids(known)}")
            return known
        if self._runs.file(plan).exists():
            self._say(f"{plan.name}: there with other settings, and measured again")
        for attempt in range(1, MAX_ATTEMPTS + 1):
            run = await self._run(find(plan.system), plan, self._trace(factor))
            run = msgspec.structs.replace(run, attempts=attempt)
            self._say(f"{_line(plan, run.document)}, {run.mean_instances:.2f} instances{_voids(run)}")
            if not run.document.void:
                break
        self._runs.keep(run)
        return run


def attainable(profile: Profile, slo: Slo, prompts: Iterable[int]) -> float:
    """The share of prompts that an idle instance computes within nine tenths of the objective for the first token.

    Of AzureCode's prompts 6 to 9 % are too long for that, whatever the rate. The rest is for the way through the
    services.
    """
    wanted = [num_tokens for num_tokens in prompts if slo.ttft_s is not None]
    limit_s = ALONE_SHARE * (slo.ttft_s or math.inf)
    seconds = {num_tokens: _alone_s(profile, num_tokens) for num_tokens in set(wanted)}
    return sum(seconds[num_tokens] <= limit_s for num_tokens in wanted) / len(wanted) if wanted else 1.0


def _alone_s(profile: Profile, num_tokens: int) -> float:
    """In the chunks of a worker."""
    total = 0.0
    for begin in range(0, num_tokens, GPU.prefill_chunk_tokens):
        size = min(GPU.prefill_chunk_tokens, num_tokens - begin)
        total += profile.step_s(size, size * begin + size * (size + 1) // 2, 0, 0)
    return total


def _line(plan: Plan, document: Document) -> str:
    result, slo = document.result, document.slo
    ttft = "-" if result.ttft_s is None else f"{result.ttft_s.mean * 1000:.0f}/{result.ttft_s.p99 * 1000:.0f} ms"
    share = 0.0 if slo is None else slo.share
    return (
        f"{plan.name}: {result.completed} of {result.planned}, TTFT {ttft}, {share:.1%} within the absolute objectives"
    )


def _voids(run: SavedRun) -> str:
    return f"; void: {'; '.join(run.document.void)}" if run.document.void else ""
