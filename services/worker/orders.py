"""What planners want of this worker: plans, drains, mutations and assignments, in the order in which they were
published."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from shared import subjects
from shared.bus.base import Bus, Stored, Subscription
from shared.messages.live import WorkerOrder, ZigzagAssignment
from shared.messages.plans import DrainPlan, MigratePlan, MutatePlan, ScalePlan
from shared.subjects import Process

log = logging.getLogger(__name__)


class Orders:
    """Passes on what is for this worker. Orders of a planner that no longer leads are void."""

    def __init__(
        self,
        bus: Bus,
        worker: Process,
        on_scale: Callable[[ScalePlan, float], Awaitable[None]],
        on_drain: Callable[[DrainPlan], Awaitable[None]],
        on_zigzag: Callable[[ZigzagAssignment, float], Awaitable[None]],
        on_mutate: Callable[[MutatePlan, float], Awaitable[None]],
        on_migrate: Callable[[MigratePlan, float], Awaitable[None]],
    ) -> None:
        """The second argument: when the stream took it, by this process's monotonic clock."""
        self._bus = bus
        self._worker = worker
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
        self._own: Subscription | None = None

    async def subscribe(self) -> None:
        """Raises ``Unavailable``."""
        self._own = await self._bus.subscribe_events(subjects.worker_plans(self._worker), WorkerOrder, self._on_order)

    async def close(self) -> None:
        """Hear nothing more; what is being handled is finished."""
        if self._own is not None:
            await self._own.close()

    def planner_term(self, term: int) -> None:
        """The pool names the term of the planner that leads; 0: none has led yet."""
        self._term = max(self._term, term)
        if self._claimed_term > self._term:
            if self._doubted:
                log.warning("an order named term %d, and the pool knows of %d only", self._claimed_term, self._term)
                self._claimed_term = 0
            # The first word may still be an answer from before that planner led.
            self._doubted = True

    async def _on_order(self, stored: Stored[WorkerOrder]) -> None:
        order, at_s = stored.event, stored.at_s
        if order.scale is not None and self._is_valid(order.scale.term, order.scale.plan_id):
            await self._on_scale(order.scale, at_s)
        if order.drain is not None and self._is_valid(order.drain.term, order.drain.plan_id):
            await self._on_drain(order.drain)
        if order.zigzag is not None and self._is_valid(order.zigzag.term, order.zigzag.pair_id):
            await self._on_zigzag(order.zigzag, at_s)
        if order.mutate is not None and self._is_valid(order.mutate.term, order.mutate.plan_id):
            await self._on_mutate(order.mutate, at_s)
        if order.migrate is not None and self._is_valid(order.migrate.term, order.migrate.plan_id):
            await self._on_migrate(order.migrate, at_s)

    def _is_valid(self, term: int, what: str) -> bool:
        newest = max(self._term, self._claimed_term)
        if term < newest:
            log.warning("%s is void: its planner led with term %d, and one with %d does now", what, term, newest)
            return False
        if term > newest:
            self._claimed_term, self._doubted = term, False
        return True
