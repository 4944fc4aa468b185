"""A worker hears what is for it alone, from the planner that leads."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.worker.orders import Orders
from shared import subjects
from shared.messages.live import WorkerOrder, ZigzagAssignment
from shared.messages.plans import DrainPlan, MigratePlan, MutatePlan, ScalePlan
from shared.subjects import Process
from tests.processes import INCARNATION, process
from tests.records import model
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import eventually


def plan(plan_id: str, term: int = 1) -> ScalePlan:
    return ScalePlan(
        plan_id=plan_id,
        model=model("m"),
        role="colocated",
        members=(),
        chains=(),
        triggered_at_s=0.0,
        valid_s=9e9,
        term=term,
    )


def mutation(plan_id: str, term: int = 1) -> MutatePlan:
    return MutatePlan(plan_id=plan_id, model="m", targets=(), role="decode", planned_s=0.0, valid_s=9e9, term=term)


class Heard:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.planner = self.broker.bus("planner")
        self.all: list[str] = []
        self.bus = self.broker.bus("w0")
        self.orders = Orders(
            self.bus, process("w0"), self._scale, self._drain, self._zigzag, self._mutate, self._migrate
        )
        self._number = 0

    async def _scale(self, order: ScalePlan, _stored_s: float) -> None:
        self.all.append(order.plan_id)

    async def _drain(self, order: DrainPlan) -> None:
        self.all.append(order.plan_id)

    async def _zigzag(self, order: ZigzagAssignment, _stored_s: float) -> None:
        self.all.append(order.pair_id)

    async def _migrate(self, order: MigratePlan, _stored_s: float) -> None:
        self.all.append(order.plan_id)

    async def _mutate(self, order: MutatePlan, _stored_s: float) -> None:
        self.all.append(order.plan_id)

    async def tell(self, order: WorkerOrder, worker_id: str = "w0") -> None:
        self._number += 1
        await self.planner.publish_event(subjects.worker_plans(process(worker_id)), order, message_id=f"{self._number}")

    async def settle(self) -> None:
        """Everything that was told until now has been heard."""
        await self.tell(WorkerOrder(drain=DrainPlan(plan_id=f"end-{self._number}", model="m", targets=(), term=10**9)))
        await eventually(lambda: bool(self.all) and self.all[-1].startswith("end-"))
        self.all = [name for name in self.all if not name.startswith("end-")]


@pytest.fixture
async def heard() -> AsyncIterator[Heard]:
    made = Heard()
    await made.orders.subscribe()
    yield made
    await made.orders.close()


async def test_what_is_for_others_is_not_heard(heard: Heard) -> None:
    await heard.tell(WorkerOrder(scale=plan("mine")))
    await heard.tell(WorkerOrder(scale=plan("theirs")), "w1")
    await heard.planner.publish_event(subjects.scale_plans(), plan("everybody's"), message_id="x")
    await heard.settle()
    assert heard.all == ["mine"]
    assert len(heard.broker.readers) == 1, "one consumer"


async def test_what_was_ordered_from_an_earlier_start_is_not_heard_by_the_next(heard: Heard) -> None:
    for incarnation, name in (("0", "earlier"), (INCARNATION, "mine"), ("2", "later")):
        subject = subjects.worker_plans(Process("w0", incarnation))
        await heard.planner.publish_event(subject, WorkerOrder(scale=plan(name)), message_id=name)
    await heard.settle()
    assert heard.all == ["mine"]


async def test_the_order_of_different_kinds_is_kept(heard: Heard) -> None:
    await heard.tell(WorkerOrder(scale=plan("first")))
    await heard.tell(WorkerOrder(drain=DrainPlan(plan_id="second", model="m", targets=(), term=1)))
    await heard.tell(WorkerOrder(scale=plan("third")))
    await heard.tell(WorkerOrder(mutate=mutation("fourth")))
    await heard.settle()
    assert heard.all == ["first", "second", "third", "fourth"]


async def test_orders_of_an_older_term_are_void_whoever_told_of_the_newer(heard: Heard) -> None:
    await heard.tell(WorkerOrder(scale=plan("of 5", term=5)))
    await heard.tell(WorkerOrder(scale=plan("of 4", term=4)))
    await heard.tell(WorkerOrder(drain=DrainPlan(plan_id="drain of 4", model="m", targets=(), term=4)))
    await heard.tell(WorkerOrder(mutate=mutation("mutation of 4", term=4)))
    await eventually(lambda: bool(heard.all))
    heard.orders.planner_term(7)
    await heard.tell(WorkerOrder(scale=plan("of 6", term=6)))
    await heard.tell(WorkerOrder(scale=plan("of 7", term=7)))
    await heard.settle()
    assert heard.all == ["of 5", "of 7"]


async def test_a_term_that_the_pool_does_not_confirm_voids_nothing_for_long(heard: Heard) -> None:
    heard.orders.planner_term(5)
    await heard.tell(WorkerOrder(drain=DrainPlan(plan_id="forged", model="m", targets=(), term=2**53)))
    await eventually(lambda: heard.all == ["forged"])
    heard.orders.planner_term(5)
    await heard.tell(WorkerOrder(scale=plan("of 5, too early", term=5)))
    await heard.tell(WorkerOrder(scale=plan("of a planner that just won", term=2**53)))
    await eventually(lambda: len(heard.all) == 2)
    heard.orders.planner_term(5)
    heard.orders.planner_term(5)
    await heard.tell(WorkerOrder(scale=plan("of 4", term=4)))
    await heard.tell(WorkerOrder(scale=plan("of 5", term=5)))
    await eventually(lambda: heard.all == ["forged", "of a planner that just won", "of 5"])
