from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from shared.errors import Conflict, SentBack, Unavailable
from shared.messages.registry import ModelRecord, Snapshot
from tests.records import model
from tests.services.pool.host_copies import copy_of
from tests.services.pool.running import LEASE_S, CopyPool, running_copy_pool
from tests.wait_until import eventually

M = model("m")


@pytest.fixture
async def pool(redis_url: str) -> AsyncIterator[CopyPool]:
    """A pool of which no worker falls silent for too long, however busy the machine is."""
    async with running_copy_pool(redis_url) as running:
        yield running


@pytest.fixture
async def strict_pool(redis_url: str) -> AsyncIterator[CopyPool]:
    """A pool that soon takes silent workers for dead."""
    async with running_copy_pool(redis_url, lease_s=LEASE_S) as running:
        yield running


def placed(snapshot: Snapshot) -> list[tuple[str, str, str]]:
    return [(w.worker.worker_id, c.model, c.state) for w in snapshot.workers for c in w.host_copies]


async def eventually_placed(pool: CopyPool, *expected: tuple[str, str, str]) -> None:
    async def are_there() -> bool:
        return placed(await pool.snapshot()) == [*expected]

    await eventually(are_there)


def gauge(pool: CopyPool, name: str, **labels: str) -> float | None:
    return pool.metrics.get_sample_value(name, labels)


# --- placement ---------------------------------------------------------------------------------


async def test_a_registered_model_gets_one_host_copy_from_disk(pool: CopyPool) -> None:
    workers = [await pool.worker("w0"), await pool.worker("w1")]
    await pool.add_model(M)
    await eventually_placed(pool, ("w0", "m", "ready"))
    await asyncio.sleep(1.2)
    assert placed(await pool.snapshot()) == [("w0", "m", "ready")]
    [request] = workers[0].holds
    assert (request.model, request.sources) == (M, ())
    assert request.epoch > 0
    assert workers[1].holds == []
    assert gauge(pool, "blitz_pool_host_copy_bytes", host="host-w0") == M.weights_bytes
    assert gauge(pool, "blitz_pool_models_without_copy") == 0
    assert (await pool.snapshot()).unplaced == ()


async def test_a_lost_host_copy_comes_from_a_peer_and_from_disk_when_there_is_none(
    strict_pool: CopyPool,
) -> None:
    pool = strict_pool
    first = await pool.worker("w0")
    await pool.add_model(M)
    await eventually(lambda: bool(first.copies))
    serving = await pool.worker("w1", serves=M, capacity=1)
    spare = await pool.worker("w2")
    await first.die()
    await eventually(lambda: bool(spare.copies))
    assert [(s.worker_id, s.kind, s.transport_address) for s in spare.holds[0].sources] == [("w1", "gpu", b"w1")]
    assert spare.holds[0].epoch > first.holds[0].epoch
    # Now every copy goes.
    await serving.die()
    await eventually(lambda: gauge(pool, "blitz_pool_workers", state="serving") == 0)
    last = await pool.worker("w3")
    await spare.die()
    await eventually(lambda: bool(last.copies))
    assert last.holds[0].sources == ()


async def test_a_worker_that_refuses_is_passed_over(pool: CopyPool) -> None:
    deaf = await pool.worker("w0", obedient=False)
    able = await pool.worker("w1")
    await pool.add_model(M)
    await eventually(lambda: bool(able.copies))
    assert len(deaf.holds) == 1


async def test_a_worker_that_says_that_it_stops_counts_as_leaving_and_nobody_is_warned(
    pool: CopyPool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await pool.worker("w0", obedient=False)
    worker.refuses_with = SentBack("worker w0 stops")
    with caplog.at_level(logging.INFO):
        await pool.add_model(M)
        await eventually(lambda: "every worker that offers host memory stops" in caplog.text)
    assert "worker w0 stops" in caplog.text
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record for record in warned if record.name == "services.pool.copy_placer"] == []
    able = await pool.worker("w1")
    await eventually(lambda: bool(able.copies))
    assert len(worker.holds) == 1


