"""Copies in host memory, as the pool places them and as the host-cache baseline keeps them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.host_copies import HostCopies
from services.worker.weights.mover import WeightMover
from shared import subjects
from shared.errors import BadCheckpoint, Conflict, NoCapacity, NotFound, SentBack, Unavailable
from shared.layout import layout_of
from shared.messages.common import Ack
from shared.messages.copies import CanRead, CopySource, DropCopy, HoldCopy
from shared.messages.plans import Stripe
from shared.messages.registry import HeartbeatAck, HostCopy
from tests.processes import INCARNATION, process
from tests.records import digests_of_zeros
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.lone_worker import LoneWorker, lone_worker, model_record
from tests.services.workers import MIB
from tests.wait_until import WAIT_S, eventually

FROM_HOST = Stripe(source="w0", source_kind="host", target="w0")


@pytest.fixture
async def holder() -> AsyncIterator[LoneWorker]:
    """A worker that offers host memory."""
    async with lone_worker(host_cache_bytes=4 * MIB) as alone:
        yield alone


async def hold(alone: LoneWorker, *sources: CopySource, epoch: int = 1000) -> None:
    request = HoldCopy(model=alone.model, epoch=epoch, sources=sources)
    await alone.planner.request(subjects.worker_hold_copy(process("w0")), request, Ack, timeout_s=60)


def inside(alone: LoneWorker) -> HostCopies:
    return alone.worker.service.parts.host_copies


async def drop(alone: LoneWorker) -> None:
    request = DropCopy(model_hash=alone.model.model_hash)
    await alone.planner.request(subjects.worker_drop_copy(process("w0")), request, Ack, timeout_s=60)


def copies(alone: LoneWorker) -> tuple[HostCopy, ...]:
    return alone.pool.heartbeats[-1].host_copies


async def held(alone: LoneWorker) -> None:
    await eventually(lambda: [c.state for c in copies(alone)] == ["ready"])


async def test_a_placed_copy_is_read_from_disk_and_gives_the_next_instance_its_weights(holder: LoneWorker) -> None:
    await hold(holder)
    await held(holder)
    (copy,) = copies(holder)
    assert (copy.model, copy.num_bytes, copy.cached) == ("m", holder.model.weights_bytes, False)
    gone = msgspec.structs.replace(holder.model, path="/gone")
    plan = holder.plan(epoch=10, model=gone, stripe=FROM_HOST)
    await holder.publish(plan)
    await holder.reported(plan.plan_id, "serving")
    instance_id = plan.members[0].instance_id
    await holder.submit(instance_id, "r")
    await holder.gateway.end_of("r")
    assert holder.gateway.tokens("r") == expected_tokens(8)


async def test_a_worker_says_whether_it_can_read_a_model_from_its_disk(holder: LoneWorker) -> None:
    async def ask(**changes: str) -> Ack:
        question = CanRead(model=msgspec.structs.replace(holder.model, **changes))
        return await holder.planner.request(subjects.worker_can_read(process("w0")), question, Ack, timeout_s=60)

    assert await ask() == Ack()
    with pytest.raises(BadCheckpoint):
        await ask(path="/gone")
    with pytest.raises(Conflict, match="layout"):
        await ask(layout_hash="of another version")


async def test_a_copy_comes_from_the_instance_of_the_same_process(holder: LoneWorker) -> None:
    await holder.serve()
    source = CopySource(worker_id="w0", incarnation=INCARNATION, host="host-of-w0", transport_address=b"", kind="gpu")
    holder.model = msgspec.structs.replace(holder.model, path="/gone")
    await hold(holder, source)
    await held(holder)


async def test_where_a_copy_comes_from_is_reported_while_it_loads(holder: LoneWorker) -> None:
    # No report is late because an answer to the one before it was.
    holder.pool.ack = HeartbeatAck(lease_s=60.0, planner_term=1)
    assert await holder.worker.service.parts.registration.confirmed(WAIT_S)
    source = CopySource(
        worker_id="w9", incarnation=INCARNATION, host="host-of-w9", transport_address=b"nobody", kind="host"
    )
    await hold(holder, source)
    await held(holder)  # from disk, in the end
    said = [(c.state, c.source) for beat in holder.pool.heartbeats for c in beat.host_copies]
    assert ("loading", "w9") in said
    assert said[-1] == ("ready", "")


async def test_a_copy_asked_for_twice_is_loaded_once(holder: LoneWorker) -> None:
    await asyncio.gather(hold(holder), hold(holder))
    await held(holder)
    await hold(holder)
    assert len(copies(holder)) == 1


async def test_a_copy_that_does_not_fit_is_refused(alone: LoneWorker) -> None:
    with pytest.raises(NoCapacity):
        await hold(alone)
    assert copies(alone) == ()


async def test_a_copy_that_cannot_be_loaded_is_given_up(holder: LoneWorker) -> None:
    good = holder.model
    holder.model = msgspec.structs.replace(good, path="/gone")
    await hold(holder)
    await eventually(lambda: not holder.worker.service.parts.store.report())
    await eventually(lambda: copies(holder) == ())
    holder.model = good
    await hold(holder, epoch=1001)
    await held(holder)


async def test_a_dropped_copy_goes_only_if_the_pool_agrees(holder: LoneWorker) -> None:
    with pytest.raises(NotFound):
        await drop(holder)
    await hold(holder)
    await held(holder)
    holder.pool.retire_error = Conflict("the last copy")
    await drop(holder)
    await eventually(lambda: len(holder.pool.retired) == 1)
    await held(holder)
    holder.pool.retire_error = None
    await drop(holder)
    await eventually(lambda: copies(holder) == ())
    assert [(r.kind, r.model) for r in holder.pool.retired] == [("host", "m")] * 2


async def test_a_registry_that_lost_the_model_gets_it_back_from_a_host_copy(holder: LoneWorker) -> None:
    await hold(holder)
    await held(holder)
    holder.pool.ack = HeartbeatAck(lease_s=0.3, wants_models=(holder.model.model_hash,), planner_term=1)
    await eventually(lambda: holder.pool.restored)
    assert holder.pool.restored[0] == holder.model


async def test_a_plan_may_let_its_target_keep_a_copy_until_the_pool_drops_it(holder: LoneWorker) -> None:
    plan = holder.plan(epoch=10, keep_on_host=True, keepers=("w0", "w9"))
    await holder.publish(plan)
    await holder.reported(plan.plan_id, "serving")
    await eventually(lambda: [(c.state, c.cached) for c in copies(holder)] == [("ready", True)])
    await drop(holder)
    await eventually(lambda: copies(holder) == ())
    assert holder.pool.retired[-1].kind == "host", "the pool is asked here, too"


async def test_of_several_targets_only_those_named_keep_a_copy(holder: LoneWorker) -> None:
    plan = holder.plan(epoch=10, keep_on_host=True, keepers=("w9",))
    await holder.publish(plan)
    await holder.reported(plan.plan_id, "serving")
    await hold(holder)
    await held(holder)
    assert not any(copy.cached for beat in holder.pool.heartbeats for copy in beat.host_copies)


async def test_a_target_without_host_memory_serves_all_the_same(alone: LoneWorker) -> None:
    plan = alone.plan(epoch=10, keep_on_host=True)
    await alone.publish(plan)
    await alone.reported(plan.plan_id, "serving")
    assert copies(alone) == ()


# --- fills ---------------------------------------------------------------------------------------


async def test_a_copy_that_is_being_cached_and_is_placed_meanwhile_is_filled_once(
    holder: LoneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_too = threading.Event()
    copy_unit = WeightCopy.copy_unit

    def slow(self: WeightCopy, unit: int, source: WeightCopy) -> bool:
        assert held_too.wait(WAIT_S)
        return copy_unit(self, unit, source)

    monkeypatch.setattr(WeightCopy, "copy_unit", slow)
    plan = holder.plan(epoch=10, keep_on_host=True)
    await holder.publish(plan)
    try:
        await eventually(lambda: [c.state for c in copies(holder)] == ["loading"])
        holder.model = msgspec.structs.replace(holder.model, path="/gone")  # a second fill would fail
        await hold(holder)
    finally:
        held_too.set()
    await eventually(lambda: [(c.state, c.cached) for c in copies(holder)] == [("ready", False)])
    await drop(holder)
    await eventually(lambda: copies(holder) == ())


async def test_a_copy_that_a_hold_fills_is_not_cached_on_top(
    holder: LoneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = asyncio.Event()
    fill_host = WeightMover.fill_host

    async def slow(*args: Any) -> None:
        await filled.wait()
        await fill_host(*args)

    monkeypatch.setattr(WeightMover, "fill_host", slow)
    await holder.serve()
    await hold(holder)
    await inside(holder).keep(holder.worker.serving)
    assert [c.state for c in holder.worker.service.parts.store.report()] == ["loading"]
    filled.set()
    await held(holder)
    await drop(holder)
    await eventually(lambda: copies(holder) == ())


async def test_a_fill_that_breaks_in_an_unheard_of_way_frees_its_copy(
    holder: LoneWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> None:
        raise KeyError("unheard of")

    with monkeypatch.context() as patch:
        patch.setattr(WeightMover, "fill_host", broken)
        await hold(holder)
        await eventually(lambda: not holder.worker.service.parts.store.report())
    assert "Traceback" in caplog.text
    await hold(holder, epoch=1001)
    await held(holder)


async def test_a_cached_copy_that_the_pool_needs_does_not_make_way() -> None:
    async with lone_worker(host_cache_bytes=model_record().weights_bytes) as alone:
        zeros = digests_of_zeros(layout_of(alone.model.spec))
        other = msgspec.structs.replace(alone.model, name="other", model_hash="hash-of-other", unit_digests=zeros)
        alone.worker.service.parts.store.reserve(other, cached=True, now_s=0.0)
        copy = alone.worker.service.parts.store.find("hash-of-other", other.layout_hash)
        assert copy is not None
        for unit in range(len(copy.layout.units)):
            assert copy.seal(unit)
            copy.mark_ready(unit)
        alone.pool.retire_error = Conflict("the last copy")
        await alone.serve()
        await inside(alone).keep(alone.worker.serving)
        assert [(c.model, c.state) for c in alone.worker.service.parts.store.report()] == [("other", "ready")]
        alone.pool.retire_error = None  # else it would wait at its end


# --- copies in use -------------------------------------------------------------------------------


async def test_a_copy_that_may_go_goes_after_its_readers_however_long_they_read(
    holder: LoneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.weights.host_copies.DROP_TIMEOUT_S", 0.05)
    monkeypatch.setattr("services.worker.weights.host_copies.RETRY_INTERVAL_S", 0.05)
    await hold(holder)
    await held(holder)
    with holder.worker.service.parts.store.pinned(holder.model.model_hash):
        await drop(holder)
        await eventually(lambda: [c.state for c in copies(holder)] == ["retired"])
        await asyncio.sleep(1.2)
        assert [c.state for c in holder.worker.service.parts.store.report()] == ["retired"]
    await eventually(lambda: copies(holder) == ())


# --- the end of the process ----------------------------------------------------------------------


async def test_a_stopped_worker_keeps_its_copies_until_the_pool_lets_them_go() -> None:
    async with lone_worker(host_cache_bytes=4 * MIB, drain_timeout_s=WAIT_S) as holder:
        await holder.serve()
        await hold(holder)
        await held(holder)
        holder.pool.retire_error = Conflict("the last copy")
        stopping = asyncio.create_task(holder.worker.stop())
        await eventually(lambda: {r.kind for r in holder.pool.retired if r.leaving} == {"gpu", "host"})
        await asyncio.sleep(0.5)
        assert not stopping.done()
        with pytest.raises(SentBack, match="stops"):
            await hold(holder, epoch=1001)
        offered = holder.worker.service.parts.mover.copies
        assert all(offered.find(k, holder.model.model_hash, holder.model.layout_hash) for k in ("gpu", "host"))
        with holder.worker.service.parts.store.pinned(holder.model.model_hash):
            holder.pool.retire_error = None
            await eventually(lambda: not offered.find("host", holder.model.model_hash, holder.model.layout_hash))
            await asyncio.sleep(0.2)
            assert not stopping.done(), "somebody reads it"
        await asyncio.wait_for(stopping, WAIT_S)


async def test_a_stopped_worker_waits_no_longer_than_its_drain_timeout() -> None:
    async with lone_worker(host_cache_bytes=4 * MIB, drain_timeout_s=0.5) as alone:
        await hold(alone)
        await held(alone)
        alone.pool.retire_error = Conflict("the last copy")
        await asyncio.wait_for(alone.worker.stop(), WAIT_S)
        assert alone.pool.heartbeats[-1].leaving


async def test_a_stopped_worker_does_not_wait_for_a_pool_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.instance.registration.POOL_SILENT_S", 0.3)
    async with lone_worker(host_cache_bytes=4 * MIB, drain_timeout_s=2 * WAIT_S) as alone:
        await hold(alone)
        await held(alone)
        alone.pool.retire_error = Unavailable("recovering")
        await asyncio.wait_for(alone.worker.stop(), WAIT_S)
