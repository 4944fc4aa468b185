"""Requests that are computed, decoded elsewhere, moved and cancelled at random, over engines that compute later than
they are called, on a clock that is moved."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter

import pytest

# isort: off
from tests.moved_clock import moved_time  # before the product, which keeps ``time.monotonic``
# isort: on

from services.worker.device.late import LateOrder
from services.worker.kv_transfer.migration import Migrator
from shared.messages.destinations import Destination
from shared.messages.generation import DecodePlace
from shared.messages.plans import MigratePlan
from tests.processes import INCARNATION
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.live.members import NUM_LAYERS
from tests.services.worker.live.turns import TurnLoop
from tests.services.worker.live.twin import MODEL, TwinGateway, TwinWorker
from tests.services.worker.live.wire import Wire
from tests.wait_until import WAIT_S, eventually

ORDERS: tuple[LateOrder, ...] = ("copies_first", "copies_last", "drawn")
NUM_SEEDS = int(os.environ.get("LATE_MOVE_SEEDS", "3"))
"""Of each order."""
NUM_REQUESTS = 14
NUM_BLOCKS = 48
"""Of an instance: requests wait for blocks, and are preempted."""
CHUNK_TOKENS = 24
PLAN_S = 10.0
PAUSE_S = 0.0, 0.03


class Crowd:
    """Three workers that serve one model, and what happens to them."""

    def __init__(self, seed: int, order: LateOrder) -> None:
        self._random = random.Random(seed)
        names = ("w0", "w1", "w9")
        self._wire = Wire(seed, names)
        self.workers = [
            TwinWorker(
                *(self._wire, name),
                role="colocated",
                epoch=epoch,
                num_blocks=NUM_BLOCKS,
                chunk_tokens=CHUNK_TOKENS,
                silence_s=5.0,
                late=order,
                seed=seed,
            )
            for epoch, name in enumerate(names, start=1)
        ]
        self._migrators = [
            Migrator(w.bus, w.worker_id, w.departures, w.slot.current, w.kv_receiver.begun_at_s) for w in self.workers
        ]
        self._gateway = TwinGateway(self._wire.broker)
        self._requests: dict[str, tuple[tuple[int, ...], int]] = {}
        self._cancelled: set[str] = set()
        self.counts: Counter[str] = Counter()
        """What happened."""

    async def run(self) -> None:
        try:
            await self._gateway.start()
            for worker in self.workers:
                await worker.start()
                await worker.load([0.0] * (NUM_LAYERS + 1))
            for number in range(NUM_REQUESTS):
                await self._submit(f"r{number}")
                for _ in range(self._random.randrange(3)):
                    await asyncio.sleep(self._random.uniform(*PAUSE_S))
                    await self._random.choice([self._move, self._move, self._cancel])()
            async with asyncio.timeout(WAIT_S):
                await self._ends()
            for worker in self.workers:
                await worker.clean()
        finally:
            for migrator in self._migrators:
                await migrator.close()
            for worker in self.workers:
                await worker.close()
            await self._gateway.bus.close()

    async def _submit(self, name: str) -> None:
        worker, decoder = self._random.sample(self.workers, 2)
        prompt = tuple(32 + self._random.randrange(95) for _ in range(self._random.randint(5, 60)))
        self._requests[name] = prompt, self._random.randint(2, 60)
        place = DecodePlace(
            worker_id=decoder.worker_id, incarnation=INCARNATION, instance_id=decoder.instance.instance_id
        )
        await self._gateway.submit(
            *(worker.worker_id, worker.instance.instance_id, name),
            prompt=prompt,
            max_tokens=self._requests[name][1],
            decode_at=place if self._random.random() < 0.4 else None,
        )

    async def _move(self) -> None:
        """The planner wants some requests to go from one to another."""
        here, there = self._random.sample(range(len(self.workers)), 2)
        target = self.workers[there]
        plan = MigratePlan(
            plan_id=f"plan-{self.counts['plans']}",
            model=MODEL.name,
            worker_id=self.workers[here].worker_id,
            incarnation=INCARNATION,
            instance_id=self.workers[here].instance.instance_id,
            destinations=(
                Destination(
                    worker_id=target.worker_id,
                    incarnation=INCARNATION,
                    instance_id=target.instance.instance_id,
                    kv_tokens=1 << 20,
                ),
            ),
            valid_s=PLAN_S,
            for_head=False,
            term=1,
        )
        self.counts["plans"] += 1
        await self._migrators[here].on_migrate_plan(plan, time.monotonic())

    async def _cancel(self) -> None:
        name = self._random.choice(sorted(self._requests))
        self._cancelled.add(name)
        for worker in self.workers:  # whoever has it now
            await self._gateway.cancel(worker.worker_id, name)

    async def _ends(self) -> None:
        for name, (prompt, max_tokens) in self._requests.items():
            whole = expected_tokens(max_tokens, prompt)
            if name not in self._cancelled:
                end = await self._gateway.end_of(name)
                assert end.finish_reason == "length", end
                assert self._gateway.tokens(name, repeats=True) == whole
            elif (name, 1) in self._gateway.parts:
                tokens = self._gateway.tokens(name, repeats=True)
                assert tokens == whole[: len(tokens)]
        self.counts += Counter(
            f"said by {len({b.worker_id for b in self._gateway.batches for p in b.parts if p.request_id == name})}"
            for name in self._requests
        )
        for worker in self.workers:
            await eventually(lambda worker=worker: not worker.departures.transfers)
            self.counts["most in flight"] = max(self.counts["most in flight"], worker.late.most_in_flight)


def run(seed: int, order: LateOrder) -> Counter[str]:
    """One, and what happened in it."""
    random.seed(seed)

    async def whole() -> Counter[str]:
        crowd = Crowd(seed, order)
        await crowd.run()
        return crowd.counts

    with moved_time(), asyncio.Runner(loop_factory=TurnLoop) as runner:
        return runner.run(whole())


@pytest.mark.parametrize("order", ORDERS)
def test_whatever_moves_each_token_comes_once_and_every_block_is_free(order: LateOrder) -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        counts += run(seed, order)
    assert counts["said by 2"] > NUM_SEEDS, "hardly anything moved"