async def test_a_worker_that_does_not_answer_does_not_hold_up_the_others(pool: CopyPool) -> None:
    silent = await pool.worker("w0")
    silent.bus.go_down()
    able = await pool.worker("w1")
    await pool.add_model(M)
    await eventually(lambda: bool(able.copies))


async def test_copies_of_a_removed_model_are_dropped_though_they_are_the_last(pool: CopyPool) -> None:
    worker = await pool.worker("w0")
    await pool.add_model(M)
    await eventually(lambda: bool(worker.copies))
    await pool.remove_model("m")
    await eventually(lambda: not worker.copies)
    assert worker.refused == []


async def test_a_surplus_copy_is_dropped_and_the_other_stays(pool: CopyPool) -> None:
    await pool.add_model(M)
    workers = [await pool.worker("w0", obedient=False), await pool.worker("w1", obedient=False)]
    await asyncio.gather(*(worker.hold(M) for worker in workers))
    await eventually(lambda: sum(len(w.copies) for w in workers) == 1)
    await asyncio.sleep(1.2)
    assert [len(w.copies) for w in workers] == [1, 0]
    assert [len(w.drops) for w in workers] == [0, 1]


async def test_a_model_that_fits_nowhere_is_named_with_the_reason(pool: CopyPool) -> None:
    await pool.worker("w0", capacity=1)
    await pool.add_model(M)

    async def is_named() -> bool:
        return bool((await pool.snapshot()).unplaced)

    await eventually(is_named)
    unplaced = (await pool.snapshot()).unplaced
    assert (unplaced[0].model, unplaced[0].model_hash) == ("m", M.model_hash)
    assert f"needs {M.weights_bytes} bytes" in unplaced[0].reason
    await eventually(lambda: gauge(pool, "blitz_pool_models_without_copy") == 1)


async def test_a_started_pool_places_nothing_until_every_worker_had_time_to_report(redis_url: str) -> None:
    async with running_copy_pool(redis_url) as before:
        holder = await before.worker("w0")
        await before.add_model(M)
        await eventually(lambda: bool(holder.copies))
    async with running_copy_pool(redis_url, lease_s=8 * LEASE_S, first=False) as after:
        # The holder's connection comes back late.
        await after.add_model(M)
        other = await after.worker("w1")
        await asyncio.sleep(LEASE_S)
        assert isinstance(await after.retire("w1", M), Unavailable)
        back = await after.worker("w0")
        await back.hold(M)
        await asyncio.sleep(8 * LEASE_S + 1.0)
        assert other.holds == []
        assert back.drops == []


async def test_models_of_host_copies_come_back_to_an_emptied_redis(pool: CopyPool) -> None:
    worker = await pool.worker("w0")
    await worker.hold(M)

    async def is_back() -> bool:
        return (await pool.snapshot()).models == (M,)

    await eventually(is_back)
    assert worker.restored > 0
    await asyncio.sleep(1.2)
    assert (await pool.snapshot()).models == (M,)
    assert worker.drops == []
    assert isinstance(await pool.retire("w0", M), Conflict)


# --- retiring ----------------------------------------------------------------------------------


async def test_two_workers_cannot_both_retire_the_last_two_copies(pool: CopyPool) -> None:
    for index in range(10):
        record = model(f"m{index}")
        await pool.add_model(record)
        pair = (f"a{index}", f"b{index}")
        for worker_id in pair:
            await pool.worker(worker_id, serves=record, obedient=False)
        answers = await asyncio.gather(*(pool.retire(worker_id, record, gpu=True) for worker_id in pair))
        assert [type(answer) for answer in answers if answer] == [Conflict]


async def test_a_gpu_copy_may_go_while_a_host_copy_stays_and_the_other_way_round(pool: CopyPool) -> None:
    await pool.add_model(M)
    await pool.worker("w0", serves=M, obedient=False)
    assert isinstance(await pool.retire("w0", M, gpu=True), Conflict)
    host = await pool.worker("w1", obedient=False)
    await host.hold(M)
    assert await pool.retire("w0", M, gpu=True) is None
    assert await pool.retire("w0", M, gpu=True) is None  # asked again: the answer was lost
    assert isinstance(await pool.retire("w1", M), Conflict)
    assert await pool.retire("w0", M, gpu=True, undo=True) is None
    assert await pool.retire("w1", M) is None


