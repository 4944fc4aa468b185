"""The registry in Redis: every change is one atomic script (``services.pool.scripts``)."""

from __future__ import annotations

import contextlib
import logging
import secrets
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec
from redis.asyncio import Redis

from services.pool import scripts
from services.pool.core.copies import complete_copies
from shared.errors import Conflict, ModelNotFound, NoCapacity
from shared.messages.codec import M, MalformedMessage, decode, encode
from shared.messages.common import Role
from shared.messages.registry import Floor, LeaseGrant, ModelRecord, Unplaced, WorkerHeartbeat

log = logging.getLogger(__name__)

PREFIX = "blitz:"


@dataclass(frozen=True, slots=True)
class Lease:
    """An open lease: granted, and not yet reported on by its worker."""

    worker_id: str
    plan_id: str
    model: str
    role: Role


class Store:
    """All methods raise ``redis.RedisError`` when Redis cannot answer."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._heartbeat = redis.register_script(scripts.HEARTBEAT)
        self._leave = redis.register_script(scripts.LEAVE)
        self._expire = redis.register_script(scripts.EXPIRE)
        self._lease = redis.register_script(scripts.LEASE)
        self._release = redis.register_script(scripts.RELEASE)
        self._add_model = redis.register_script(scripts.ADD_MODEL)
        self._remove_model = redis.register_script(scripts.REMOVE_MODEL)
        self._next_epoch = redis.register_script(scripts.NEXT_EPOCH)
        self._retire = redis.register_script(scripts.RETIRE)
        self._unretire = redis.register_script(scripts.UNRETIRE)
        self._take_turn = redis.register_script(scripts.TAKE_TURN)

    @classmethod
    def connect(cls, url: str) -> Store:
        """A store on the Redis at ``url``; connects on first use."""
        return cls(Redis.from_url(url, socket_timeout=5.0, socket_connect_timeout=2.0))

    async def close(self) -> None:
        await self._redis.aclose()

    async def ping(self) -> None:
        await cast(Any, self._redis.ping())

    async def heartbeat(self, report: WorkerHeartbeat, lease_s: float) -> bool:
        """Store a worker's report and renew its lease; False for an outdated report."""
        worker = report.worker
        if report.leaving:
            keys = [f"{PREFIX}workers", f"{PREFIX}worker:{worker.worker_id}", f"{PREFIX}lease:{worker.worker_id}"]
            return bool(await self._leave(keys=keys, args=[worker.worker_id, worker.incarnation, PREFIX]))
        taken = await self._heartbeat(
            keys=[f"{PREFIX}workers", f"{PREFIX}worker:{worker.worker_id}", f"{PREFIX}lease:{worker.worker_id}"],
            args=[
                worker.worker_id,
                worker.incarnation,
                report.sequence,
                report.state,
                encode(report),
                round(lease_s * 1000),
                report.instance.epoch if report.instance else 0,
                PREFIX,
                msgspec.json.encode(complete_copies(report)),
            ],
        )
        return bool(taken)

    async def expire(self) -> tuple[str, ...]:
        """Forget the workers whose lease ran out; their ids."""
        return tuple(i.decode() for i in await self._expire(keys=[f"{PREFIX}workers"], args=[PREFIX]))

    async def worker_ids(self) -> tuple[str, ...]:
        """Of every living worker, in order."""
        return tuple(sorted(i.decode() for i in await cast(Any, self._redis.zrange(f"{PREFIX}workers", 0, -1))))

    async def workers(self) -> tuple[WorkerHeartbeat, ...]:
        """The latest report of every living worker, in the order of ids."""
        return await self.reports(await self.worker_ids())

    async def reports(self, worker_ids: tuple[str, ...]) -> tuple[WorkerHeartbeat, ...]:
        """The latest reports of these workers, in their order; without those that are gone by now."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker_id in worker_ids:
                pipe.hget(f"{PREFIX}worker:{worker_id}", "report")
            raw = await pipe.execute()
        reports = (_readable(value, WorkerHeartbeat, name) for name, value in zip(worker_ids, raw, strict=True))
        return tuple(report for report in reports if report is not None)

    async def leases(self, worker_ids: tuple[str, ...]) -> dict[str, Lease]:
        """Open leases of these workers."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker_id in worker_ids:
                pipe.hmget(f"{PREFIX}lease:{worker_id}", "plan", "model", "role")
            raw = await pipe.execute()
        return {
            worker_id: Lease(worker_id, plan.decode(), model.decode(), cast(Role, (role or b"colocated").decode()))
            for worker_id, (plan, model, role) in zip(worker_ids, raw, strict=True)
            if plan is not None
        }

    async def lease(
        self, plan_id: str, model: str, worker_ids: tuple[str, ...], ttl_s: float, role: Role = "colocated"
    ) -> LeaseGrant:
        """Lease spare workers for instances of ``role``, all or none. Raises ``ModelNotFound``, ``NoCapacity`` (a
        worker is gone) or ``Conflict`` (busy, or leased to another plan)."""
        answer = await self._lease(
            keys=[f"{PREFIX}workers", f"{PREFIX}epoch", f"{PREFIX}models"],
            args=[PREFIX, plan_id, model, role, round(ttl_s * 1000), *worker_ids],
        )
        verdict, *rest = [part.decode() for part in answer]
        if verdict == "ok":
            expires_ms, *epochs = rest
            return LeaseGrant(
                plan_id=plan_id,
                epochs=tuple(zip(worker_ids, map(int, epochs), strict=True)),
                expires_at_s=float(expires_ms) / 1000,
            )
        worker_id, why = rest
        if why == "model":
            raise ModelNotFound(f"model {model!r} is not registered", param="model")
        if why == "gone":
            raise NoCapacity(f"worker {worker_id} is gone")
        raise Conflict(f"worker {worker_id} is {why}")

    async def release(self, plan_id: str, worker_ids: tuple[str, ...]) -> int:
        """Give leases back; how many were still the plan's."""
        return int(await self._release(args=[PREFIX, plan_id, *worker_ids]))

    async def next_epoch(self) -> int:
        """An epoch that no lease and no other transfer has."""
        return int(await self._next_epoch(keys=[f"{PREFIX}workers", f"{PREFIX}epoch"]))

    async def retire(self, model_hash: str, copy_id: str, *, needed: bool, sequence: int = 0) -> bool:
        """Take a copy out of the count; False if it is the last of a model that is ``needed``: it counts on.

        It counts again, too, if its worker says so in a report after the one with this ``sequence``.
        """
        keys = [f"{PREFIX}copies:{model_hash}", f"{PREFIX}workers"]
        return bool(await self._retire(keys=keys, args=[copy_id, "1" if needed else "0", sequence]))

    async def unretire(self, model_hash: str, copy_id: str) -> None:
        """A copy counts again."""
        await self._unretire(keys=[f"{PREFIX}copies:{model_hash}"], args=[copy_id])

    async def take_turn(self, owner: str, ttl_s: float) -> bool:
        """Whether this process is the one that places host copies, now and for ``ttl_s``."""
        return bool(await self._take_turn(keys=[f"{PREFIX}placer"], args=[owner, round(ttl_s * 1000)]))

    async def set_unplaced(self, unplaced: tuple[Unplaced, ...]) -> None:
        """Keep the models that have no host copy, for every pool process to show."""
        await cast(Any, self._redis.set(f"{PREFIX}unplaced", msgspec.msgpack.encode(unplaced)))

    async def unplaced(self) -> tuple[Unplaced, ...]:
        raw = await cast(Any, self._redis.get(f"{PREFIX}unplaced"))
        with contextlib.suppress(msgspec.MsgspecError):  # of another version: as good as none
            return msgspec.msgpack.decode(raw, type=tuple[Unplaced, ...]) if raw else ()
        return ()

    async def add_model(self, record: ModelRecord, *, unless_removed: bool = False) -> ModelRecord | None:
        """Store a record under its name; the stored record (the older one if the name was taken).

        None when ``unless_removed`` and the model was removed on purpose.
        """
        answer = await self._add_model(
            keys=[f"{PREFIX}models", f"{PREFIX}removed"],
            args=[record.name, encode(record), "1" if unless_removed else "0"],
        )
        if answer == b"":
            return record
        return None if answer == b"removed" else decode(answer, ModelRecord)

    async def remove_model(self, name: str) -> bool:
        """Forget a model; False if there was none."""
        keys = [f"{PREFIX}models", f"{PREFIX}removed", f"{PREFIX}floors"]
        fields = [_floor_field(name, role) for role in get_args(Role)]
        return bool(await self._remove_model(keys=keys, args=[name, *fields]))

    async def models(self) -> tuple[ModelRecord, ...]:
        """All models, in the order of names."""
        raw = await cast(Any, self._redis.hgetall(f"{PREFIX}models"))
        records = (_readable(value, ModelRecord, name.decode()) for name, value in sorted(raw.items()))
        return tuple(record for record in records if record is not None)

    async def model(self, name: str) -> ModelRecord | None:
        raw = await cast(Any, self._redis.hget(f"{PREFIX}models", name))
        return _readable(raw, ModelRecord, name)

    async def was_removed(self, name: str) -> bool:
        """Whether the model was removed on purpose (rather than lost with Redis's data)."""
        return bool(await cast(Any, self._redis.hexists(f"{PREFIX}removed", name)))

    async def removed(self) -> frozenset[str]:
        """Names of all models that were removed on purpose."""
        return frozenset(name.decode() for name in await cast(Any, self._redis.hkeys(f"{PREFIX}removed")))

    async def set_floor(self, floor: Floor) -> None:
        """Set the manual floor of a model and role, in place of the one before."""
        field = _floor_field(floor.model, floor.role)
        await cast(Any, self._redis.hset(f"{PREFIX}floors", field, msgspec.msgpack.encode(floor)))

    async def lift_floor(self, model: str, role: Role) -> None:
        """Forget the manual floor of a model and role, if there is one."""
        await cast(Any, self._redis.hdel(f"{PREFIX}floors", _floor_field(model, role)))

    async def floors(self, now_s: float) -> tuple[Floor, ...]:
        """Floors in force at unix time ``now_s``."""
        raw = await cast(Any, self._redis.hgetall(f"{PREFIX}floors"))
        floors = []
        for _, value in sorted(raw.items()):
            with contextlib.suppress(msgspec.MsgspecError):  # of another version: as good as none
                floors.append(msgspec.msgpack.decode(value, type=Floor))
        return tuple(f for f in floors if f.until_s > now_s)

    async def next_sequence(self) -> tuple[str, int]:
        """(publisher, sequence) for the next event. Both are Redis's, so every pool process shares
        them, and an emptied Redis starts a new publisher that readers take for a gap."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(f"{PREFIX}publisher", secrets.token_hex(6), nx=True)
            pipe.get(f"{PREFIX}publisher")
            pipe.incr(f"{PREFIX}sequence")
            _, publisher, sequence = await pipe.execute()
        return publisher.decode(), int(sequence)

    async def sequence(self) -> tuple[str, int]:
        """(publisher, sequence) of the last event."""
        publisher, sequence = await cast(Any, self._redis.mget(f"{PREFIX}publisher", f"{PREFIX}sequence"))
        return (publisher or b"").decode(), int(sequence or 0)


def _floor_field(model: str, role: Role) -> str:
    """Names have no spaces, and colocated instances' floors are where they were before there were roles."""
    return model if role == "colocated" else f"{model} {role}"


def _readable(value: bytes | None, kind: type[M], name: str) -> M | None:
    """The record, or None for one that this version cannot read: one bad entry must not hide the others."""
    if value is None:
        return None
    try:
        return decode(value, kind)
    except MalformedMessage as error:
        log.error("%s in Redis is passed over: %s", name, error)
        return None
