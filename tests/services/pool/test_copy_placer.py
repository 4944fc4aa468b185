"""How copies are loaded in a running pool: so many at a time, each in its turn, beside everything else."""

from __future__ import annotations

import asyncio

import pytest

from services.pool.core.loads import LoadLimits
from shared.messages.copies import HoldCopy
from tests.records import model
from tests.services.pool.running import CopyPool, CopyWorker, running_copy_pool
from tests.wait_until import WAIT_S, eventually


def loading(pool: CopyPool) -> int:
    copies = [c for worker in pool.workers.values() for c in worker.copies.values()]
    return sum(copy.state == "loading" for copy in copies)


def held(pool: CopyPool) -> list[str]:
    return sorted(c.model for w in pool.workers.values() for c in w.copies.values() if c.state == "ready")


async def test_no_more_copies_load_at_a_time_than_may_and_every_model_gets_its_turn(redis_url: str) -> None:
    limits = LoadLimits(total=3, per_host=2)
    async with running_copy_pool(redis_url, loads=limits) as pool:
        for index in range(4):
            worker = await pool.worker(f"w{index}")
            worker.may_load.clear()
        names = [f"m{index:02}" for index in range(10)]
        for name in names:
            await pool.add_model(model(name))
        most = most_of_one = 0
        in_turn = "waits its turn: 3 copies are being loaded"

        async def others_wait() -> bool:
            reasons = [entry.reason for entry in (await pool.snapshot()).unplaced]
            return loading(pool) == 3 and in_turn in reasons

        await eventually(others_wait)
        for worker in pool.workers.values():
            worker.may_load.set()
        async with asyncio.timeout(WAIT_S):
            while held(pool) != names:
                most = max(most, loading(pool))
                of_each = [sum(c.state == "loading" for c in w.copies.values()) for w in pool.workers.values()]
                most_of_one = max(most_of_one, *of_each)
                await asyncio.sleep(0.01)
        assert (most, most_of_one <= 2) == (3, True)

        async def nothing_waits() -> bool:
            unplaced = (await pool.snapshot()).unplaced
            return not (unplaced or pool.metrics.get_sample_value("blitz_pool_loading_copies"))

        await eventually(nothing_waits)


async def test_a_refusal_gives_its_turn_to_the_next_model(redis_url: str) -> None:
    async with running_copy_pool(redis_url, loads=LoadLimits(total=1)) as pool:
        worker = Picky(pool, "w0")
        pool.workers["w0"] = worker
        await worker.start()
        for name in ("a", "b", "c"):
            await pool.add_model(model(name))
        await eventually(lambda: held(pool) == ["b", "c"])
        assert [request.model.name for request in worker.holds][:1] == ["a"]


class Picky(CopyWorker):
    """Refuses model ``a``."""

    async def _on_hold(self, request: HoldCopy) -> object:  # type: ignore[override]
        self.obedient = request.model.name != "a"
        return await super()._on_hold(request)


async def test_looks_are_measured(redis_url: str) -> None:
    async with running_copy_pool(redis_url) as pool:
        await eventually(lambda: pool.metrics.get_sample_value("blitz_pool_placement_seconds_count"))


async def test_a_hold_that_could_not_be_numbered_is_decided_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis fails between the decision and its being sent: it is not outstanding, and the worker not blamed."""
    from redis.exceptions import ConnectionError as RedisConnectionError

    from services.pool.store import Store

    numbered = Store.next_epoch
    failures = 0

    async def failing(store: Store) -> int:
        nonlocal failures
        if failures < 2:
            failures += 1
            raise RedisConnectionError("gone")
        return await numbered(store)

    async with running_copy_pool(redis_url, loads=LoadLimits(total=2)) as pool:
        monkeypatch.setattr(Store, "next_epoch", failing)
        await pool.worker("w0")
        for name in ("a", "b"):
            await pool.add_model(model(name))
        await eventually(lambda: held(pool) == ["a", "b"])
        assert failures == 2


async def test_a_pool_that_knows_many_workers_answers_between_learning_of_them(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it learns, and decides, is cut into pieces; copies are placed all the same."""
    monkeypatch.setattr("services.pool.copy_placer.AT_ONCE", 2)
    async with running_copy_pool(redis_url) as pool:
        for index in range(15):
            await pool.worker(f"w{index:02}")
        names = [f"m{index:02}" for index in range(15)]
        for name in names:
            await pool.add_model(model(name))
        await eventually(lambda: held(pool) == names)
        assert {len(worker.copies) for worker in pool.workers.values()} == {1}