async def test_a_report_does_not_bring_a_retired_copy_back(pool: CopyPool) -> None:
    await pool.add_model(M)
    workers = [await pool.worker("w0", serves=M, obedient=False), await pool.worker("w1", serves=M, capacity=0)]
    assert await pool.retire("w0", M, gpu=True) is None
    await asyncio.gather(*(w.beat() for w in workers))
    assert isinstance(await pool.retire("w1", M, gpu=True), Conflict)


async def test_an_instance_that_serves_after_all_counts_again_though_nobody_said_so(pool: CopyPool) -> None:
    await pool.add_model(M)
    one = await pool.worker("w0", serves=M, obedient=False)
    await pool.worker("w1", serves=M, obedient=False)
    assert await pool.retire("w0", M, gpu=True) is None
    assert isinstance(await pool.retire("w1", M, gpu=True), Conflict)
    one.state = "serving"
    await one.beat()
    assert await pool.retire("w1", M, gpu=True) is None


async def test_one_that_serves_on_gives_its_copy_up_where_there_is_another_and_never_the_last(pool: CopyPool) -> None:
    await pool.add_model(M)
    one = await pool.worker("w0", serves=M, obedient=False, capacity=0)
    two = await pool.worker("w1", serves=M, obedient=False, capacity=0)
    assert await pool.retire("w0", M, gpu=True, stays=True) is None
    await one.beat()  # a report of the moment before it is gone
    assert isinstance(await pool.retire("w1", M, gpu=True, stays=True), Conflict), "no memory has another, nor room"
    one.copy_is = "gone"
    await one.beat()
    assert isinstance(await pool.retire("w1", M, gpu=True, stays=True), Conflict)
    two.copy_is = "there"
    await two.beat()
    one.copy_is = "there"  # it could not, after all
    await one.beat()
    assert await pool.retire("w1", M, gpu=True, stays=True) is None


async def test_a_host_copy_that_is_held_again_counts_again(pool: CopyPool) -> None:
    await pool.add_model(M)
    one, two = await pool.worker("w0", obedient=False), await pool.worker("w1", obedient=False)
    await one.hold(M, cached=True)
    await two.hold(M, cached=True)
    assert await pool.retire("w0", M) is None
    await one.beat()
    assert isinstance(await pool.retire("w1", M), Conflict)
    one.copies[M.model_hash] = copy_of(M, cached=True, serial=2)
    await one.beat()
    assert await pool.retire("w1", M) is None


async def test_incomplete_and_dead_copies_confirm_nothing(strict_pool: CopyPool) -> None:
    pool = strict_pool
    await pool.add_model(M)
    await pool.worker("w0", serves=M, obedient=False)
    loading = await pool.worker("w1", obedient=False)
    loading.copies[M.model_hash] = copy_of(M, "loading")
    await loading.beat()
    assert isinstance(await pool.retire("w0", M, gpu=True), Conflict)
    other = await pool.worker("w2", serves=M, obedient=False)
    await other.die()

    async def is_forgotten() -> bool:
        return "w2" not in [w.worker.worker_id for w in (await pool.snapshot()).workers]

    await eventually(is_forgotten)
    assert isinstance(await pool.retire("w0", M, gpu=True), Conflict)


async def test_a_copy_of_a_removed_model_may_go(pool: CopyPool) -> None:
    await pool.add_model(M)
    await pool.worker("w0", serves=M, obedient=False)
    await pool.remove_model("m")
    assert await pool.retire("w0", M, gpu=True) is None


async def test_a_copy_of_a_model_that_the_registry_lost_must_stay(pool: CopyPool) -> None:
    await pool.worker("w0", serves=M, obedient=False)
    assert isinstance(await pool.retire("w0", M, gpu=True), Conflict)


