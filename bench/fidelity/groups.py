"""Which runs are repetitions of each other, and which of them count. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from bench.evaluate.saved_run import Plan
from bench.fidelity.condensed import Condensed


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one plan."""

    plan: Plan
    """Of all of them, but for the number of the repetition."""
    runs: tuple[Condensed, ...]
    """Those that count, in the order of repetitions."""
    void: tuple[Condensed, ...]
    """Those that do not."""

    @property
    def counts(self) -> str:
        """How many runs count, and how many are left out."""
        number = len(self.runs)
        counted = f"{number} run" if number == 1 else f"{number} runs"
        return f"{counted}, {len(self.void)} void" if self.void else counted

    @property
    def why(self) -> str:
        """The first reason of the first void run; empty if there is none."""
        return self.void[0].void[0] if self.void else ""


def groups(runs: Iterable[Condensed]) -> list[Group]:
    """By everything that decides about a run, in the order of models, rates, seeds, windows and systems."""
    found: dict[tuple[object, ...], list[Condensed]] = {}
    for run in sorted(runs, key=lambda run: (_key(run.plan), run.plan.repetition)):
        found.setdefault(_key(run.plan), []).append(run)
    return [
        Group(
            plan=_without_repetition(together[0].plan),
            runs=tuple(run for run in together if not run.void),
            void=tuple(run for run in together if run.void),
        )
        for together in found.values()
    ]


def _without_repetition(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, repetition=0)


def _key(plan: Plan) -> tuple[object, ...]:
    whole = msgspec.json.encode(_without_repetition(plan), order="deterministic")
    return plan.model, plan.scale_rate, plan.seed, plan.window.start_s, plan.window.seconds, plan.system, whole


_DIFFERENCES: tuple[Callable[[Plan], str], ...] = (
    lambda plan: plan.model,
    lambda plan: f"window of {plan.window.seconds:g} s",
    lambda plan: f"{plan.scale_rate:.4g} times the rate",
    lambda plan: f"seed {plan.seed}",
    lambda plan: f"{plan.workers} workers",
    lambda plan: f"kept for {plan.give_back_s:g} s",
    lambda plan: ", ".join(f"{number} {role}" for role, number in plan.instances.items()),
)


def labels(of: Sequence[Group]) -> list[str]:
    """Of each group: system and window, and in what else it differs from others of its system."""
    plans = [group.plan for group in of]
    found = []
    for plan in plans:
        others = [other for other in plans if other.system == plan.system]
        more = [say(plan) for say in _DIFFERENCES if any(say(other) != say(plan) for other in others)]
        found.append(", ".join([plan.system, f"{plan.window.start_s:g} s", *more]))
    return found
