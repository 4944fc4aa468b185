"""What planners want of this worker: plans, drains, mutations and assignments, in the order in which they were
published."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from shared import subjects
from shared.bus.base import Bus, Subscription
from shared.errors import BlitzError
from shared.messages.live import WorkerOrder, ZigzagAssignment
from shared.messages.plans import DrainPlan, MigratePlan, MutatePlan, ScalePlan

log = logging.getLogger(__name__)

NO_TERM_S = 5.0
"""A pool that names no term for so long works with a planner of 0.1, whose plans all workers hear."""


class Orders:
    """Passes on what is for this worker. Orders of a planner that no longer leads are void."""

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        on_scale: Callable[[ScalePlan], Awaitable[None]],
        on_drain: Callable[[DrainPlan], Awaitable[None]],
        on_zigzag: Callable[[ZigzagAssignment], Awaitable[None]],
        on_mutate: Callable[[MutatePlan], Awaitable[None]],
        on_migrate: Callable[[MigratePlan], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._on_scale = on_scale
        self._on_drain = on_drain
        self._on_zigzag = on_zigzag
        self._on_mutate = on_mutate
        self._on_migrate = on_migrate
        self._term = 0
        """As the pool has named it."""
        self._claimed_term = 0
        """Beyond that, as an order has named it. The pool confirms it with its next words, or there is no such term."""
        self._doubted = False
        self._no_term_since_s: float | None = None
        self._own: Subscription | None = None
        self._public: list[Subscription] = []
        self._changing = asyncio.Lock()

    async def subscribe(self) -> None:
        """Raises ``Unavailable``."""
        self._own = await self._bus.subscribe_events(
            subjects.worker_plans(self._worker_id), WorkerOrder, self._on_order
        )

    async def close(self) -> None:
        """Hear nothing more; what is being handled is finished."""
        if self._own is not None:
            await self._own.close()
        await self._close_public()

    async def planner_term(self, term: int) -> None:
        """The pool names the term of the planner that leads; 0: it knows of none."""
        self._term = max(self._term, term)
        if self._claimed_term > self._term:
            if self._doubted:
                log.warning("an order named term %d, and the pool knows of %d only", self._claimed_term, self._term)
                self._claimed_term = 0
            # The first word may still be an answer from before that planner led.
            self._doubted = True
        async with self._changing:
            if self._term:
                await self._close_public()
                return
            now_s = time.monotonic()
            if self._no_term_since_s is None:
                self._no_term_since_s = now_s
            if not self._public and now_s - self._no_term_since_s >= NO_TERM_S:
                await self._open_public()

    async def _open_public(self) -> None:
        log.info("planners know no terms here: hearing all plans")
        bus, heard = self._bus, self._public
        try:
            # One after the other: what is open already must not be lost with one that fails.
            heard.append(await bus.subscribe_events(subjects.scale_plans(), ScalePlan, self._scale))
            heard.append(await bus.subscribe_events(subjects.drain_plans(), DrainPlan, self._drain))
            heard.append(await bus.subscribe_events(subjects.zigzag_assignments(), ZigzagAssignment, self._zigzag))
        except BlitzError as error:
            log.warning("the plans for all workers cannot be heard: %s", error)
            await self._close_public()

    async def _close_public(self) -> None:
        public, self._public = self._public, []
        for subscription in public:
            await subscription.close()

    async def _on_order(self, order: WorkerOrder) -> None:
        if order.scale is not None:
            await self._scale(order.scale)
        if order.drain is not None:
            await self._drain(order.drain)
        if order.zigzag is not None:
            await self._zigzag(order.zigzag)
        if order.mutate is not None:
            await self._mutate(order.mutate)
        if order.migrate is not None and self._is_valid(order.migrate.term, order.migrate.plan_id):
            await self._on_migrate(order.migrate)

    async def _scale(self, plan: ScalePlan) -> None:
        if self._is_valid(plan.term, plan.plan_id):
            await self._on_scale(plan)

    async def _drain(self, plan: DrainPlan) -> None:
        if self._is_valid(plan.term, plan.plan_id):
            await self._on_drain(plan)

    async def _zigzag(self, assignment: ZigzagAssignment) -> None:
        if self._is_valid(assignment.term, assignment.pair_id):
            await self._on_zigzag(assignment)

    async def _mutate(self, plan: MutatePlan) -> None:
        if self._is_valid(plan.term, plan.plan_id):
            await self._on_mutate(plan)

    def _is_valid(self, term: int, what: str) -> bool:
        """Planners of 0.1 have no terms: the leases alone tell whether what they say still holds."""
        newest = max(self._term, self._claimed_term)
        if 0 < term < newest:
            log.warning("%s is void: its planner led with term %d, and one with %d does now", what, term, newest)
            return False
        if term > newest:
            self._claimed_term, self._doubted = term, False
        return True
