"""What a monitor knows of all models, and what it has to say to the planner when.

Rules
- A demand is sent when another number of instances is wanted than there is, or when it is another number of instances
  that the load does not need at this moment; and again after a while, as long as that is so. Thus a lost message and a
  failed plan heal. When what is there is what is wanted again, that is said once.
- People are told of each number that is wanted and not there, but of another one in the same direction no sooner than
  ``TELL_S`` after the last.
- What is wanted was triggered when the number that is there was first wrong, or another one was wanted: a repeat is the
  same wish.
- A follower knows as much as the leader, and says nothing.
- How a model is served says on which roles its load decides (``services.monitor.core.roles``).
- What an instance reported in a role that it has no longer does not count.
- Where a model that was asked for lately has no instance and no worker is spare or about to be, another one gives one
  back (of each role) that is kept for longer than that is worth: who has the most to spare, and of equals who has been
  idle for longest. So who wakes up again finds a worker.
- A gateway's first report that requests wait for a model without instances is urgent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from services.monitor.core.demand import ModelDemand, Verdict
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.roles import ROLES, There, verdicts
from shared.messages.common import TAKES_PROMPTS, Role, is_scaled_by_load
from shared.messages.decisions import RoleVerdict
from shared.messages.load import LoadReport, QueueReport
from shared.messages.registry import ModelRecord, WorkerInfo
from shared.profile import Profile
from shared.registry_view import RegistryView, counted_as

SNAPSHOT_INTERVAL_S = 1.0
"""How often the registry is looked at, beside whenever routes change."""
TELL_S = 1.0
"""While a load rises, each evaluation may want one instance more."""
About = tuple[str, Role]
"""A model and a role."""
ProfileOf = Callable[[ModelRecord, WorkerInfo], Profile | None]
"""What an instance of a model can do on workers of that kind, if that was measured."""


class Wish(NamedTuple):
    """What the planner is to hear about one model and role; as in ``Demand``."""

    model: str
    role: Role
    desired: int
    observed: int
    reason: str
    bound: str
    triggered_ago_s: float
    idle: int
    idle_for_s: float | None
    deficit: float
    spare: int
    urgent: int
    turns: bool
    """Whether people have not been told yet that as many are wanted."""


class Figures(NamedTuple):
    """What the load asks for, in instances."""

    desired: int
    needed: float


@dataclass(slots=True)
class _Group:
    """The instances of one model and role."""

    there: There = field(default_factory=There)
    """As of the last snapshot."""
    sent: int | None = None
    sent_at_s: float = -inf
    announced: int | None = None
    """The number that people were last told is wanted, if it is not met since."""
    announced_at_s: float = -inf
    announced_more: bool | None = None
    """Whether that was more than there were, or fewer."""
    triggered_s: float = 0.0
    met: bool = True
    """Whether what was wanted at the last evaluation was there."""
    verdict: Verdict | None = None
    """Of the last evaluation."""
    idle: int = 0
    """Instances that another model may have at once, and since when so many."""
    idle_since_s: float | None = None
    spare: int = 0

    def is_news(self, desired: int) -> bool:
        """Whether people are to be told of the number now."""
        more = _direction(desired, self.there.observed)
        if more is None or desired == self.announced:
            return False
        return more != self.announced_more or self.sent_at_s - self.announced_at_s >= TELL_S

    def set_idle(self, idle: int, spare: int, now_s: float) -> bool:
        """Whether they are other numbers than before."""
        before = self.idle, self.spare
        if idle > self.idle:
            self.idle_since_s = now_s
        self.idle, self.spare = idle, spare
        return before != (idle, spare)


@dataclass(slots=True)
class _Model:
    record: ModelRecord
    demand: ModelDemand
    groups: dict[Role, _Group] = field(default_factory=lambda: {role: _Group() for role in ROLES})
    held_by: set[str] = field(default_factory=set)
    """Gateways that hold requests for which there is no instance, as of their last reports."""

    num_gone: int = 0
    """Instances that are gone since the last snapshot."""

    @property
    def keeps(self) -> tuple[int, float]:
        """The lower, the sooner it can do without an instance: how many are spare (negative), and since when some have
        been idle."""
        groups = self.groups.values()
        since_s = (group.idle_since_s for group in groups if group.idle)
        idle_since_s = min((at_s for at_s in since_s if at_s is not None), default=inf)
        return -max(group.spare for group in groups), idle_since_s

    @property
    def num_taking(self) -> int:
        """Instances that take requests, now or soon."""
        return sum(group.there.observed for role, group in self.groups.items() if role in TAKES_PROMPTS)

    @property
    def has_instances(self) -> bool:
        return self.num_taking > 0


class Watch:
    """All registered models, as of the last snapshot and the reports since. ``now_s`` is of one monotonic clock."""

    def __init__(self, policy: DemandPolicy, *, repeat_s: float) -> None:
        """``repeat_s``: how often an unmet demand is repeated."""
        self._policy = policy
        self._repeat_s = repeat_s
        self._models: dict[str, _Model] = {}
        self._roles: dict[str, Role] = {}
        """By instance id, as of the last snapshot."""
        self._figures: dict[About, Figures] = {}
        self._asleep: list[_Model] = []
        """Models without an instance that could have one, where no worker is spare or about to be; as of the last
        snapshot."""

    @property
    def knows_models(self) -> bool:
        """Whether any is registered."""
        return bool(self._models)

    @property
    def figures(self) -> Mapping[About, Figures]:
        """As of the last evaluation, of the roles on which the load decides."""
        return self._figures

    def on_load(self, report: LoadReport, now_s: float) -> None:
        """An instance reports."""
        model = self._models.get(report.model)
        if model is not None:
            model.demand.on_load(report, now_s)

    def on_queue(self, report: QueueReport, now_s: float) -> bool:
        """A gateway reports. Whether it is urgent: somebody waits for a model that sleeps."""
        urgent = False
        for queue in report.models:
            model = self._models.get(queue.model)
            if model is None:
                continue
            model.demand.on_queue(report.gateway_id, queue, now_s)
            if model.has_instances:
                model.held_by.clear()
            elif not queue.queued_requests:
                model.held_by.discard(report.gateway_id)
            elif report.gateway_id not in model.held_by:
                model.held_by.add(report.gateway_id)
                urgent = True
        return urgent

    def on_gone(self, names: Iterable[str]) -> bool:
        """Instances are gone; ``names``: of their models, once per instance. Whether it is urgent: one of the models
        may have none left that takes prompts."""
        urgent = False
        for name in names:
            model = self._models.get(name)
            if model is not None:
                model.num_gone += 1
                urgent = urgent or 0 < model.num_taking <= model.num_gone
        return urgent

    def on_snapshot(self, view: RegistryView, profile_of: ProfileOf) -> None:
        """The registry is like this now."""
        models = view.models
        for name in self._models.keys() - models.keys():
            del self._models[name]
            for role in ROLES:
                self._figures.pop((name, role), None)
        observed: Counter[About] = Counter()
        serving: Counter[About] = Counter()
        spare: list[WorkerInfo] = []
        for worker in view.workers:
            about = counted_as(worker, models)
            if about is not None:
                observed[about] += 1
                serving[about] += worker.state == "serving"
            elif not worker.leaves:
                spare.append(worker.worker)
        # A profile is of one kind of worker: where they differ, it says nothing.
        kinds = {(w.worker.engine, w.worker.device, w.worker.gpu_name): w.worker for w in view.workers}
        for name, record in models.items():
            known = self._models.get(name)
            if known is None or known.record.model_hash != record.model_hash:
                known = self._models[name] = _Model(record, ModelDemand(self._policy))
            known.record, known.num_gone = record, 0
            known.demand.profile = profile_of(record, next(iter(kinds.values()))) if len(kinds) == 1 else None
            for role, group in known.groups.items():
                about = name, role
                group.there = There(observed[about], serving[about], view.floors.get(about))
        self._asleep = self._sleeping(view, {name for name, _ in observed}, spare)
        self._hear_roles(view)

    def _sleeping(self, view: RegistryView, awake: Set[str], spare: Collection[WorkerInfo]) -> list[_Model]:
        """Models that could have an instance, and have none, nor a spare worker that has their engine."""
        met = {"", *(engine for worker in spare for engine in worker.engines)} if spare else frozenset[str]()
        asleep = [
            model
            for name, model in view.models.items()
            if model.engine not in met and name not in awake and not model.advise and model.max_instances
        ]
        stay = [worker.worker for worker in view.workers if not worker.leaves]
        largest = {
            engine: max((worker.arena_bytes for worker in stay if worker.offers(engine)), default=0)
            for engine in {model.engine for model in asleep}
        }
        return [self._models[model.name] for model in asleep if model.weights_bytes <= largest[model.engine]]

    def _hear_roles(self, view: RegistryView) -> None:
        before, self._roles = self._roles, {w.instance.instance_id: w.instance.role for w in view.workers if w.instance}
        for worker in view.workers:
            instance = worker.instance
            if instance is None or before.get(instance.instance_id, instance.role) == instance.role:
                continue
            if (model := self._models.get(instance.model)) is not None:
                model.demand.on_role(instance.instance_id, instance.role)

    def evaluate(self, now_s: float, *, connected_since_s: float, leads: bool) -> list[Wish]:
        """What has to be said now, by model; it counts as said. ``connected_since_s``: since when reports can be
        heard. ``leads``: whether it is this monitor that speaks."""
        wishes, crowded = [], any(model.demand.was_asked_lately(now_s) for model in self._asleep)
        for name, model in self._in_turn(crowded=crowded):
            there = {role: group.there for role, group in model.groups.items()}
            found = verdicts(
                model.demand, model.record, there, now_s, connected_since_s=connected_since_s, crowded=crowded
            )
            if crowded and not model.record.advise and any(found[r].desired < there[r].serving for r in there):
                crowded = False  # a worker will be spare
            for role, group in model.groups.items():
                verdict = group.verdict = found[role]
                if is_scaled_by_load(model.record.serving, role):
                    self._figures[name, role] = Figures(verdict.desired, verdict.needed)
                else:
                    self._figures.pop((name, role), None)
                desired, observed = verdict.desired, group.there.observed
                changed = group.set_idle(verdict.idle, verdict.spare, now_s)
                was_met, group.met = group.met, desired == observed
                ended = group.met and not was_met
                if group.met:
                    group.announced = group.announced_more = None
                if not leads or (group.met and not (group.idle or changed or ended)):
                    group.sent = group.announced = group.announced_more = None
                    continue
                if desired != group.sent or (was_met and not group.met):
                    group.triggered_s = now_s
                elif not (changed or ended) and now_s - group.sent_at_s < self._repeat_s:
                    continue
                group.sent, group.sent_at_s = desired, now_s
                wishes.append(_wish(name, role, group, verdict, now_s))
        return wishes

    def _in_turn(self, *, crowded: bool) -> list[tuple[str, _Model]]:
        """By name; where their workers are wanted, those first that can do without one."""
        if not crowded:
            return sorted(self._models.items())
        return sorted(self._models.items(), key=lambda item: (*item[1].keeps, item[0]))

    def verdicts(self, name: str) -> tuple[RoleVerdict, ...]:
        """What a model needs now, of the roles on which its load decides."""
        model = self._models.get(name)
        if model is None:
            return ()
        return tuple(
            RoleVerdict(
                role=role,
                desired=verdict.desired,
                needed=verdict.needed,
                there=group.there.observed,
                seen=str(verdict.why),
                bound=verdict.bound,
            )
            for role, group in model.groups.items()
            if (verdict := group.verdict) is not None and (name, role) in self._figures
        )

    def published(self, wish: Wish) -> None:
        """It reached the bus. One that did not is repeated like the others."""
        model = self._models.get(wish.model)
        if model is not None:
            group, more = model.groups[wish.role], _direction(wish.desired, wish.observed)
            if wish.turns:
                group.announced, group.announced_more, group.announced_at_s = wish.desired, more, group.sent_at_s


def _wish(name: str, role: Role, group: _Group, verdict: Verdict, now_s: float) -> Wish:
    desired, observed = verdict.desired, group.there.observed
    return Wish(
        model=name,
        role=role,
        desired=desired,
        observed=observed,
        reason=verdict.reason,
        bound=verdict.bound,
        triggered_ago_s=now_s - group.triggered_s,
        idle=group.idle,
        idle_for_s=None if group.idle_since_s is None else now_s - group.idle_since_s,
        deficit=max(0.0, min(verdict.needed, desired) - observed) / max(observed, 1),
        spare=verdict.spare,
        urgent=verdict.urgent,
        turns=group.is_news(desired),
    )


def _direction(desired: int, observed: int) -> bool | None:
    """Whether more are wanted, or fewer; None: neither."""
    return desired > observed if desired != observed else None
