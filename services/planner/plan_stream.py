"""What the planner puts into the plan stream: plans, to each worker what it has to know, and the records of operations
that ended, from which the next planner has them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from services.planner.core.operations.plan_events import OfPlan, as_of, own_part, own_plans, parts_of, target_parts
from services.planner.core.rounds.decision_log import DecisionLog
from services.planner.core.rounds.plan_writer import AnyPlan
from shared import subjects
from shared.bus.base import Bus, EventMaker
from shared.errors import BlitzError, PayloadTooLarge
from shared.messages.decisions import DecisionRecord, DecisionsMade
from shared.messages.live import WorkerOrder, ZigzagAssignment
from shared.messages.operations import ScaleRecord
from shared.messages.plans import DrainPlan, MigratePlan, MutatePlan, ScalePlan
from shared.subjects import Process

_log = logging.getLogger(__name__)

MAX_SENDING = 64
"""Events of one plan that wait for the stream's word at a time."""


class PlanStream:
    """All methods but ``store_records`` raise what ``Bus.publish_event`` raises, and ``DeadlineExceeded`` for a plan
    that holds no longer; ``made_s`` (monotonic) is since when it holds. Publishing again changes nothing."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._unheard: dict[str, ScaleRecord] = {}
        """Records that the stream has not taken yet."""
        self._storing = False
        self._batch: tuple[str, tuple[DecisionRecord, ...]] = "", ()
        """The decisions that are being stored, and what the stream knows them by: it takes them once."""

    async def publish(self, plan: AnyPlan, made_s: float) -> None:
        """First for the record, in parts; then to each target what it has to know."""
        match plan:
            case ScalePlan():
                for part in parts_of(plan):
                    await self._bus.publish_event(subjects.scale_plans(), _now(part, made_s), message_id=part.plan_id)
            case DrainPlan():
                for drain in target_parts(plan):
                    await self._bus.publish_event(subjects.drain_plans(), drain, message_id=drain.plan_id)
            case MutatePlan():
                for mutation in target_parts(plan):
                    message_id, made = mutation.plan_id, _now(mutation, made_s)
                    await self._bus.publish_event(subjects.mutate_plans(), made, message_id=message_id)
        await self.tell(plan, made_s)
        if isinstance(plan, DrainPlan):
            verb = "revive" if plan.revive else "drain"
            _log.info("%s: %s; %s %s", plan.plan_id, plan.reason, verb, ", ".join(t.worker_id for t in plan.targets))

    async def tell(self, plan: AnyPlan, made_s: float) -> None:
        """Tell each target of a plan what it has to know; a target that has heard it ignores it. When the leader of a
        new term tells it again, it is new to the stream, and valid for workers that know of that term."""
        own: list[tuple[Process, AnyPlan]]
        match plan:
            case ScalePlan():
                own = list(own_plans(plan))
            case DrainPlan():
                own = [(t.worker, own_part(plan, t)) for t in plan.targets]
            case MutatePlan():
                own = [(t.worker, own_part(plan, t)) for t in plan.targets]
        turns = asyncio.Semaphore(MAX_SENDING)

        async def tell(worker: Process, part: AnyPlan) -> None:
            async with turns:
                message_id, order = f"{plan.plan_id}@{worker}-{plan.term}", _order(part, made_s)
                await self._bus.publish_event(subjects.worker_plans(worker), order, message_id=message_id)

        # The first error is raised once none runs any more.
        for outcome in await asyncio.gather(*[tell(*one) for one in own], return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def revision(self, assignment: ZigzagAssignment) -> None:
        """Append a revision of a pair's assignment, once, and tell both members."""
        message_id = f"{assignment.pair_id}-{assignment.revision}"
        await self._bus.publish_event(subjects.zigzag_assignments(), assignment, message_id=message_id)
        for member in (assignment.source, assignment.target):
            own_id, order = f"{message_id}@{member.worker_id}", WorkerOrder(zigzag=assignment)
            await self._bus.publish_event(subjects.worker_plans(member.worker), order, message_id=own_id)

    async def move(self, plan: MigratePlan, made_s: float) -> None:
        """Tell a worker to move requests. Nobody else needs to know: it is over before another planner leads."""
        subject = subjects.worker_plans(plan.worker)
        await self._bus.publish_event(subject, _order(plan, made_s), message_id=plan.plan_id)

    def add_record(self, record: ScaleRecord) -> None:
        """The record of an operation that ended: ``store_records`` stores it, once."""
        self._unheard[record.plan_id] = record

    async def store_records(self) -> None:
        """Store what was added; what the stream does not take now is left for the next call. May be called at any time,
        also while it runs."""
        if self._storing:
            return  # the call that runs continues until nothing is left
        self._storing = True
        try:
            while self._unheard:
                plan_id, record = next(iter(self._unheard.items()))
                try:
                    await self._bus.publish_event(subjects.scale_records(), record, message_id=f"record-{plan_id}")
                except BlitzError as error:
                    _log.info("the record of %s is stored later: %s", plan_id, error)
                    return
                self._unheard.pop(plan_id, None)
        finally:
            self._storing = False

    async def store_decisions(self, log: DecisionLog) -> None:
        """Store what the log has not told yet; what the stream does not take now is left for the next call, which must
        not come before this one is done."""
        while True:
            if not self._batch[1]:
                self._batch = f"decisions-{secrets.token_hex(8)}", log.untold()
            message_id, decisions = self._batch
            if not decisions:
                return
            try:
                await self._bus.publish_event(
                    subjects.decisions(), DecisionsMade(decisions=decisions), message_id=message_id
                )
            except PayloadTooLarge:
                _log.warning("%d decisions are too large for the stream: not stored", len(decisions))
            except BlitzError as error:
                _log.info("%d decisions are stored later: %s", len(decisions), error)
                return
            log.told(decisions)
            self._batch = "", ()


def _now(plan: OfPlan, made_s: float) -> Callable[[], OfPlan]:
    """The plan, with what is left of its validity whenever the bus sends it: the stream may take it seconds later."""
    return lambda: as_of(plan, time.monotonic() - made_s)


def _order(plan: AnyPlan | MigratePlan, made_s: float) -> EventMaker:
    """The order for a worker, in the same way."""
    match plan:
        case ScalePlan():
            scale = _now(plan, made_s)
            return lambda: WorkerOrder(scale=scale())
        case DrainPlan():
            return lambda: WorkerOrder(drain=plan)
        case MutatePlan():
            mutate = _now(plan, made_s)
            return lambda: WorkerOrder(mutate=mutate())
        case MigratePlan():
            migrate = _now(plan, made_s)
            return lambda: WorkerOrder(migrate=migrate())
