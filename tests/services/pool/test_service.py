from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from safetensors.torch import load_file, save_file

from services.pool.config import PoolSettings
from services.pool.service import PoolService
from services.pool.store import Store
from shared import subjects
from shared.bus.departures import Departure
from shared.errors import BadCheckpoint, BadRequest, BlitzError, Conflict, ModelNotFound, NoCapacity, Unavailable
from shared.identity import hold
from shared.messages.common import Ack, Role
from shared.messages.registry import (
    AddModel,
    CordonWorker,
    GetSnapshot,
    HeartbeatAck,
    LeaseGrant,
    ModelRecord,
    ReleaseWorkers,
    RemoveModel,
    RestoreModel,
    RouteChanges,
    SetFloor,
    Snapshot,
    WorkerHeartbeat,
)
from tests.checkpoints import tiny_checkpoint, write_checkpoint
from tests.records import heartbeat, model
from tests.services.pool.giving import give
from tests.services.pool.leasing import leased, wanted
from tests.shared.bus.memory import MemoryBroker
from tests.wait_until import eventually

LEASE_S = 1.0
"""Of pools whose workers are to die within a test."""
LONG_S = 60.0
"""A lease that no test sees the end of."""


@dataclass
class Pool:
    broker: MemoryBroker
    redis: Redis
    events: list[RouteChanges]

    async def ask(self, operation: str, message: object, reply: type) -> object:
        return await self.broker.bus("client").request(subjects.pool(operation), message, reply, timeout_s=60)  # type: ignore[arg-type]

    async def beat(self, report: WorkerHeartbeat) -> HeartbeatAck:
        return await self.ask("heartbeat", report, HeartbeatAck)  # type: ignore[return-value]

    async def snapshot(self) -> Snapshot:
        return await self.ask("snapshot", GetSnapshot(), Snapshot)  # type: ignore[return-value]

    async def lease(
        self, *worker_ids: str, plan_id: str = "plan", ttl_s: float = LONG_S, role: Role = "colocated"
    ) -> LeaseGrant:
        return await leased(self.ask, wanted(*worker_ids, plan_id=plan_id, ttl_s=ttl_s, role=role))

    async def know_model(self) -> ModelRecord:
        record = model("m")
        refusal = await give(self.ask, record)
        if refusal is not None:
            raise refusal
        return record


@contextlib.asynccontextmanager
async def running_pool(
    redis_url: str, *, flush: bool = True, lease_s: float = LONG_S, first: bool = False
) -> AsyncIterator[Pool]:
    redis = Redis.from_url(redis_url)
    if flush:
        await redis.flushdb()
    broker = MemoryBroker()
    events: list[RouteChanges] = []
    await broker.bus("reader").subscribe(subjects.route_changes(), RouteChanges, events.append)
    stopping = asyncio.Event()
    store = Store.connect(redis_url)
    settings = PoolSettings(lease_s=lease_s, first=first)
    service = PoolService(broker.bus("pool"), store, settings, metrics=CollectorRegistry())
    running = asyncio.create_task(service.run(stopping))
    await service.ready.wait()
    yield Pool(broker, redis, events)
    stopping.set()
    await running
    await store.close()
    await redis.aclose()


@pytest.fixture
async def pool(redis_url: str) -> AsyncIterator[Pool]:
    """A pool that just started: it answers, and grants and expires nothing yet."""
    async with running_pool(redis_url) as running:
        yield running


@pytest.fixture
async def granting_pool(redis_url: str) -> AsyncIterator[Pool]:
    """A pool that has no workers to wait for; none of its own falls silent for too long."""
    async with running_pool(redis_url, first=True) as running:
        yield running


@pytest.fixture
async def strict_pool(redis_url: str) -> AsyncIterator[Pool]:
    """A pool that soon takes silent workers for dead."""
    async with running_pool(redis_url, lease_s=LEASE_S, first=True) as running:
        yield running


