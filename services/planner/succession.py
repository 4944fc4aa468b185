"""What a new leader learns from the plan stream and the registry: what earlier ones began."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from services.planner.clock import now
from services.planner.core.operations.history import (
    operations_under_way,
    plans_from,
    unheeded,
    unpublished_leases,
    without_chains_from,
)
from services.planner.core.operations.operations import MAX_RECORDS
from services.planner.core.operations.plan_events import base_id
from services.planner.core.planner import Planner
from services.planner.leases import RPC_TIMEOUT_S
from services.planner.operation_tracker import OperationTracker
from services.planner.plan_stream import PlanStream
from shared import subjects
from shared.aio import OwnedTasks
from shared.bus.base import Bus, Stored
from shared.errors import BlitzError
from shared.leading import Leader
from shared.messages.decisions import DecisionsMade
from shared.messages.live import ZigzagAssignment
from shared.messages.operations import ScaleRecord
from shared.messages.plans import DrainPlan, MutatePlan, ScalePlan
from shared.registry import RegistryReader

log = logging.getLogger(__name__)

E = TypeVar("E", ScalePlan, DrainPlan, MutatePlan, ZigzagAssignment)
P = TypeVar("P", ScalePlan, DrainPlan, MutatePlan)
MAX_PAST_EVENTS = 5000
"""Of each kind, that a new leader reads back."""


class Succession:
    """Remembers under which term this process led last."""

    def __init__(
        self,
        bus: Bus,
        leader: Leader,
        reader: RegistryReader,
        planner: Planner,
        stream: PlanStream,
        tracker: OperationTracker,
    ) -> None:
        self._bus = bus
        self._leader = leader
        self._reader = reader
        self._planner = planner
        self._stream = stream
        self._tracker = tracker
        self._led_term: int | None = None
        self._tasks = OwnedTasks()

    async def finish(self) -> None:
        """Wait for what is being told."""
        await self._tasks.finish()

    async def recall(self) -> None:
        """Learn what is under way, and tell those who may not have heard. Raises ``BlitzError``."""
        if self._led_term == self._leader.term:
            return  # no other planner led since
        operations = self._planner.operations
        operations.reset()
        past, limit = self._bus.past_events, MAX_PAST_EVENTS
        stored = await past(subjects.scale_records(), ScaleRecord, limit=MAX_RECORDS)
        # Only operations that ended have records there; ignore anything else.
        records = [one.event for one in stored if one.event.status != "running"]
        for record in records:
            operations.remember(record)
        # Explanations must not keep anybody from leading.
        self._tasks.start(self._recall_decisions())
        # This leader repeats earlier plans under its own term: workers no longer listen to an earlier leader.
        stored_s: dict[str, float] = {}

        async def published(subject: str, kind: type[P]) -> list[P]:
            found = await past(subject, kind, limit=limit)
            for one in found:
                stored_s.setdefault(base_id(one.event.plan_id), one.at_s)
            return self._mine(found)

        plans = plans_from(await published(subjects.scale_plans(), ScalePlan))
        drains = without_chains_from(await published(subjects.drain_plans(), DrainPlan))
        mutations = without_chains_from(await published(subjects.mutate_plans(), MutatePlan))
        assignments = self._mine(await past(subjects.zigzag_assignments(), ZigzagAssignment, limit=limit))
        view = await self._reader.read(timeout_s=RPC_TIMEOUT_S)
        ended = {record.plan_id for record in records}
        now_s = time.monotonic()
        for operation in operations_under_way(
            plans.values(), drains.values(), mutations.values(), assignments, ended, stored_s, now_s
        ):
            operations.add(operation)
        for plan_id, worker_ids in unpublished_leases(view.workers, plans.keys()):
            log.warning("%s was never published: freeing %s", plan_id, ", ".join(worker_ids))
            await self._tracker.release(plan_id, *worker_ids)
        self._led_term = self._leader.term
        self._planner.tracker.check(view, now())
        # The planner that published them may have died before every target had heard.
        for operation in operations.running():
            plan = plans.get(operation.plan_id)
            if plan is not None and operation.untold_targets:
                self._tasks.start(self._tell_again(plan, stored_s[plan.plan_id]))
            drain = drains.get(operation.plan_id)
            left = unheeded(drain, operation, view.workers) if drain is not None else None
            if left is not None:
                self._tasks.start(self._tell_again(left, stored_s[left.plan_id]))

    async def _recall_decisions(self) -> None:
        try:
            made = await self._bus.past_events(subjects.decisions(), DecisionsMade, limit=MAX_PAST_EVENTS)
        except BlitzError as error:
            log.info("what earlier planners decided is not known: %s", error)
            return
        self._planner.decisions.recall(decision for one in made for decision in one.event.decisions)

    def _mine(self, events: Iterable[Stored[E]]) -> list[E]:
        return [msgspec.structs.replace(stored.event, term=self._leader.term) for stored in events]

    async def _tell_again(self, plan: ScalePlan | DrainPlan, stored_s: float) -> None:
        try:
            await self._stream.tell(plan, stored_s)
        except BlitzError as error:
            log.warning("%s: its targets could not be told again: %s", plan.plan_id, error)
