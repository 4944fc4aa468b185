"""Rounds of decisions: everything that is wanted at one moment is decided from one snapshot and leased in one call.

Demand is level-triggered: the monitor repeats what is not met, so a demand that a round refuses is dropped. An operator
waits for the answer to a request made by hand.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from opentelemetry import context as otel_context
from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter, Histogram

from services.planner.advice import Adviser
from services.planner.core.fleet.allocation import Want
from services.planner.core.multicast.cluster import Clusters
from services.planner.core.multicast.explain import instances_of
from services.planner.core.operations.decision import ScaleRequest
from services.planner.core.operations.operation import Operation
from services.planner.core.operations.shares import shares
from services.planner.fleet import About, Fleet
from services.planner.leases import RPC_TIMEOUT_S, Leases
from services.planner.mutations import Mutations
from services.planner.scaler import Scaler
from services.planner.step import NoSpareWorker, Step
from shared.aio import OwnedTasks
from shared.errors import BlitzError, Conflict, Internal, Unavailable
from shared.leading import Leader
from shared.messages.common import Role
from shared.messages.registry import LeaseVerdict, LeaseWorkers
from shared.messages.scaling import Unplanned
from shared.registry import RegistryReader
from shared.registry_view import RegistryView
from shared.telemetry import tracer

log = logging.getLogger(__name__)

LEASE_TRIES = 3
"""How often a request is planned when its workers are taken by others first."""
MAX_ROUND_S = 0.05
"""Of planning: what is left waits for the next round, which begins at once."""
MAX_WAITING = 20_000
"""Models and roles with an unmet demand."""
SHRINK_S = 0.02
"""A demand for fewer instances waits for so long for what could use them in another role."""
UNPLANNED_S = 10.0
"""A demand that was not repeated for so long is met, or was dropped."""
SHORT_S = 2.5
"""A demand for which no worker was spare is tried again when one may be, unless it is older than this: the monitor has
said it again by then if it still stands."""
ROOM_WAIT_S = 4.0
"""How long an operator waits for other models to make room."""
MAX_UNPLANNED_LISTED = 100
MAX_WHY_CHARS = 500
BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)


@dataclass(eq=False)
class _Waiting:
    request: ScaleRequest
    context: otel_context.Context
    by_hand: asyncio.Future[Operation | None] | None = None
    tries: int = 0
    since_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Round:
    """What one round is decided from, and what was decided so far."""

    view: RegistryView
    clusters: Clusters
    promised: frozenset[str]
    """Instances that make room for a model that still waits."""
    wanted: Mapping[About, int]
    """What is asked for."""
    steps: list[tuple[_Waiting, Step, trace.Span]] = field(default_factory=list)
    wants: dict[About, Want] = field(default_factory=dict)
    """What no worker was left for; by hand and by load it is one thing."""
    without_worker: list[tuple[_Waiting, BlitzError]] = field(default_factory=list)
    """Requests made by hand, each with why nothing comes of it without room."""
    shares: dict[_Waiting, int] = field(default_factory=dict)
    """Spare workers that are left to a demand at first, where there are fewer than are lacking."""
    sharing: list[_Waiting] = field(default_factory=list)
    """Demands that lack more than their share: they get what others could not use."""
    served: set[_Waiting] = field(default_factory=set)
    """Requests of which something comes."""
    shrinking: list[_Waiting] = field(default_factory=list)
    """Requests for fewer instances."""
    staying: set[str] = field(default_factory=set)
    """Instances (ids) with which something happens already."""


@dataclass(slots=True)
class _Refusal:
    """The last answer to a demand that is repeated."""

    code: str
    wanted: int
    why: str
    since_s: float
    said_s: float


class Rounds:
    """``run`` decides, while the process leads. Requests of one model and role replace each other, but for those that
    were asked for by hand."""

    def __init__(
        self,
        leases: Leases,
        reader: RegistryReader,
        scaler: Scaler,
        fleet: Fleet,
        adviser: Adviser,
        mutations: Mutations,
        leader: Leader,
        metrics: CollectorRegistry,
    ) -> None:
        self._leases = leases
        self._fleet = fleet
        self._adviser = adviser
        self._mutations = mutations
        self._reader = reader
        self._scaler = scaler
        self._leader = leader
        self._demands: dict[tuple[str, Role], _Waiting] = {}
        self._by_hand: list[_Waiting] = []
        self._short: dict[tuple[str, Role], _Waiting] = {}
        """Demands for which no worker was spare."""
        self._awaiting_room: list[_Waiting] = []
        """Requests made by hand for which other models make room."""
        self._wake = asyncio.Event()
        self._publishing = OwnedTasks()
        self._last_refusal: dict[tuple[str, Role], _Refusal] = {}
        self._plans = Counter("blitz_planner_plans_total", "Plans published", ["direction"], registry=metrics)
        self._refused = Counter("blitz_planner_refused_total", "Demands without a plan", ["code"], registry=metrics)
        self._plan_seconds = Histogram(
            "blitz_planner_plan_seconds",
            "Demand received to plan published",
            registry=metrics,
            buckets=BUCKETS_S,
        )
        self._round_seconds = Histogram(
            "blitz_planner_round_seconds",
            "One round of decisions, from the snapshot to the leases",
            registry=metrics,
            buckets=BUCKETS_S,
        )

    def demand(self, request: ScaleRequest) -> None:
        """In place of what the same model and role wanted before."""
        about = (request.model, request.role)
        self._short.pop(about, None)
        if request.fewer:
            # What this role can do without may be what another one is short of.
            self._retry([(request.model, role) for role in get_args(Role)])
        if about in self._demands or len(self._demands) < MAX_WAITING:
            self._demands[about] = _Waiting(request, otel_context.get_current())
            self._wake.set()

    def forget(self, model: str, role: Role) -> None:
        """What this model and role wanted before is not wanted any more."""
        self._demands.pop((model, role), None)
        self._short.pop((model, role), None)

    def try_again(self) -> None:
        """A worker may be spare, or can be made so: decide again on demands for which none was."""
        self._retry(list(self._short))

    def _retry(self, abouts: Iterable[About]) -> None:
        oldest_s = time.monotonic() - SHORT_S
        for about in abouts:
            one = self._short.pop(about, None)
            if one is not None and one.since_s >= oldest_s:
                self._put_back(one)
        awaiting, self._awaiting_room = self._awaiting_room, []
        for one in awaiting:
            if one.by_hand is not None and not one.by_hand.done():
                self._put_back(one)

    async def scale(self, request: ScaleRequest) -> Operation | None:
        """Decide on this, too, in the next round; its operation once published, None if nothing is to do. Raises
        ``BlitzError`` if nothing comes of it."""
        self._leader.check()
        about = (request.model, request.role)
        if about in self._short and self._short[about].request.desired > request.desired:
            # Its reason may have been an earlier number by hand. The load says it again if it is its own.
            del self._short[about]
        outcome: asyncio.Future[Operation | None] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(request, otel_context.get_current(), outcome)
        self._by_hand.append(waiting)
        self._wake.set()
        try:
            return await outcome
        finally:
            for where in (self._by_hand, self._awaiting_room):
                if waiting in where:
                    where.remove(waiting)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._round()

    async def close(self) -> None:
        """Wait for what is being published; the rest is refused."""
        await self._publishing.finish()
        self._demands.clear()
        self._short.clear()
        for waiting in (*self._by_hand, *self._awaiting_room):
            self._refuse(waiting, Unavailable("the planner that was asked does not lead any more", retry_after_s=0.5))
        self._by_hand.clear()
        self._awaiting_room.clear()

    # --- a round -----------------------------------------------------------------------------

    async def _round(self) -> None:
        waiting: list[_Waiting] = []
        term = self._leader.term
        leases: list[LeaseWorkers] = []
        try:
            with self._round_seconds.time():
                steps = await self._decide(waiting)
                leases += [lease for _, step, _ in steps if (lease := step.lease(self._leases.ttl_s, term)) is not None]
                verdicts = await self._lease(steps, leases)
            # Planning and leasing took their time.
            self._leader.check(term)
        except BaseException as error:
            # The pool may have granted them anyway: its answer was lost, or came too late.
            for lease in leases:
                self._leases.give_back(lease.plan_id, lease.worker_ids)
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, BlitzError):
                log.exception("a round of decisions failed")
                error = Internal("the planner failed; its log says more")
            for one in (*waiting, *self._take_by_hand(), *self._take_demands()):
                self._refuse(one, error)
            return
        for one, step, span in steps:
            verdict = verdicts.get(step.needs or step.plan_id)
            if verdict is not None and verdict.grant is None:
                span.end()
                self._again(one, verdict)
                continue
            grant = verdict.grant if verdict is not None else None
            self._publishing.start(self._publish(one, self._scaler.begin(step, grant, term, span)))

    def _take_by_hand(self) -> list[_Waiting]:
        waiting, self._by_hand = self._by_hand, []
        return waiting

    def _take_demands(self) -> list[_Waiting]:
        waiting, self._demands = [*self._demands.values()], {}
        return waiting

    def _put_back(self, one: _Waiting) -> None:
        """For the next round; a demand only if there is no newer one."""
        self._keep(one)
        self._wake.set()

    def _keep(self, one: _Waiting) -> None:
        if one.by_hand is not None:
            self._by_hand.append(one)
        else:
            self._demands.setdefault((one.request.model, one.request.role), one)

    async def _decide(self, waiting: list[_Waiting]) -> list[tuple[_Waiting, Step, trace.Span]]:
        """``waiting`` is filled with what is decided on."""
        self._leader.check()
        # The registry is to know the numbers that were set by hand. Demands are of now, and those of one model's roles
        # come one after the other: the later they are taken, the fewer are decided on without the others.
        waiting += self._take_by_hand()
        view = self._mutations.seen(await self._reader.read(timeout_s=RPC_TIMEOUT_S))
        waiting += self._take_demands()
        with self._scaler.at_rest():
            return self._decide_on(waiting, view)

    def _decide_on(self, waiting: list[_Waiting], view: RegistryView) -> list[tuple[_Waiting, Step, trace.Span]]:
        clusters = self._scaler.clusters(view)
        for one in waiting:
            one.request = self._allowed(one.request, view, clusters)
        wanted = {(one.request.model, one.request.role): one.request.desired for one in waiting}
        deciding = _Round(view, clusters, self._fleet.promised(), wanted)
        began_s, late = time.monotonic(), list[_Waiting]()
        steps, wants = deciding.steps, deciding.wants
        waiting.sort(key=lambda one: one.request.rank(self._fleet.standing(one.request, view, clusters)))
        deciding.shares = self._shares(waiting, deciding)
        # Again those that need fewer: what could go may have got another role by then.
        for requests, shrinks in ((waiting, False), (deciding.sharing, False), (deciding.shrinking, True)):
            for one in requests:
                if (steps or wants) and time.monotonic() - began_s > MAX_ROUND_S:
                    late.append(one)
                else:
                    self._plan(one, deciding, shrinks=shrinks)
        for one in late:
            self._put_back(one)
        drained = [record for _, step, _ in steps for record in step.decision.drain]
        mutated = {record.worker.worker_id for _, step, _ in steps for record in step.mutate}
        began_s = time.monotonic()
        try:
            making_room = self._fleet.make_room([*wants.values()], view, clusters, drained, mutated)
        except Exception:  # what is planned already is carried out all the same
            log.exception("no room could be made")
            making_room = []
        for request in making_room:
            if steps and time.monotonic() - began_s > MAX_ROUND_S:
                break  # those that wait say so again
            step = self._scaler.plan(request, view, clusters, mutating=deciding.staying)
            if step is not None:
                log.info("%s makes room: %s", request.model, request.reason)
                taking = _Waiting(request, otel_context.get_current())
                steps.append((taking, step, tracer().start_span("planner.plan")))
        for one, error in deciding.without_worker:
            self._await_room(one, error)
        return steps

    def _await_room(self, one: _Waiting, error: BlitzError) -> None:
        """Until workers become spare, if instances of other models go for what was asked for by hand."""
        left_s = one.since_s + ROOM_WAIT_S - time.monotonic()
        if left_s <= 0 or not self._fleet.makes_room_for(one.request.model, one.request.role):
            self._refuse(one, error)
            return
        self._awaiting_room.append(one)
        asyncio.get_running_loop().call_later(left_s, self.try_again)

    def _allowed(self, request: ScaleRequest, view: RegistryView, clusters: Clusters) -> ScaleRequest:
        model = view.models.get(request.model)
        if model is None:
            return request
        floor = view.floors.get((request.model, request.role))
        return self._adviser.allowed(request, model, clusters.of_model(model.name), floor)

    def _shares(self, waiting: Iterable[_Waiting], now: _Round) -> dict[_Waiting, int]:
        """Of those that lack more than they are to have at first. What is asked for by hand is done at one go."""
        if not now.clusters.num_spare:
            return {}
        view, clusters = now.view, now.clusters
        lacking = [
            (one, self._fleet.lack(one.request, missing, view, clusters))
            for one in waiting
            if (missing := self._scaler.num_to_load(one.request, view, clusters, now.promised))
        ]
        if sum(lack.missing for _, lack in lacking) <= clusters.num_spare:
            return {}
        got = shares([lack for _, lack in lacking], clusters.num_spare)
        return {
            one: share
            for (one, lack), share in zip(lacking, got, strict=True)
            if share < lack.missing and one.by_hand is None
        }

    def _plan(self, one: _Waiting, now: _Round, *, shrinks: bool) -> None:
        """Decide on one request. One that takes instances away is put aside, unless it is its turn (``shrinks``)."""
        request, share = one.request, now.shares.pop(one, None)
        if share is not None:
            now.sharing.append(one)
        if share == 0:
            return
        try:
            steps = self._scaler.plan_with_roles(
                request, now.view, now.clusters, now.wanted, promised=now.promised, staying=now.staying, most=share
            )
        except BlitzError as error:
            if isinstance(error, NoSpareWorker):
                if share is not None:
                    return  # those that are spare are of no use to it
                self._want(request, error.missing, now)
                if one in now.served:
                    return
                if one.by_hand is not None:
                    now.without_worker.append((one, error))
                    return
                self._short[request.model, request.role] = one
            self._refuse(one, error)
            return
        except Exception:
            log.exception("no plan for %s", request.model)
            self._refuse(one, Internal("the planner failed; its log says more"))
            return
        if not steps:
            self._settle(one, None)
            return
        if steps[-1].decision.drain and not shrinks:
            now.shrinking.append(one)
            return
        if steps[-1].decision.drain and one.by_hand is None and time.monotonic() - one.since_s < SHRINK_S:
            self._keep(one)
            asyncio.get_running_loop().call_later(SHRINK_S, self._wake.set)
            return
        # Who asked hears of the last of what is done in the role itself.
        answer = next(step for step in reversed(steps) if step.request is request)
        now.served.add(one)
        for step in steps:
            now.staying.update(step.changes)
            if step.load is not None:
                self._fleet.got_workers(step.model.name, step.request.role)
            if step.missing and one.by_hand is None and share is None:
                self._want(step.request, step.missing, now)
            asked = one if step is answer else _Waiting(step.request, one.context)
            now.steps.append((asked, step, tracer().start_span("planner.plan", context=one.context)))

    def _want(self, request: ScaleRequest, missing: int, now: _Round) -> None:
        want = self._fleet.want(request, missing, now.view, now.clusters)
        now.wants.setdefault((request.model, request.role), want)

    async def _lease(
        self, steps: list[tuple[_Waiting, Step, trace.Span]], leases: list[LeaseWorkers]
    ) -> dict[str, LeaseVerdict]:
        """The pool's verdicts by plan id."""
        if not leases:
            return {}
        # In the trace of what it is for, if it is for one thing.
        first = next(span for _, step, span in steps if step.load is not None)
        with trace.use_span(first):
            return {verdict.plan_id: verdict for verdict in await self._leases.grant(tuple(leases))}

    def _again(self, one: _Waiting, verdict: LeaseVerdict) -> None:
        """Another plan took a worker since the snapshot; the next snapshot shows it."""
        error = verdict.error.as_error() if verdict.error is not None else Conflict("no lease")
        one.tries += 1
        if isinstance(error, Conflict) and one.tries < LEASE_TRIES:
            log.info("planning again for %s: %s", one.request.model, error)
            self._put_back(one)
        else:
            self._refuse(one, error)

    # --- outcomes ----------------------------------------------------------------------------

    async def _publish(self, one: _Waiting, publishing: Coroutine[Any, Any, Operation]) -> None:
        try:
            operation = await publishing
        except BlitzError as error:
            self._refuse(one, error)
            return
        self._plans.labels(operation.direction).inc()
        self._plan_seconds.observe(max(0.0, time.time() - one.request.triggered_at_s))
        self._settle(one, operation)

    def _settle(self, one: _Waiting, operation: Operation | None) -> None:
        self._last_refusal.pop((one.request.model, one.request.role), None)
        if one.by_hand is not None and not one.by_hand.done():
            one.by_hand.set_result(operation)

    def _refuse(self, one: _Waiting, error: BlitzError) -> None:
        if one.by_hand is not None:
            if not one.by_hand.done():
                one.by_hand.set_exception(error)
            return
        # The monitor repeats itself while the number is wrong, so nothing is lost here.
        request, about = one.request, (one.request.model, one.request.role)
        self._refused.labels(error.code).inc()
        before, now_s = self._last_refusal.get(about), time.monotonic()
        level = logging.DEBUG if before is not None and before.code == error.code else logging.WARNING
        if before is not None or len(self._last_refusal) < MAX_WAITING:
            fresh = before is None or now_s - before.said_s > UNPLANNED_S
            since_s = now_s if fresh or before is None else before.since_s
            why = error.message[:MAX_WHY_CHARS]
            self._last_refusal[about] = _Refusal(error.code, request.desired, why, since_s, now_s)
        log.log(
            level, "no plan for %s (%s wanted): %s", request.model, instances_of(request.desired, request.role), error
        )

    def unplanned(self, models: Collection[str] = ()) -> tuple[Unplanned, ...]:
        """What is asked for and cannot be planned, those that wait the longest first. ``models``: of these only."""
        now_s = time.monotonic()
        refusals = self._last_refusal
        abouts = [(m, role) for m in models for role in get_args(Role) if (m, role) in refusals] if models else refusals
        current = [(r.since_s, a, r) for a in abouts if now_s - (r := refusals[a]).said_s <= UNPLANNED_S]
        return tuple(
            Unplanned(model=model, role=role, wanted=r.wanted, why=r.why, for_s=round(now_s - since_s, 3))
            for since_s, (model, role), r in heapq.nsmallest(MAX_UNPLANNED_LISTED, current, key=lambda row: row[:2])
        )