async def test_a_silent_worker_is_forgotten_after_its_lease_and_its_route_goes(strict_pool: Pool) -> None:
    record = await strict_pool.know_model()
    await strict_pool.beat(heartbeat("w0", record, "serving"))
    await strict_pool.beat(heartbeat("w1"))

    async def all_gone() -> bool:
        return (await strict_pool.snapshot()).workers == ()

    await eventually(all_gone)
    await eventually(lambda: [gone.instance_id for event in strict_pool.events for gone in event.gone] == ["i-w0"])
    assert {found.route.worker_id for event in strict_pool.events for found in event.routes} == {"w0"}


async def test_a_worker_whose_process_ended_is_forgotten_long_before_its_lease_ends(granting_pool: Pool) -> None:
    pool, record = granting_pool, await granting_pool.know_model()
    for name in ("dead", "back", "cut", "other"):
        await pool.beat(heartbeat(name, record, "serving"))
    incarnation = heartbeat("dead").worker.incarnation
    await hold(pool.broker.bus("back"), incarnation, subjects.worker_holder("back", incarnation))
    pool.broker.depart(Departure("worker", "back", incarnation, "Client Closed"))
    pool.broker.depart(Departure("worker", "cut", incarnation, "Stale Connection"))
    pool.broker.depart(Departure("worker", "other", "another", "Client Closed"))
    pool.broker.depart(Departure("gateway", "other", incarnation, "Client Closed"))
    pool.broker.depart(Departure("worker", "dead", incarnation, "Client Closed"))

    async def one_is_gone() -> bool:
        return len((await pool.snapshot()).workers) == 3

    await eventually(one_is_gone)
    assert [w.worker.worker_id for w in (await pool.snapshot()).workers] == ["back", "cut", "other"]
    await pool.beat(heartbeat("dead", record, "serving"))
    assert len((await pool.snapshot()).workers) == 4, "it was not dead after all"


async def test_an_older_report_does_not_overwrite_a_newer_one(pool: Pool) -> None:
    record = await pool.know_model()
    await pool.beat(heartbeat("w0", record, "serving", sequence=5))
    await pool.beat(heartbeat("w0", sequence=4))
    assert (await pool.snapshot()).workers[0].state == "serving"
    await pool.beat(heartbeat("w0", sequence=1, incarnation="reborn"))
    assert (await pool.snapshot()).workers[0].state == "spare"


async def test_a_leaving_worker_is_forgotten_at_once_but_not_by_its_predecessor(pool: Pool) -> None:
    await pool.beat(heartbeat("w0", incarnation="new"))
    await pool.beat(heartbeat("w0", leaving=True, incarnation="old", sequence=99))
    assert len((await pool.snapshot()).workers) == 1
    await pool.beat(heartbeat("w0", leaving=True, incarnation="new", sequence=2))
    assert (await pool.snapshot()).workers == ()


async def test_leases_are_all_or_none_and_epochs_grow(granting_pool: Pool) -> None:
    await granting_pool.know_model()
    for worker_id in ("w0", "w1", "w2"):
        await granting_pool.beat(heartbeat(worker_id))
    grant = await granting_pool.lease("w0", "w1")
    first, second = (epoch for _, epoch in grant.epochs)
    assert 0 < first < second
    with pytest.raises(Conflict):
        await granting_pool.lease("w1", "w2", plan_id="other")
    assert [w.lease_plan_id for w in (await granting_pool.snapshot()).workers] == ["plan", "plan", ""]
    later = await granting_pool.lease("w2", plan_id="other")
    assert later.epochs[0][1] > second


async def test_released_and_expired_leases_can_be_granted_again(granting_pool: Pool) -> None:
    await granting_pool.know_model()
    await granting_pool.beat(heartbeat("w0"))
    await granting_pool.lease("w0", plan_id="a")
    await granting_pool.ask("release", ReleaseWorkers(plan_id="stranger", worker_ids=("w0",), term=1), Ack)
    with pytest.raises(Conflict):
        await granting_pool.lease("w0", plan_id="b")
    await granting_pool.ask("release", ReleaseWorkers(plan_id="a", worker_ids=("w0",), term=1), Ack)
    await granting_pool.lease("w0", plan_id="b", ttl_s=0.05)
    await asyncio.sleep(0.1)
    await granting_pool.lease("w0", plan_id="c")


