"""A worker hears what is for it alone, from the planner that leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.worker import orders as orders_module
from services.worker.orders import Orders
from shared import subjects
from shared.errors import Unavailable
from shared.messages.live import WorkerOrder, ZigzagAssignment
from shared.messages.plans import DrainPlan, MigratePlan, MutatePlan, ScalePlan
from tests.records import model
from tests.services.waiting import eventually
from tests.shared.bus.memory import MemoryBroker


def plan(plan_id: str, term: int = 0) -> ScalePlan:
    return ScalePlan(
        plan_id=plan_id,
        model=model("m"),
        role="colocated",
        members=(),
        chains=(),
        triggered_at_s=0.0,
        planned_at_s=0.0,
        expires_at_s=9e9,
        term=term,
    )


def mutation(plan_id: str, term: int = 0) -> MutatePlan:
    return MutatePlan(
        plan_id=plan_id, model="m", targets=(), role="decode", planned_at_s=0.0, expires_at_s=9e9, term=term
    )


class Heard:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.planner = self.broker.bus("planner")
        self.all: list[str] = []
        self.bus = self.broker.bus("w0")
        self.orders = Orders(self.bus, "w0", self._scale, self._drain, self._zigzag, self._mutate, self._migrate)
        self._number = 0

    async def _scale(self, order: ScalePlan) -> None:
        self.all.append(order.plan_id)

    async def _drain(self, order: DrainPlan) -> None:
        self.all.append(order.plan_id)

    async def _zigzag(self, order: ZigzagAssignment) -> None:
        self.all.append(order.pair_id)

    async def _migrate(self, order: MigratePlan) -> None:
        self.all.append(order.plan_id)

    async def _mutate(self, order: MutatePlan) -> None:
        self.all.append(order.plan_id)

    async def tell(self, order: WorkerOrder, worker_id: str = "w0") -> None:
        self._number += 1
        await self.planner.publish_event(subjects.worker_plans(worker_id), order, message_id=f"{self._number}")

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


async def test_the_order_of_different_kinds_is_kept(heard: Heard) -> None:
    await heard.tell(WorkerOrder(scale=plan("first")))
    await heard.tell(WorkerOrder(drain=DrainPlan(plan_id="second", model="m", targets=())))
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
    await heard.orders.planner_term(7)
    await heard.tell(WorkerOrder(scale=plan("of 6", term=6)))
    await heard.tell(WorkerOrder(scale=plan("of 7", term=7)))
    await heard.settle()
    assert heard.all == ["of 5", "of 7"]


async def test_a_term_that_the_pool_does_not_confirm_voids_nothing_for_long(heard: Heard) -> None:
    await heard.orders.planner_term(5)
    await heard.tell(WorkerOrder(drain=DrainPlan(plan_id="forged", model="m", targets=(), term=2**53)))
    await eventually(lambda: heard.all == ["forged"])
    await heard.orders.planner_term(5)
    await heard.tell(WorkerOrder(scale=plan("of 5, too early", term=5)))
    await heard.tell(WorkerOrder(scale=plan("of a planner that just won", term=2**53)))
    await eventually(lambda: len(heard.all) == 2)
    await heard.orders.planner_term(5)
    await heard.orders.planner_term(5)
    await heard.tell(WorkerOrder(scale=plan("of 4", term=4)))
    await heard.tell(WorkerOrder(scale=plan("of 5", term=5)))
    await eventually(lambda: heard.all == ["forged", "of a planner that just won", "of 5"])


async def test_where_planners_know_no_terms_everybodys_plans_are_heard_until_one_does(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders_module, "NO_TERM_S", 0.05)
    await heard.orders.planner_term(0)
    assert len(heard.broker.readers) == 1, "a planner may just be starting"
    await asyncio.sleep(0.06)
    await heard.orders.planner_term(0)
    await heard.planner.publish_event(subjects.scale_plans(), plan("everybody's"), message_id="x")
    await eventually(lambda: heard.all == ["everybody's"])
    await heard.orders.planner_term(3)
    assert len(heard.broker.readers) == 1


async def test_plans_for_everybody_that_can_be_heard_in_part_only_are_not_heard_and_tried_again(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders_module, "NO_TERM_S", 0.0)
    bus = heard.bus
    real, refused = bus.subscribe_events, True

    async def subscribe_events(subject: str, kind: type, listener: object) -> object:
        if refused and kind is ZigzagAssignment:
            raise Unavailable("JetStream does not answer")
        return await real(subject, kind, listener)  # type: ignore[arg-type]

    monkeypatch.setattr(bus, "subscribe_events", subscribe_events)
    for _ in range(3):
        await heard.orders.planner_term(0)
        assert len(heard.broker.readers) == 1, "the worker's own alone"
    refused = False
    await heard.orders.planner_term(0)
    assert len(heard.broker.readers) == 4
    await heard.planner.publish_event(subjects.scale_plans(), plan("everybody's"), message_id="x")
    await eventually(lambda: heard.all == ["everybody's"])
