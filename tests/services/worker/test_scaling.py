"""Plans as one worker carries them out, or does not."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from services.worker import scaling, service
from services.worker.engine.thread import EngineThread
from services.worker.instance.factory import InstanceFactory
from services.worker.instance.registration import Registration
from services.worker.memory.pieces import Piece
from services.worker.weights.mover import WeightMover
from shared import subjects
from shared.errors import Conflict, NotFound
from shared.messages.common import Ack
from shared.messages.feeds import FetchRange
from shared.messages.plans import Stripe
from shared.messages.registry import HeartbeatAck, InstanceInfo
from tests.processes import process
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.late_workers import TIMINGS, late_engines
from tests.services.worker.lone_worker import FROM_DISK, LoneWorker, lone_worker
from tests.services.workers import MIB
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import WAIT_S, eventually


async def test_a_plan_is_reported_step_by_step_and_its_instance_registered(alone: LoneWorker) -> None:
    plan = alone.plan(epoch=10)
    await alone.publish(plan)
    await alone.reported(plan.plan_id, "serving")
    assert alone.events(plan.plan_id) == ["accepted", "first_byte", "loaded", "serving"]
    layers = [p.layer for p in alone.progress if p.event == "layer_ready"]
    assert layers == list(range(alone.model.spec.num_layers))
    received = [p.received_bytes for p in alone.progress if p.event in ("layer_ready", "loaded")]
    assert received == sorted(received)
    assert received[-1] == alone.model.weights_bytes
    await eventually(lambda: alone.pool.heartbeats[-1].state == "serving")
    instance = alone.pool.heartbeats[-1].instance
    assert instance is not None
    assert (instance.instance_id, instance.epoch, instance.plan_id) == ("i1", 10, plan.plan_id)
    assert instance.weights_digest
    assert instance.layers_ready == alone.model.spec.num_layers


@pytest.mark.parametrize("epoch", [9, 10])
async def test_a_plan_of_an_older_lease_is_ignored_even_by_a_spare_worker(alone: LoneWorker, epoch: int) -> None:
    instance_id = await alone.serve(epoch=10)
    await alone.drain(instance_id)
    await alone.reported("drain-1", "spare")
    outdated = alone.plan(epoch=epoch)
    await alone.publish(outdated)
    await alone.serve(epoch=11)
    assert alone.events(outdated.plan_id) == []


async def test_a_plan_for_a_busy_worker_is_reported_failed_and_disturbs_nothing(alone: LoneWorker) -> None:
    instance_id = await alone.serve(epoch=10)
    second = alone.plan(epoch=11)
    await alone.publish(second)
    await alone.reported(second.plan_id, "failed")
    assert "busy" in next(p.detail for p in alone.progress if p.plan_id == second.plan_id)
    await alone.submit(instance_id, "r")
    await alone.gateway.end_of("r")
    assert alone.gateway.tokens("r") == expected_tokens(8)


async def test_a_plan_for_somebody_else_is_nobodys_business(alone: LoneWorker) -> None:
    member = msgspec.structs.replace(alone.chain_member("i9", 10), worker_id="w9")
    plan = alone.plan(epoch=10, members=(member,), stripe=msgspec.structs.replace(FROM_DISK, target="w9"))
    await alone.publish(plan)
    await alone.serve(epoch=11)
    assert alone.events(plan.plan_id) == []


@pytest.mark.parametrize(
    ("config", "hint"),
    [({"arena_bytes": 1 << 16}, "BLITZ_WORKER_ARENA_MIB"), ({"kv_bytes": 1 << 14}, "BLITZ_WORKER_KV_MIB")],
)
async def test_a_model_that_does_not_fit_is_refused_with_the_setting_to_raise(
    config: dict[str, object], hint: str
) -> None:
    async with lone_worker(**config) as alone:
        plan = alone.plan(epoch=10)
        await alone.publish(plan)
        await alone.reported(plan.plan_id, "failed")
        assert hint in alone.progress[-1].detail
        assert alone.worker.instance is None


async def test_another_layout_than_the_planners_is_refused(alone: LoneWorker) -> None:
    plan = alone.plan(epoch=10, model=msgspec.structs.replace(alone.model, layout_hash="other"))
    await alone.publish(plan)
    await alone.reported(plan.plan_id, "failed")
    assert "layout" in alone.progress[-1].detail
    await alone.serve(epoch=11)


async def test_a_checkpoint_that_is_gone_fails_the_load_and_the_worker_is_spare_again(
    alone: LoneWorker, tmp_path: Path
) -> None:
    path = shutil.copytree(alone.model.path, tmp_path / "gone")
    (path / "model.safetensors").unlink()
    plan = alone.plan(epoch=10, model=msgspec.structs.replace(alone.model, path=str(path)))
    await alone.publish(plan)
    await alone.reported(plan.plan_id, "failed")
    assert "model.safetensors" in alone.progress[-1].detail
    await eventually(lambda: alone.pool.heartbeats[-1].state == "spare")
    assert alone.worker.fatal == []
    await alone.serve(epoch=11)


async def test_a_plan_that_names_unknown_members_is_nobodys_business(alone: LoneWorker) -> None:
    plan = alone.plan(epoch=10, stripe=Stripe(source="w9", source_kind="gpu", target="w0"))
    await alone.publish(plan)
    await alone.serve(epoch=11)
    assert alone.events(plan.plan_id) == []


@pytest.mark.parametrize("shift_s", [-30.0, 30.0])
async def test_a_plan_is_carried_out_whatever_the_time_of_day_is_here(
    alone: LoneWorker, shift_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, real = alone.plan(epoch=10, expires_in_s=25.0, give_up_s=25.0), time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    await alone.publish(plan)
    await alone.reported(plan.plan_id, "serving")


async def test_a_plan_that_comes_too_late_is_refused_and_the_planner_hears_it(alone: LoneWorker) -> None:
    plan = alone.plan(epoch=10, expires_in_s=0.0)
    await alone.publish(plan)
    await alone.reported(plan.plan_id, "failed")
    assert "was valid for 0.0 s" in alone.progress[-1].detail
    await alone.serve(epoch=10)


async def test_a_target_whose_source_is_gone_reads_its_disk(alone: LoneWorker) -> None:
    gone = msgspec.structs.replace(alone.chain_member("i9", 0), worker_id="w9")
    stripe = Stripe(source="w9", source_kind="gpu", target="w0")
    plan = alone.plan(epoch=10, stripe=stripe, members=(alone.chain_member("i1", 10), gone))
    await alone.publish(plan)
    await alone.reported(plan.plan_id, "serving")


async def test_a_load_beyond_its_plans_deadline_fails_and_frees_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.sleep(3600)

    async with lone_worker() as alone:
        monkeypatch.setattr(WeightMover, "fill", never)
        plan = alone.plan(epoch=10, give_up_s=0.3)
        await alone.publish(plan)
        await alone.reported(plan.plan_id, "failed")
        assert "deadline" in alone.progress[-1].detail
        await eventually(lambda: alone.pool.heartbeats[-1].state == "spare")


async def test_an_instance_whose_model_is_removed_while_it_loads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.sleep(3600)

    async with lone_worker() as alone:
        monkeypatch.setattr(WeightMover, "fill", never)
        plan = alone.plan(epoch=10)
        await alone.publish(plan)
        await alone.reported(plan.plan_id, "accepted")
        alone.pool.ack = HeartbeatAck(lease_s=0.3, stop_instance=plan.members[0].instance_id, planner_term=1)
        await alone.reported(plan.plan_id, "failed")
        assert "removed" in alone.progress[-1].detail
        await eventually(lambda: alone.pool.heartbeats[-1].state == "spare")
        monkeypatch.undo()
        alone.pool.ack = HeartbeatAck(lease_s=0.6, planner_term=1)
        await alone.serve(epoch=11)


async def test_the_last_copy_of_a_model_is_kept_until_the_pool_lets_it_go(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    alone.pool.retire_error = Conflict("the last copy")
    await alone.drain(instance_id, "drain-1")
    await eventually(lambda: len(alone.pool.retired) >= 1)
    await alone.drain(instance_id, "revive-1", revive=True)
    await alone.reported("revive-1", "serving")
    await alone.submit(instance_id, "r")
    await alone.gateway.end_of("r")
    await alone.drain(instance_id, "drain-2")
    await eventually(lambda: len(alone.pool.retired) >= 2)
    assert alone.worker.serving.state == "draining"
    alone.pool.retire_error = None
    await alone.reported("drain-2", "spare")


async def test_a_drain_right_after_a_revival_is_carried_out(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r")
    await alone.drain(instance_id, "drain-1")
    await alone.drain(instance_id, "revive-1", revive=True)
    await alone.drain(instance_id, "drain-2")
    await alone.reported("revive-1", "serving")
    alone.resume()
    await alone.gateway.end_of("r")
    await alone.reported("drain-2", "spare")
    assert alone.worker.instance is None


async def test_a_drain_of_another_instance_is_ignored(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.drain("older-instance", "drain-1")
    await alone.drain(instance_id, "drain-2")
    await alone.reported("drain-2", "spare")
    assert alone.events("drain-1") == []


async def test_a_drain_waits_until_nobody_reads_the_copy(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    with alone.worker.serving.pinned():
        await alone.drain(instance_id)
        await eventually(lambda: alone.worker.serving.state == "draining")
        await asyncio.sleep(0.1)
        assert alone.worker.instance is not None
    await alone.reported("drain-1", "spare")


async def test_an_instance_whose_model_was_removed_drains(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    alone.pool.ack = HeartbeatAck(lease_s=0.6, stop_instance="older-instance", planner_term=1)
    known = len(alone.pool.heartbeats)
    await eventually(lambda: len(alone.pool.heartbeats) > known + 1)
    assert alone.worker.serving.state == "serving"
    alone.pool.ack = HeartbeatAck(lease_s=0.6, stop_instance=instance_id, planner_term=1)
    await eventually(lambda: alone.worker.instance is None)


async def test_the_next_model_in_the_same_memory_serves_its_own_tokens(alone: LoneWorker) -> None:
    for epoch in (10, 11, 12):
        instance_id = await alone.serve(epoch=epoch)
        await alone.submit(instance_id, f"r{epoch}")
        await alone.gateway.end_of(f"r{epoch}")
        assert alone.gateway.tokens(f"r{epoch}") == expected_tokens(8)
        await alone.drain(instance_id, f"drain-{epoch}")
        await alone.reported(f"drain-{epoch}", "spare")


@pytest.mark.parametrize("order", TIMINGS)
async def test_nothing_is_written_into_the_next_models_memory(order: str) -> None:
    """The instance goes as soon as its last request has no client any more, be steps of it in flight."""
    with late_engines(TIMINGS[order]) as late:
        async with lone_worker(engine="torch", kv_bytes=16 * MIB) as alone:
            tokens = list[tuple[int, ...]]()
            alone.pool.ack = ack = HeartbeatAck(lease_s=0.6, planner_term=1)
            for epoch in (10, 11):
                instance_id = await alone.serve(epoch=epoch)
                await alone.submit(instance_id, f"r{epoch}")
                assert (await alone.gateway.end_of(f"r{epoch}")).finish_reason == "length"
                tokens.append(alone.gateway.tokens(f"r{epoch}"))
                await alone.submit(instance_id, f"long{epoch}", max_tokens=400)
                await alone.gateway.tokens_arrived(f"long{epoch}", 3)
                alone.pool.ack = HeartbeatAck(lease_s=0.6, stop_instance=instance_id, planner_term=1)
                await alone.gateway.cancel("w0", f"long{epoch}")
                await eventually(lambda: alone.worker.instance is None)
                assert late.is_idle
                alone.pool.ack = ack
            assert len(set(tokens)) == 1
        late.check()


async def test_a_broken_engine_asks_for_a_restart_and_ends_its_requests(
    alone: LoneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LAST_WORDS_S", WAIT_S)
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r")

    def sabotage(loop: object) -> None:
        loop.step = None  # type: ignore[attr-defined]

    await asyncio.wrap_future(alone.worker.serving.engine.call(sabotage))
    alone.resume()
    end = await alone.gateway.end_of("r")
    assert end.finish_reason == "error"
    assert end.error is not None
    assert end.error.code == "engine_broken"
    await eventually(lambda: alone.worker.fatal)
    assert alone.pool.heartbeats[-1].state == "failed", "the pool hears it before the process ends"
    assert "engine" in alone.worker.fatal[0]
    await alone.worker.kill()


def _fetch(alone: LoneWorker, **changes: object) -> FetchRange:
    unit = alone.worker.serving.layout.units[1] if alone.worker.instance else None
    fields: dict[str, object] = {
        "plan_id": "p",
        "model_hash": alone.model.model_hash,
        "layout_hash": alone.model.layout_hash,
        "kind": "gpu",
        "worker_id": "w1",
        "transport_address": b"",
        "host": "host-b",
        "epoch": 7,
        "index": 1 << 23,
        "unit": 1,
        "offset": unit.offset if unit else 0,
        "num_bytes": 64,
    }
    return FetchRange(**(fields | changes))  # type: ignore[arg-type]


async def _ask(broker: MemoryBroker, request: FetchRange) -> Ack:
    return await broker.bus("w1").request(subjects.worker_fetch(process("w0")), request, Ack, timeout_s=60)


async def test_a_verified_range_is_sent_again_and_others_are_refused(alone: LoneWorker) -> None:
    with pytest.raises(NotFound):
        await _ask(alone.broker, _fetch(alone))
    await alone.serve()
    peer = alone.fabric.start(name="w1")
    request = _fetch(alone, transport_address=peer.address)
    into = bytearray(64)
    receive = peer.recv(into, request.epoch << 24 | request.index)
    await _ask(alone.broker, request)
    await receive.wait(timeout_s=60)
    assert into == bytes(alone.worker.serving.copy.arena.memory(request.offset, 64))
    with pytest.raises(Conflict):
        await _ask(alone.broker, _fetch(alone, transport_address=peer.address, offset=0))
    await peer.close()


async def test_a_load_that_breaks_unexpectedly_frees_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async with lone_worker() as alone:
        monkeypatch.setattr(WeightMover, "fill", broken)
        plan = alone.plan(epoch=10)
        await alone.publish(plan)
        await eventually(lambda: "failed" in alone.events(plan.plan_id))
        await eventually(lambda: alone.pool.heartbeats[-1].state == "spare")
        monkeypatch.undo()
        following = alone.plan(epoch=11)
        await alone.publish(following)
        await eventually(lambda: "serving" in alone.events(following.plan_id))


async def test_an_instance_that_cannot_be_built_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    async with lone_worker() as alone:
        monkeypatch.setattr(InstanceFactory, "create", broken)
        plan = alone.plan(epoch=10)
        await alone.publish(plan)
        await eventually(lambda: alone.events(plan.plan_id) == ["failed"])


class Early:
    """Engines that take requests before they have all weights; what comes is held back until ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = asyncio.Event()
        self.error: Exception | None = None
        real = WeightMover.fill

        async def until_open(_engine: EngineThread) -> bool:
            _engine.start()
            return True

        async def fill(mover: WeightMover, *args: object) -> None:
            await self.go.wait()
            if self.error is not None:
                raise self.error
            await real(mover, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(EngineThread, "until_open", until_open)
        monkeypatch.setattr(WeightMover, "fill", fill)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Early:
    return Early(monkeypatch)


async def serves_early(alone: LoneWorker) -> str:
    plan = alone.plan(epoch=10, early=True)
    await alone.publish(plan)
    await eventually(lambda: alone.pool.heartbeats[-1].state == "serving")
    instance = alone.pool.heartbeats[-1].instance
    assert instance is not None
    assert not instance.is_complete
    return plan.members[0].instance_id


async def test_an_instance_that_serves_early_is_no_copy_until_it_is_whole(alone: LoneWorker, early: Early) -> None:
    instance_id = await serves_early(alone)
    assert "serving" not in alone.events("plan-1")
    await alone.submit(instance_id, "r")
    await alone.gateway.end_of("r")
    early.go.set()
    await alone.reported("plan-1", "serving")

    def is_whole() -> bool:
        instance = alone.pool.heartbeats[-1].instance
        return instance is not None and instance.is_complete

    await eventually(is_whole)
    await alone.submit(instance_id, "s")
    await alone.gateway.end_of("s")


async def test_requests_of_one_whose_weights_do_not_come_go_on_elsewhere(alone: LoneWorker, early: Early) -> None:
    instance_id = await serves_early(alone)
    await alone.submit(instance_id, "r", max_tokens=200)
    early.error = Conflict("no weights")
    early.go.set()
    await alone.reported("plan-1", "failed")
    end = await alone.gateway.end_of("r")
    assert end.error is not None
    assert end.error.code == "sent_back"
    await eventually(lambda: alone.pool.heartbeats[-1].state == "spare")
    assert alone.worker.fatal == []


async def test_one_that_is_to_go_before_it_is_whole_goes_when_it_is(alone: LoneWorker, early: Early) -> None:
    instance_id = await serves_early(alone)
    await alone.drain(instance_id)
    await eventually(lambda: alone.pool.heartbeats[-1].state == "draining")
    await asyncio.sleep(0.1)
    assert "spare" not in alone.events("drain-1")
    early.go.set()
    await alone.reported("drain-1", "spare")
    assert "failed" not in alone.events("plan-1")


async def test_one_whose_model_is_removed_before_it_is_whole_stops_loading(alone: LoneWorker, early: Early) -> None:
    instance_id = await serves_early(alone)
    alone.pool.ack = HeartbeatAck(lease_s=0.6, stop_instance=instance_id, planner_term=1)
    await alone.reported("plan-1", "failed")
    await eventually(lambda: alone.pool.heartbeats[-1].state == "spare")
    assert alone.worker.fatal == []


@pytest.fixture
def own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that have weights of their own; they do not read them here."""
    monkeypatch.setattr(EngineThread, "has_own_weights", True)
    monkeypatch.setattr(scaling, "RELEASE_RETRY_S", 0.01)


def _copy_is(alone: LoneWorker) -> str:
    instance = alone.pool.heartbeats[-1].instance
    assert instance is not None
    return instance.copy


@pytest.mark.usefixtures("own_weights")
async def test_a_copy_that_its_engine_does_not_need_goes_once_the_pool_agrees(alone: LoneWorker) -> None:
    alone.pool.retire_error = Conflict("the last copy")
    instance_id = await alone.serve()
    serving = alone.worker.serving
    await eventually(lambda: len(alone.pool.retired) >= 3)
    assert alone.pool.retired[-1].stays
    assert bytes(serving.copy.buffer(Piece(0, 0, 0, 64, is_checksums=False))) != bytes(64)
    with serving.pinned():
        await eventually(lambda: _copy_is(alone) == "there")
        alone.pool.retire_error = None
        asked = len(alone.pool.retired)
        await asyncio.sleep(0.1)
        assert len(alone.pool.retired) <= asked + 1, "somebody reads the copy"
    await eventually(lambda: _copy_is(alone) == "gone")
    await eventually(lambda: bytes(serving.copy.buffer(Piece(0, 0, 0, 64, is_checksums=False))) == bytes(64))
    copies, model = alone.worker.service.parts.mover.copies, serving.record
    assert copies.find("gpu", model.model_hash, model.layout_hash) is None
    asked = len(alone.pool.retired)
    await alone.drain(instance_id)
    await alone.reported("drain-1", "spare")
    assert len(alone.pool.retired) == asked, "there was nothing to ask for"


@pytest.mark.usefixtures("own_weights")
async def test_the_next_model_waits_until_the_pages_of_a_copy_are_back(
    alone: LoneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go, begun = InstanceFactory.release_weights, asyncio.Event(), asyncio.Event()

    async def slowly(factory: InstanceFactory) -> None:
        begun.set()
        await go.wait()
        await real(factory)

    monkeypatch.setattr(InstanceFactory, "release_weights", slowly)
    instance_id = await alone.serve(epoch=10)
    await begun.wait()
    await alone.drain(instance_id)
    await alone.reported("drain-1", "spare")
    plan = alone.plan(epoch=11)
    await alone.publish(plan)
    await asyncio.sleep(0.2)
    assert alone.events(plan.plan_id) == []
    alone.pool.retire_error = Conflict("the last copy")
    go.set()
    await alone.reported(plan.plan_id, "serving")
    copy = alone.worker.serving.copy
    assert [copy.bad_ranges(unit) for unit in range(len(copy.layout.units))] == [()] * len(copy.layout.units)


@pytest.mark.usefixtures("own_weights")
async def test_a_copy_that_somebody_begins_to_read_while_the_pool_is_asked_stays(
    alone: LoneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def retire(_registration: Registration, _instance: InstanceInfo, **_: bool) -> None:
        asked.set()
        await answer.wait()

    monkeypatch.setattr(Registration, "retire", retire)
    await alone.serve()
    await asked.wait()
    with alone.worker.serving.pinned():
        await eventually(lambda: _copy_is(alone) == "leaves")
        answer.set()
        await eventually(lambda: _copy_is(alone) == "there")
    await eventually(lambda: _copy_is(alone) == "gone")
