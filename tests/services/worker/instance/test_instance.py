"""One instance's way through its life, inside a worker."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from services.worker.config import WorkerConfig
from services.worker.device.device import Device
from services.worker.device.host import HOST
from services.worker.device.memory import HostMemory
from services.worker.engine.forward_batch import ForwardBatch
from services.worker.engine.kv_pool import KvPool
from services.worker.engine.mock import mock_engine
from services.worker.engine.mock.mock_engine import MockEngine
from services.worker.engine.torch_engine import TorchEngine
from services.worker.instance.factory import InstanceFactory
from shared.errors import Conflict, NoCapacity
from shared.profile import Profile, write_profile
from tests.records import profile
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.lone_worker import LoneWorker, lone_worker
from tests.wait_until import eventually


async def test_only_the_very_instance_that_serves_admits(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    instance = alone.worker.serving
    instance.check_admits(instance_id)
    with pytest.raises(Conflict):
        instance.check_admits("another")
    instance.drain()
    with pytest.raises(Conflict):
        instance.check_admits(instance_id)
    assert instance.revive()
    instance.check_admits(instance_id)


async def test_a_request_for_other_weights_is_refused_and_nothing_of_it_is_here(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    alone.gateway.model_hash = "other"
    with pytest.raises(Conflict, match="other"):
        await alone.submit(instance_id, "r")
    assert (await alone.stats()).load.queued_requests == 0
    alone.gateway.model_hash = alone.model.model_hash
    await alone.submit(instance_id, "r")
    await alone.gateway.end_of("r")


async def test_a_retired_instance_cannot_be_revived_any_more(alone: LoneWorker) -> None:
    await alone.serve()
    instance = alone.worker.serving
    instance.drain()
    assert await instance.idle()
    with instance.pinned():
        assert not instance.retire(), "somebody reads the copy"
    assert instance.retire()
    assert not instance.revive()
    assert instance.state == "draining"


async def test_idle_tells_a_revival(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r")
    instance = alone.worker.serving
    instance.drain()
    waiting = asyncio.create_task(instance.idle())
    await asyncio.sleep(0)
    instance.revive()
    assert await waiting is False
    alone.resume()


async def test_a_stop_during_a_planned_drain_lets_the_request_finish(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.submit(instance_id, "r")
    await alone.drain(instance_id)
    await eventually(lambda: alone.worker.serving.state == "draining")
    stopping = asyncio.create_task(alone.worker.stop())
    await asyncio.sleep(0.05)
    alone.resume()
    await stopping
    await alone.gateway.end_of("r")
    assert alone.gateway.tokens("r") == expected_tokens(8)
    assert alone.pool.heartbeats[-1].leaving


async def test_what_the_registry_hears_is_what_the_instance_can_take(alone: LoneWorker) -> None:
    await alone.serve()
    info, config = alone.worker.serving.info(), alone.worker.config
    assert info.max_running_requests == config.max_running_requests
    assert info.max_queued_tokens == config.max_queued_tokens
    assert 0 < info.context_tokens <= alone.model.spec.max_position
    assert info.weights_digest == alone.worker.serving.copy.digest()


async def test_memory_is_taken_and_given_back_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these takes seconds where the memory is large."""
    on_the_loop: dict[str, bool] = {}

    def watch(owner: type, name: str) -> None:
        work = getattr(owner, name)

        def watched(*args: object, **kwargs: object) -> object:
            on_the_loop[name] = on_the_loop.get(name, False) or threading.current_thread() is threading.main_thread()
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(HostMemory, "prefault")
    watch(HostMemory, "release")
    watch(KvPool, "view")
    async with lone_worker(engine="torch", prefault_bytes=1 << 20) as alone:
        instance_id = await alone.serve()
        await alone.drain(instance_id)
        await alone.reported("drain-1", "spare")
    assert on_the_loop == {"prefault": False, "release": False, "view": False}


async def test_a_worker_warms_up_once_before_it_registers_as_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = LoneWorker(engine="torch")
    reports_before: list[int] = []

    def warmed(device: Device) -> None:
        assert threading.current_thread() is not threading.main_thread()
        reports_before.append(len(alone.pool.heartbeats))

    monkeypatch.setattr("services.worker.engine.warm_up.warm_up", warmed)
    await alone.start()
    try:
        await alone.serve()
    finally:
        await alone.worker.stop()
    assert reports_before == [0]
    assert alone.pool.heartbeats[0].state == "spare"


async def test_an_engine_is_prepared_while_its_weights_load_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[bool] = []
    prepare = TorchEngine.prepare

    def watched(self: TorchEngine, first: int, last: int) -> None:
        prepared.append(threading.current_thread() is threading.main_thread())
        prepare(self, first, last)

    monkeypatch.setattr(TorchEngine, "prepare", watched)
    async with lone_worker(engine="torch") as alone:
        instance_id = await alone.serve()
        await alone.drain(instance_id)
        await alone.reported("drain-1", "spare")
    assert prepared == [False]


async def test_a_plan_that_comes_while_an_instance_is_built_finds_it_loading(
    alone: LoneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, go_on = threading.Event(), threading.Event()

    def slowly(**settings: Any) -> MockEngine:
        built.set()
        assert go_on.wait(20.0)
        return MockEngine(**settings)

    monkeypatch.setattr("services.worker.engine.mock.mock_engine.MockEngine", slowly)
    first, second = alone.plan(epoch=10), alone.plan(epoch=11)
    scaling = alone.worker.service.parts.scaling
    accepting = [asyncio.create_task(scaling.on_scale_plan(first, time.monotonic()))]
    await eventually(built.is_set)
    accepting.append(asyncio.create_task(scaling.on_scale_plan(second, time.monotonic())))
    go_on.set()
    await asyncio.gather(*accepting)
    # As if the first had been built at once: the newer lease takes its place.
    await alone.reported(second.plan_id, "serving")
    assert alone.events(first.plan_id)[-1] == "failed"


@pytest.mark.parametrize("setting", ["BLITZ_WORKER_ARENA_MIB", "BLITZ_WORKER_KV_MIB"])
def test_more_memory_than_there_are_addresses_is_refused_with_its_setting(setting: str) -> None:
    config = WorkerConfig.from_env({setting: str(1 << 30)})
    with pytest.raises(NoCapacity, match=f"{setting}={1 << 30}: this machine does not give so much: Cannot allocate"):
        InstanceFactory(config, HOST, lambda _: None, lambda _: None)


async def test_an_instance_with_a_profile_begins_with_it_and_the_mock_plays_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Profile] = []

    def step_s(known: Profile, _batch: ForwardBatch) -> float:
        played.append(known)
        return 0.0

    monkeypatch.setattr(mock_engine, "played_step_s", step_s)
    (tmp_path / "broken.json").write_bytes(b"{")
    async with lone_worker(profiles=tmp_path) as alone:
        write_profile(tmp_path / "m.json", profile(alone.model))  # after the worker's start
        instance_id = await alone.serve()
        budgets = alone.worker.serving.engine.loop.scheduler.budgets
        assert budgets.cost.token_s == profile().prefill_fit.token_s
        await alone.submit(instance_id, "r")
        await eventually(lambda: played)
    assert set(played) == {profile(alone.model)}


async def test_a_profile_of_another_model_is_not_used(tmp_path: Path) -> None:
    async with lone_worker(profiles=tmp_path) as alone:
        write_profile(tmp_path / "m.json", profile(alone.model, model_hash="another"))
        write_profile(tmp_path / "n.json", profile(alone.model, layout_hash="another"))
        await alone.serve()
        assert not alone.worker.serving.engine.loop.scheduler.budgets.cost.is_known
