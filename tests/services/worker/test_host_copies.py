"""Copies in host memory, as the pool places them and as the host-cache baseline keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from shared import subjects
from shared.errors import Conflict, NoCapacity, NotFound
from shared.messages.common import Ack
from shared.messages.copies import CopySource, DropCopy, HoldCopy
from shared.messages.registry import HeartbeatAck, HostCopy
from shared.messages.scaling import Stripe
from tests.services.fake_gateway import expected_tokens
from tests.services.waiting import eventually
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.services.workers import MIB

FROM_HOST = Stripe(source="w0", source_kind="host", target="w0")


@pytest.fixture
async def holder() -> AsyncIterator[LoneWorker]:
    """A worker that offers host memory."""
    async with lone_worker(host_cache_bytes=4 * MIB) as alone:
        yield alone


async def hold(alone: LoneWorker, *sources: CopySource, epoch: int = 1000) -> None:
    request = HoldCopy(model=alone.model, epoch=epoch, sources=sources)
    await alone.planner.request(subjects.worker_hold_copy("w0"), request, Ack, timeout_s=5.0)


async def drop(alone: LoneWorker) -> None:
    request = DropCopy(model_hash=alone.model.model_hash)
    await alone.planner.request(subjects.worker_drop_copy("w0"), request, Ack, timeout_s=5.0)


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


async def test_a_copy_comes_from_the_instance_of_the_same_process(holder: LoneWorker) -> None:
    await holder.serve()
    source = CopySource(worker_id="w0", host="host-of-w0", transport_address=b"", kind="gpu")
    holder.model = msgspec.structs.replace(holder.model, path="/gone")
    await hold(holder, source)
    await held(holder)


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
    await eventually(lambda: any(h.host_copies for h in holder.pool.heartbeats))
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
    holder.pool.ack = HeartbeatAck(lease_s=0.3, wants_models=(holder.model.model_hash,))
    await eventually(lambda: holder.pool.restored)
    assert holder.pool.restored[0] == holder.model


async def test_a_plan_may_let_its_target_keep_a_copy_for_a_while() -> None:
    async with lone_worker(host_cache_bytes=4 * MIB, host_cache_keep_alive_s=0.2) as alone:
        plan = alone.plan(epoch=10, keep_on_host=True)
        await alone.publish(plan)
        await alone.reported(plan.plan_id, "serving")
        await eventually(lambda: [(c.state, c.cached) for c in copies(alone)] == [("ready", True)])
        await eventually(lambda: copies(alone) == (), timeout_s=5.0)
        assert alone.pool.retired[-1].kind == "host", "the pool is asked here, too"


async def test_a_target_without_host_memory_serves_all_the_same(alone: LoneWorker) -> None:
    plan = alone.plan(epoch=10, keep_on_host=True)
    await alone.publish(plan)
    await alone.reported(plan.plan_id, "serving")
    assert copies(alone) == ()