async def test_a_worker_that_stops_gets_rid_of_its_last_copy_once_another_has_it(pool: CopyPool) -> None:
    await pool.worker("w0")
    await pool.add_model(M)
    await eventually_placed(pool, ("w0", "m", "ready"))
    heir = await pool.worker("w1")
    assert isinstance(await pool.retire("w0", M), Conflict)

    async def may_go() -> bool:
        return await pool.retire("w0", M) is None

    await eventually(may_go)
    assert heir.copies[M.model_hash].state == "ready"
    assert [(s.worker_id, s.kind) for s in heir.holds[0].sources] == [("w0", "host")]


async def test_without_any_host_memory_no_copy_is_the_last(pool: CopyPool) -> None:
    await pool.add_model(M)
    await pool.worker("w0", serves=M, capacity=0)
    assert await pool.retire("w0", M, gpu=True) is None


async def test_a_gpu_copy_that_no_host_memory_could_ever_hold_may_go(pool: CopyPool) -> None:
    await pool.add_model(M)
    await pool.worker("w0", serves=M, capacity=M.weights_bytes - 1)
    assert await pool.retire("w0", M, gpu=True) is None
    large = await pool.worker("w1", serves=M, capacity=M.weights_bytes, obedient=False)
    assert isinstance(await pool.retire("w1", M, gpu=True), Conflict)
    await large.die()


# --- workers that stop ---------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [False, True])
async def test_the_last_copy_of_a_worker_that_stops_goes_once_another_worker_has_it(pool: CopyPool, gpu: bool) -> None:
    stopping = await pool.worker("w0", serves=M if gpu else None, obedient=not gpu)
    heir = await pool.worker("w1", obedient=gpu)
    heir.may_load.clear()
    await pool.add_model(M)
    if not gpu:
        await stopping.hold(M)
        heir.obedient = True
    refusal = await pool.retire("w0", M, gpu=gpu, leaving=True)
    assert isinstance(refusal, Conflict)
    heir.may_load.set()

    async def may_go() -> bool:
        return await pool.retire("w0", M, gpu=gpu, leaving=True) is None

    await eventually(may_go)
    assert heir.copies[M.model_hash].state == "ready"
    assert [(s.worker_id, s.kind) for s in heir.holds[0].sources] == [("w0", "gpu" if gpu else "host")]


async def test_the_last_copy_goes_with_a_worker_that_nobody_can_replace(pool: CopyPool) -> None:
    worker = await pool.worker("w0")
    await pool.worker("w1", capacity=M.weights_bytes - 1)
    await pool.add_model(M)
    await eventually(lambda: bool(worker.copies) and worker.copies[M.model_hash].state == "ready")
    assert isinstance(await pool.retire("w0", M), Conflict)
    assert await pool.retire("w0", M, leaving=True) is None


async def test_workers_that_stop_together_do_not_wait_for_each_other(pool: CopyPool) -> None:
    records = [model("a"), model("b")]
    workers = [await pool.worker(f"w{i}", obedient=False) for i in range(2)]
    for record, worker in zip(records, workers, strict=True):
        await pool.add_model(record)
        await worker.hold(record)

    async def leave(worker_id: str, record: ModelRecord) -> None:
        """Within a second, if nothing holds this process up."""
        for _ in range(4):
            if await pool.retire(worker_id, record, leaving=True) is None:
                return
            await asyncio.sleep(0.3)
        pytest.fail(f"{worker_id} waits")

    await asyncio.gather(*(leave(f"w{i}", record) for i, record in enumerate(records)))


async def test_a_worker_that_stops_gets_no_new_copy(pool: CopyPool) -> None:
    stopping = await pool.worker("w0", serves=M)
    await pool.worker("w1", capacity=1)
    assert await pool.retire("w0", model("other"), leaving=True) is not None
    await pool.add_model(M)
    await asyncio.sleep(1.5)
    assert stopping.holds == []


# --- faults of ours ------------------------------------------------------------------------------


async def test_a_decision_that_breaks_does_not_end_the_registry(
    pool: CopyPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("unheard of")

    with monkeypatch.context() as patch:
        patch.setattr("services.pool.core.placement.Placer.look", broken)
        worker = await pool.worker("w0")
        await pool.add_model(M)
        await eventually(lambda: "unheard of" in caplog.text)
    await eventually(lambda: bool(worker.copies))