async def test_a_busy_or_missing_worker_is_not_leased(granting_pool: Pool) -> None:
    record = await granting_pool.know_model()
    await granting_pool.beat(heartbeat("w0", record, "serving"))
    with pytest.raises(Conflict):
        await granting_pool.lease("w0")
    with pytest.raises(NoCapacity):
        await granting_pool.lease("nobody")
    with pytest.raises(BadRequest):
        await granting_pool.lease()


async def test_a_process_that_came_in_the_place_of_another_is_not_leased_for_it(granting_pool: Pool) -> None:
    await granting_pool.know_model()
    for worker_id in ("w0", "w1"):
        await granting_pool.beat(heartbeat(worker_id))
    await granting_pool.beat(heartbeat("w1", incarnation="2"))
    with pytest.raises(Conflict, match="worker w1 is another process by now"):
        await granting_pool.lease("w0", "w1")
    assert [w.lease_plan_id for w in (await granting_pool.snapshot()).workers] == ["", ""]
    assert (await granting_pool.lease("w0", plan_id="other")).epochs


async def test_a_process_that_comes_while_its_predecessor_is_leased_has_no_lease(
    granting_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after Redis has granted, before the pool has heard that."""
    await granting_pool.know_model()
    for worker_id in ("w0", "w1"):
        await granting_pool.beat(heartbeat(worker_id))
    grant = Store.lease

    async def slow(store: Store, *args: Any) -> LeaseGrant:
        granted = await grant(store, *args)
        await granting_pool.beat(heartbeat("w1", incarnation="2"))
        return granted

    monkeypatch.setattr(Store, "lease", slow)
    with pytest.raises(Conflict, match="worker w1 is another process by now"):
        await granting_pool.lease("w0", "w1")
    assert [w.lease_plan_id for w in (await granting_pool.snapshot()).workers] == ["", ""]
    assert await granting_pool.redis.keys("blitz:lease:*") == []


async def test_a_worker_that_is_drained_while_it_is_leased_has_no_lease(
    granting_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await granting_pool.know_model()
    for worker_id in ("w0", "w1"):
        await granting_pool.beat(heartbeat(worker_id))
    grant = Store.lease

    async def slow(store: Store, *args: Any) -> LeaseGrant:
        granted = await grant(store, *args)
        await granting_pool.ask("cordon_worker", CordonWorker(worker_id="w1"), Ack)
        return granted

    monkeypatch.setattr(Store, "lease", slow)
    with pytest.raises(Conflict, match="worker w1 is drained"):
        await granting_pool.lease("w0", "w1")
    assert [w.lease_plan_id for w in (await granting_pool.snapshot()).workers] == ["", ""]
    assert await granting_pool.redis.keys("blitz:lease:*") == []


async def test_a_lease_is_used_up_when_its_worker_reports_under_it(granting_pool: Pool) -> None:
    record = await granting_pool.know_model()
    await granting_pool.beat(heartbeat("w0"))
    epoch = (await granting_pool.lease("w0")).epochs[0][1]
    await granting_pool.beat(heartbeat("w0", record, "loading", sequence=2, epoch=epoch))
    assert (await granting_pool.snapshot()).workers[0].lease_plan_id == ""
    await granting_pool.beat(heartbeat("w0", sequence=3))
    await granting_pool.lease("w0", plan_id="next")


async def test_a_started_pool_grants_nothing_until_a_lease_has_passed(redis_url: str) -> None:
    async with running_pool(redis_url) as pool:
        await pool.know_model()
        await pool.beat(heartbeat("w0"))
        with pytest.raises(Unavailable) as refused:
            await pool.lease("w0")
        assert refused.value.retry_after_s is not None


async def test_a_bus_outage_kills_nobody(strict_pool: Pool) -> None:
    record = await strict_pool.know_model()
    await strict_pool.beat(heartbeat("w0", record, "serving"))
    strict_pool.broker.disconnect()
    await asyncio.sleep(2 * LEASE_S)
    strict_pool.broker.reconnect()
    await asyncio.sleep(LEASE_S / 4)
    await strict_pool.beat(heartbeat("w0", record, "serving", sequence=2))
    await asyncio.sleep(0.2)
    assert len((await strict_pool.snapshot()).workers) == 1


async def test_a_drain_is_logged_once(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await pool.beat(heartbeat("w0"))
    for lift in (True, False, False, True, True):
        await pool.ask("cordon_worker", CordonWorker(worker_id="w0", lift=lift), Ack)
    said = [text for text in caplog.messages if text.startswith("worker w0 is")]
    assert said == ["worker w0 is to be free: drained by hand", "worker w0 is used again"]


async def test_an_emptied_redis_is_filled_again(pool: Pool) -> None:
    record = await pool.know_model()
    await pool.ask("set_floor", SetFloor(model="m", instances=3, hold_s=60.0, term=1), Ack)
    await pool.beat(heartbeat("w0", record, "serving"))
    await pool.ask("cordon_worker", CordonWorker(worker_id="w0"), Ack)
    await pool.redis.flushdb()

    async def filled() -> bool:
        return await cast(Any, pool.redis.hget("blitz:worker:w0", "state")) == b"serving"

    await eventually(filled)
    assert not (await pool.beat(heartbeat("w0", record, "serving", sequence=2))).wants_model
    snapshot = await pool.snapshot()
    assert (snapshot.models, [f.instances for f in snapshot.floors]) == ((record,), [3])
    assert await cast(Any, pool.redis.hkeys("blitz:models")) == [b"m"]
    assert await cast(Any, pool.redis.hkeys("blitz:cordons")) == [b"w0"]
    assert snapshot.workers[0].cordoned
    assert await cast(Any, pool.redis.hget("blitz:worker:w0", "state")) == b"serving"


async def test_a_pool_that_finds_redis_empty_heals_from_the_workers(pool: Pool) -> None:
    record = model("m")
    ack = await pool.beat(heartbeat("w0", record, "serving"))
    assert ack.wants_model
    await pool.ask("restore_model", RestoreModel(model=record), Ack)
    assert not (await pool.beat(heartbeat("w0", record, "serving", sequence=2))).wants_model
    assert (await pool.snapshot()).models == (record,)
    await eventually(lambda: pool.events and pool.events[-1].routes)


async def test_a_model_that_nobody_asked_for_is_not_restored(pool: Pool) -> None:
    with pytest.raises(Conflict):
        await pool.ask("restore_model", RestoreModel(model=model("m")), Ack)
    refusal = await give(pool.ask, model("no spaces"))
    assert isinstance(refusal, BadRequest)
    assert (await pool.snapshot()).models == ()


async def test_instances_of_a_removed_model_are_stopped_and_not_restored(pool: Pool) -> None:
    record = await pool.know_model()
    await pool.beat(heartbeat("w0", record, "serving"))
    await pool.ask("remove_model", RemoveModel(name="m"), Ack)
    await eventually(lambda: pool.events and pool.events[-1].removed_models == ("m",))
    ack = await pool.beat(heartbeat("w0", record, "serving", sequence=2))
    assert ack.stop_instance == "i-w0"
    assert not ack.wants_model
    await give(pool.ask, record)
    assert (await pool.snapshot()).models == ()
    with pytest.raises(ModelNotFound):
        await pool.ask("remove_model", RemoveModel(name="m"), Ack)


async def test_a_floor_holds_until_it_is_lifted(pool: Pool) -> None:
    await pool.know_model()
    await pool.ask("set_floor", SetFloor(model="m", instances=3, hold_s=60.0, term=1), Ack)
    assert [(f.model, f.instances) for f in (await pool.snapshot()).floors] == [("m", 3)]
    await pool.ask("set_floor", SetFloor(model="m", instances=0, hold_s=0.0, term=1), Ack)
    assert (await pool.snapshot()).floors == ()
    with pytest.raises(ModelNotFound):
        await pool.ask("set_floor", SetFloor(model="x", instances=3, hold_s=60.0, term=1), Ack)


async def test_each_role_of_a_model_has_a_floor_of_its_own(pool: Pool) -> None:
    await pool.know_model()
    roles: tuple[Role, ...] = ("colocated", "prefill", "decode")
    for instances, role in enumerate(roles, 1):
        await pool.ask("set_floor", SetFloor(model="m", instances=instances, hold_s=60.0, role=role, term=1), Ack)
    await pool.ask("set_floor", SetFloor(model="m", instances=7, hold_s=60.0, role="decode", term=1), Ack)
    floors = (await pool.snapshot()).floors
    assert {(f.model, f.role): f.instances for f in floors} == {
        ("m", "colocated"): 1,
        ("m", "prefill"): 2,
        ("m", "decode"): 7,
    }
    await pool.ask("set_floor", SetFloor(model="m", instances=0, hold_s=0.0, role="prefill", term=1), Ack)
    assert {f.role for f in (await pool.snapshot()).floors} == {"colocated", "decode"}
    await pool.ask("remove_model", RemoveModel(name="m"), Ack)
    assert (await pool.snapshot()).floors == ()


async def test_a_snapshot_shows_for_which_role_a_worker_is_leased(granting_pool: Pool) -> None:
    await granting_pool.know_model()
    for worker_id in ("w0", "w1", "w2"):
        await granting_pool.beat(heartbeat(worker_id))
    await granting_pool.lease("w0", plan_id="a", role="prefill")
    await granting_pool.lease("w1", plan_id="b")
    shown = {w.worker.worker_id: (w.lease_plan_id, w.lease_role) for w in (await granting_pool.snapshot()).workers}
    assert shown == {"w0": ("a", "prefill"), "w1": ("b", "colocated"), "w2": ("", "colocated")}


async def test_a_model_is_validated_and_registered_under_its_directorys_name(pool: Pool, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", "llama")
    record = await pool.ask("add_model", AddModel(path=str(path)), ModelRecord)
    assert isinstance(record, ModelRecord)
    assert record.name == "tiny"
    assert record.weights_bytes > 0
    again = await pool.ask("add_model", AddModel(path=str(path)), ModelRecord)
    assert again == record
    await eventually(lambda: any(record.name == "tiny" for event in pool.events for record in event.models))


async def test_a_models_objectives_are_kept_as_they_were_first_said(pool: Pool, tmp_path: Path) -> None:
    path = str(write_checkpoint(tmp_path / "tiny", "llama"))
    message = AddModel(
        path=path, min_instances=0, slo_ttft_s=0.5, slo_tbt_s=0.1, keep_alive_s=60.0, no_room_timeout_s=0.0
    )
    record = cast(ModelRecord, await pool.ask("add_model", message, ModelRecord))
    assert (record.slo_ttft_s, record.slo_tbt_s, record.keep_alive_s, record.no_room_timeout_s) == (0.5, 0.1, 60.0, 0.0)
    assert (await pool.snapshot()).models == (record,)
    # Like its other limits: the same model again gives the record that is there.
    again = AddModel(path=path, min_instances=1, slo_ttft_s=0.9, slo_tbt_s=0.9)
    assert await pool.ask("add_model", again, ModelRecord) == record
    await pool.ask("remove_model", RemoveModel(name="tiny"), Ack)
    changed = cast(ModelRecord, await pool.ask("add_model", again, ModelRecord))
    assert (changed.slo_ttft_s, changed.slo_tbt_s, changed.keep_alive_s) == (0.9, 0.9, 0.0)


async def test_another_checkpoint_under_a_taken_name_is_refused(pool: Pool, tmp_path: Path) -> None:
    await pool.ask("add_model", AddModel(path=str(write_checkpoint(tmp_path / "a", "llama")), name="m"), ModelRecord)
    with pytest.raises(Conflict):
        await pool.ask(
            "add_model", AddModel(path=str(write_checkpoint(tmp_path / "b", "qwen2")), name="m"), ModelRecord
        )


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": "no spaces"}, BadRequest),
        ({"min_instances": 3, "max_instances": 2}, BadRequest),
        ({"min_instances": -1}, BadRequest),
        ({"slo_ttft_s": -0.1}, BadRequest),
        ({"slo_tbt_s": float("nan")}, BadRequest),
        ({"min_instances": 0, "keep_alive_s": -1.0}, BadRequest),
        ({"min_instances": 1, "keep_alive_s": 60.0}, BadRequest),
        ({"no_room_timeout_s": -1.0}, BadRequest),
        ({"path": "/nowhere"}, BadCheckpoint),
    ],
)
async def test_a_refused_model_leaves_nothing_registered(
    pool: Pool, tmp_path: Path, changes: dict[str, object], error: type[BlitzError]
) -> None:
    fields: dict[str, object] = {"path": str(write_checkpoint(tmp_path / "tiny", "llama"))}
    with pytest.raises(error):
        await pool.ask("add_model", AddModel(**(fields | changes)), ModelRecord)  # type: ignore[arg-type]
    assert (await pool.snapshot()).models == ()
    assert pool.events == []


WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def _truncate(path: Path) -> None:
    raw = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(raw[: len(raw) // 2])


def _write_garbage_header(path: Path) -> None:
    with (path / WEIGHTS).open("r+b") as stream:
        stream.seek(8)
        stream.write(b"\xff" * 64)


def _edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path / WEIGHTS).items()}
    edit(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def _lose_a_tensor(path: Path) -> None:
    _edit_tensors(path, lambda tensors: tensors.pop(Q_PROJ))


def _reshape_a_tensor(path: Path) -> None:
    _edit_tensors(path, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 63)}))


def _rename_the_architecture(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))


def _keep_pickle_only(path: Path) -> None:
    (path / WEIGHTS).rename(path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_truncate, (WEIGHTS, "truncated")),
        (_write_garbage_header, (WEIGHTS, "header")),
        (_lose_a_tensor, (WEIGHTS, Q_PROJ, "missing")),
        (_reshape_a_tensor, (WEIGHTS, Q_PROJ, "[64, 63]")),
        (_rename_the_architecture, ("config.json", "GPT2LMHeadModel")),
        (_keep_pickle_only, ("pytorch_model.bin", "pickl")),
    ],
)
async def test_a_damaged_checkpoint_is_refused_by_name_and_not_registered(
    pool: Pool, tmp_path: Path, damage: Callable[[Path], None], named: tuple[str, ...]
) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "bad"))
    damage(path)
    with pytest.raises(BadCheckpoint) as refused:
        await pool.ask("add_model", AddModel(path=str(path)), ModelRecord)
    for part in named:
        assert part in refused.value.message
    assert (await pool.snapshot()).models == ()
    assert pool.events == []
    # The name is free for a good checkpoint.
    good = await pool.ask("add_model", AddModel(path=str(tiny_checkpoint("llama")), name="bad"), ModelRecord)
    assert isinstance(good, ModelRecord)


async def test_an_unreadable_entry_in_redis_hides_nothing_else(redis_url: str) -> None:
    record = model("m")
    async with running_pool(redis_url) as pool:
        await pool.know_model()
        await pool.beat(heartbeat("w0", record, "serving"))
        await cast(Any, pool.redis.hset("blitz:models", "broken", b"\xc1"))
        await cast(Any, pool.redis.hset("blitz:worker:w1", mapping={"report": b"\xc1"}))
        await pool.redis.zadd("blitz:workers", {"w1": 4e15})
        await cast(Any, pool.redis.hset("blitz:floors", "m", b"\xc1"))
    async with running_pool(redis_url, flush=False) as pool:
        snapshot = await pool.snapshot()
        assert [m.name for m in snapshot.models] == ["m"]
        assert [w.worker.worker_id for w in snapshot.workers] == ["w0"]
        await eventually(lambda: pool.events and pool.events[-1].routes)


async def test_a_heartbeat_waits_for_no_crowd_of_readers(pool: Pool) -> None:
    await pool.beat(heartbeat("w0"))
    readers = [asyncio.create_task(pool.snapshot()) for _ in range(200)]
    await asyncio.sleep(0)
    assert (await pool.beat(heartbeat("w0", sequence=2))).lease_s > 0
    assert sum(reader.done() for reader in readers) < 100
    for page in await asyncio.gather(*readers):
        assert [record.worker.worker_id for record in page.workers] == ["w0"]
