"""Mutation: this worker's instance gets another role (paper section 5.4). No weights move.

A role only decides what gateways and other instances send here: whatever was accepted before finishes as it began, and
a request that names this instance for a duty that it no longer has is served, too. So the change is one assignment; the
rest is telling: the pool at once, from which gateways have it, and the planner once the pool knows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from services.worker.instance.instance import Instance, InstanceSlot
from services.worker.instance.progress import ProgressReporter
from services.worker.instance.registration import Registration
from shared.aio import OwnedTasks
from shared.messages.plans import MutatePlan, MutateTarget

log = logging.getLogger(__name__)

CONFIRM_S = 2.0
"""How long the pool's word on the new role is waited for, before the planner is told all the same."""


class Mutation:
    """Event loop only."""

    def __init__(
        self,
        worker_id: str,
        slot: InstanceSlot,
        registration: Registration,
        progress: ProgressReporter,
        report_load: Callable[[], Awaitable[None]],
    ) -> None:
        """``report_load()`` says now what the instance does, and in which role."""
        self._worker_id = worker_id
        self._slot = slot
        self._registration = registration
        self._progress = progress
        self._report_load = report_load
        self._tasks = OwnedTasks()

    async def close(self) -> None:
        """Tell nothing more."""
        await self._tasks.close()

    async def on_mutate_plan(self, plan: MutatePlan, stored_s: float) -> None:
        """Take the role, if the plan names this worker's instance; a repeated plan changes nothing. What cannot be is
        told to the planner with the reason. ``stored_s``: when the stream took the plan (monotonic)."""
        target = next((t for t in plan.targets if t.worker_id == self._worker_id), None)
        if target is None:
            return
        instance, refusal = self._slot.current(), self._refusal(plan, target, time.monotonic() - stored_s)
        if instance is None or refusal:
            await self._progress.tell(plan.plan_id, target.instance_id, "failed", detail=refusal)
            return
        was = instance.role
        instance.ordered_role = plan.term, plan.planned_s
        if was != plan.role:
            instance.role = plan.role
            instance.on_first_work = lambda: self._tasks.start(
                self._progress.tell(plan.plan_id, target.instance_id, "working")
            )
            log.info("%s: from %s to %s: %s", instance.instance_id, was, plan.role, plan.reason)
            self._slot.changed()
        # Not here: the next order may concern this instance, too.
        self._tasks.start(self._tell(plan, instance))

    def _refusal(self, plan: MutatePlan, target: MutateTarget, age_s: float) -> str:
        """Why not; empty if nothing speaks against it."""
        instance = self._slot.current()
        if instance is None or instance.instance_id != target.instance_id:
            return f"{target.instance_id} is not here any more"
        if (plan.term, plan.planned_s) < instance.ordered_role:
            return "superseded by a later plan"
        if instance.role == plan.role and instance.state in ("serving", "draining"):
            return ""
        if instance.state != "serving":
            return f"it is {instance.state}"
        if age_s > plan.valid_s:
            return f"the plan came {age_s:.1f} s after it was published, and was valid for {plan.valid_s:.1f} s"
        return ""

    async def _tell(self, plan: MutatePlan, instance: Instance) -> None:
        await self._report_load()
        detail = "" if await self._registration.confirmed(CONFIRM_S) else "the pool has not confirmed it"
        if instance.role == plan.role:  # not if a later plan has changed it since
            await self._progress.tell(plan.plan_id, instance.instance_id, "serving", detail=detail)
