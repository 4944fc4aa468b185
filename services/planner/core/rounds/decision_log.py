"""What was decided and why, in words: for whoever asks later, and for the planner that leads next."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

from services.planner.core.multicast.explain import instances_of, names
from services.planner.core.operations.decision import Decision, ScaleRequest
from services.planner.core.rounds.moment import Moment
from services.planner.core.rounds.step import Step
from shared.errors import BlitzError
from shared.messages.common import SERVED_BY, Role
from shared.messages.decisions import MAX_DECISIONS, DecisionRecord
from shared.messages.registry import Floor, ModelRecord

MAX_OF_MODEL = 50
MAX_MODELS = 2_000
"""Those that were decided on last."""
MAX_UNTOLD = 2_000
"""Decisions that the stream has not taken yet."""
MAX_SAID = 20_000
"""Models, roles and who asked."""
MAX_CHARS = 600
MAX_LINES = 6
"""Of a plan's explanation; its record has all."""

AskedBy = Literal["load", "hand", "room", "drain"]
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
"""Errors come from anywhere, and are shown in terminals."""


class DecisionLog:
    """The newest decisions of each model. Times are Unix times, for people."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[DecisionRecord]] = OrderedDict()
        self._untold: deque[DecisionRecord] = deque(maxlen=MAX_UNTOLD)
        self._said: dict[tuple[str, Role, AskedBy], Hashable] = {}
        """What was last noted, if it is not to be noted again while it stays so."""

    def took(self, step: Step, floor: Floor | None, moment: Moment, asked_by: AskedBy | None = None) -> None:
        """A step is carried out. ``floor``: of its model and role."""
        request, decision = step.request, step.decision
        outcome, chosen, cost = _of_step(step, asked_by)
        self.add(
            DecisionRecord(
                at_s=moment.unix_s,
                model=request.model,
                role=request.role,
                asked_by=asked_by or _asked_by(request),
                seen=_seen(request),
                asked=max(0, request.desired),
                there=decision.current + (len(decision.drain) if asked_by == "drain" else 0),
                wanted=decision.desired,
                # A change of roles is one step of several: that it is less than was asked for is no bound.
                bound=_cut(request.bound) if step.mutate else bound_of(request, decision, step.model, floor),
                outcome=outcome,
                chosen=_cut(chosen),
                cost=_cut(cost),
                otherwise=_cut(_otherwise(request, decision.current, outcome, asked_by)),
                plan_id=step.plan_id,
            )
        )

    def kept(
        self, request: ScaleRequest, decision: Decision, model: ModelRecord, floor: Floor | None, moment: Moment
    ) -> None:
        """Nothing was to do. Noted if that is because of a bound, or an answer to somebody."""
        bound = bound_of(request, decision, model, floor)
        if decision.desired != decision.current or not (bound or request.by_hand):
            return
        self._add_unless_repeated(
            ("keep", decision.desired, decision.current),
            _record(
                request,
                decision,
                moment,
                bound=bound,
                outcome="keep",
                chosen=f"nothing to do: {instances_of(decision.current, request.role)} are there or on their way",
                otherwise=_without(request) if bound else "the same",
            ),
        )

    def refused(
        self,
        request: ScaleRequest,
        decision: Decision,
        model: ModelRecord | None,
        floor: Floor | None,
        error: BlitzError,
        moment: Moment,
    ) -> None:
        """Nothing could be done."""
        self._add_unless_repeated(
            ("refuse", error.code),
            _record(
                request,
                decision,
                moment,
                bound=bound_of(request, decision, model, floor) if model is not None else "",
                outcome="refuse",
                chosen=_cut(error.message),
                otherwise=f"it stays at {instances_of(decision.current, request.role)} until that changes",
            ),
        )

    # --- for readers -------------------------------------------------------------------------

    def of(self, model: str, until_s: float | None, limit: int) -> tuple[DecisionRecord, ...]:
        """The newest, newest first. ``until_s``: of those that were made by then."""
        known = reversed(self._of.get(model, ()))
        found = [one for one in known if until_s is None or one.at_s <= until_s]
        return tuple(found[: max(0, limit)])

    def untold(self) -> tuple[DecisionRecord, ...]:
        """What successors have not been told yet, oldest first: as much as one message takes."""
        return tuple(self._untold)[:MAX_DECISIONS]

    def told(self, decisions: Sequence[DecisionRecord]) -> None:
        """The stream has these, which ``untold`` gave."""
        for one in decisions:
            if self._untold and self._untold[0] == one:
                self._untold.popleft()

    def recall(self, decisions: Iterable[DecisionRecord]) -> None:
        """What earlier planners decided, oldest first; what this one has decided since comes after it."""
        since = [one for known in self._of.values() for one in known]
        self._of.clear()
        for one in (*decisions, *sorted(since, key=lambda one: one.at_s)):
            self._keep(one)

    # --- what is kept ------------------------------------------------------------------------

    def _add_unless_repeated(self, essence: Hashable, one: DecisionRecord) -> None:
        about = one.model, one.role, one.asked_by
        if self._said.get(about) != essence:
            self.add(one)
            if len(self._said) < MAX_SAID:
                self._said[about] = essence

    def add(self, one: DecisionRecord) -> None:
        """Note a decision."""
        self._said.pop((one.model, one.role, one.asked_by), None)
        self._keep(one)
        self._untold.append(one)

    def _keep(self, one: DecisionRecord) -> None:
        known = self._of.get(one.model)
        if known is None:
            known = self._of[one.model] = deque(maxlen=MAX_OF_MODEL)
        known.append(one)
        self._of.move_to_end(one.model)
        while len(self._of) > MAX_MODELS:
            self._of.popitem(last=False)


def _record(
    request: ScaleRequest,
    decision: Decision,
    moment: Moment,
    *,
    bound: str,
    outcome: Literal["keep", "refuse"],
    chosen: str,
    otherwise: str,
) -> DecisionRecord:
    """Of a request of which nothing comes."""
    return DecisionRecord(
        at_s=moment.unix_s,
        model=request.model,
        role=request.role,
        asked_by=_asked_by(request),
        seen=_seen(request),
        asked=max(0, request.desired),
        there=decision.current,
        wanted=decision.desired,
        bound=bound,
        outcome=outcome,
        chosen=chosen,
        otherwise=otherwise,
    )


def bound_of(request: ScaleRequest, decision: Decision, model: ModelRecord, floor: Floor | None) -> str:
    """The limit that made the wanted number another one than was asked for; empty: none did."""
    wanted, role = decision.desired, request.role
    if request.bound:
        # Monitor and adviser know what the load asks for beyond it.
        return _cut(request.bound)
    if wanted > request.desired:
        if floor is not None and min(floor.instances, model.max_instances) == wanted:
            return f"{instances_of(wanted, role)} asked for by hand, for another {floor.left_s:.0f} s"
        return f"min_instances {model.min_instances}{_each(model)}"
    if wanted < request.desired:
        others = "" if wanted == model.max_instances else ", of all roles together"
        return f"max_instances {model.max_instances}{others}"
    return ""


def _each(model: ModelRecord) -> str:
    return " of each role" if len(SERVED_BY[model.serving]) > 1 else ""


def _asked_by(request: ScaleRequest) -> AskedBy:
    if request.for_another:
        return "room"
    return "hand" if request.by_hand else "load"


def _of_step(step: Step, asked_by: AskedBy | None) -> tuple[Literal["load", "revive", "mutate", "drain"], str, str]:
    """Outcome, what was chosen, and its cost."""
    decision = step.decision
    left_out = [f"not done: {why}" for why in step.left_out]
    if step.mutate:
        return "mutate", "; ".join([*step.explain[:MAX_LINES], *left_out]), "a role changes within milliseconds"
    if decision.drain:
        gone = names([record.worker.worker_id for record in decision.drain])
        why = "their workers are drained by hand" if asked_by == "drain" else "those that do least, or are the newest"
        return "drain", f"{gone} give up their instances: {why}", _drain_cost(step)
    revived = names([record.worker.worker_id for record in decision.revive])
    if step.load is None:
        lacking = decision.desired - decision.current - len(decision.revive)
        more = f"; {lacking} more have no worker" if lacking > 0 else ""
        return "revive", f"{revived} drained, and serve on: their weights are there{more}", "nothing"
    chains = step.load.chains
    lines = [f"{revived} serve on"] if revived else []
    verb = "loads" if len(chains.targets) == 1 else "load"
    lines += [
        f"{instances_of(len(chains.targets), step.request.role)} {verb} on {names(chains.targets)}",
        *chains.explain[:MAX_LINES],
        *left_out,
    ]
    if step.missing:
        lines.append(f"{step.missing} more have no worker")
    num_bytes = step.model.weights_bytes * len(chains.targets)
    predicted = [s for s in chains.predicted_s.values() if s]
    in_s = f", in about {max(predicted):.2f} s" if predicted else ""
    return "load", "; ".join(lines), f"{_bytes(num_bytes)} to load{in_s}"


def _bytes(number: float) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"


def _drain_cost(step: Step) -> str:
    kept = "" if not step.request.for_another else ", and one has to be loaded again should it be needed"
    return f"their requests end there or move{kept}"


def _otherwise(request: ScaleRequest, there: int, outcome: str, asked_by: AskedBy | None) -> str:
    has = instances_of(there, request.role)
    if asked_by == "drain":
        return "their workers would not become free"
    if request.for_another:
        return "the model that waits would have no worker"
    if outcome == "drain":
        return (
            f"{has} would stay" if request.by_hand or request.bound else f"{has} would stay, more than the load needs"
        )
    if request.by_hand:
        return f"{has} would stay"
    if not there:
        return "its requests would wait for an instance"
    if request.deficit:
        return f"{has} would have {100 * request.deficit:.0f} % more to do than they can within the objectives"
    return f"{has} would stay"


def _without(request: ScaleRequest) -> str:
    # A monitor that bounds says in words what it would ask for.
    return "without it, another number would be wanted" if request.bound else f"without it, {request.desired} would be"


def _seen(request: ScaleRequest) -> str:
    return _cut(request.reason.removesuffix(f"; {request.bound}") if request.bound else request.reason)


def _cut(text: str) -> str:
    text = _CONTROL.sub(" ", text)
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 2] + " …"
