"""All that Redis holds, read by a process that begins to lead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec
from redis.asyncio import Redis

from services.pool.core.worker_entry import Lease
from services.pool.scripts import PREFIX
from shared.messages.codec import M, MalformedMessage, decode
from shared.messages.common import MAX_COUNT, Role
from shared.messages.registry import Floor, ModelRecord, Unplaced, WorkerHeartbeat

log = logging.getLogger(__name__)

MAX_TIME_S = 1e11
"""Of Unix times: 3,000 years."""


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """All that Redis holds, for a process that begins to lead."""

    models: tuple[ModelRecord, ...]
    removed: Mapping[str, float]
    """Names, and when (monotonic, like all times here: before now, and maybe negative)."""
    floors: tuple[Floor, ...]
    unplaced: tuple[Unplaced, ...]
    reports: tuple[WorkerHeartbeat, ...]
    leases: tuple[Lease, ...]
    """Their ``until_s`` counts from now."""
    retired: tuple[tuple[str, str], ...]
    """(worker id, copy id) of copies that may go."""
    cordons: Mapping[str, float]
    """Workers that are to be free, and when each last lived."""


async def recover(redis: Redis, now_s: float) -> RecoveredState:
    """Everything, as of now (monotonic)."""
    worker_ids = await worker_ids_in(redis)
    redis_now_s = await _redis_now_s(redis)
    models = await _models(redis)
    hashes = sorted({m.model_hash for m in models})
    async with redis.pipeline(transaction=False) as pipe:
        for worker_id in worker_ids:
            pipe.hget(f"{PREFIX}worker:{worker_id}", "report")
            pipe.hmget(f"{PREFIX}lease:{worker_id}", "plan", "model", "role", "epoch")
            pipe.pttl(f"{PREFIX}lease:{worker_id}")
        raw = await pipe.execute()
    async with redis.pipeline(transaction=False) as pipe:
        for model_hash in hashes:
            pipe.hgetall(f"{PREFIX}copies:{model_hash}")
        copies = await pipe.execute()
    reports = (_readable(r, WorkerHeartbeat, w) for w, r in zip(worker_ids, raw[::3], strict=True))
    retired = [_text(i) for held in copies for i, serial in held.items() if serial.startswith(b"retired:")]
    removed = await cast(Any, redis.hgetall(f"{PREFIX}removed"))
    cordons = await cast(Any, redis.hgetall(f"{PREFIX}cordons"))
    leases = (
        _lease(w, fields, now_s + max(0, left_ms) / 1000)
        for w, fields, left_ms in zip(worker_ids, raw[1::3], raw[2::3], strict=True)
    )
    return RecoveredState(
        models=models,
        removed=_times(removed, now_s - redis_now_s),
        floors=await _floors(redis, redis_now_s),
        unplaced=await _unplaced(redis),
        reports=tuple(report for report in reports if report is not None),
        leases=tuple(lease for lease in leases if lease is not None),
        cordons=_times(cordons, now_s - redis_now_s),
        retired=tuple((copy_id.partition("/")[0], copy_id) for copy_id in retired),
    )


async def worker_ids_in(redis: Redis) -> tuple[str, ...]:
    """Of all workers that Redis holds, in order."""
    return tuple(sorted(map(_text, await cast(Any, redis.zrange(f"{PREFIX}workers", 0, -1)))))


async def _models(redis: Redis) -> tuple[ModelRecord, ...]:
    """All models, in the order of names."""
    raw = await cast(Any, redis.hgetall(f"{PREFIX}models"))
    records = (_readable(value, ModelRecord, _text(name)) for name, value in sorted(raw.items()))
    return tuple(record for record in records if record is not None)


async def _redis_now_s(redis: Redis) -> float:
    """By the clock that wrote the times that Redis holds."""
    seconds, micros = await cast(Any, redis.time())
    return float(seconds) + float(micros) / 1e6


async def _floors(redis: Redis, redis_now_s: float) -> tuple[Floor, ...]:
    """Floors in force, with what they have left."""
    raw = await cast(Any, redis.hgetall(f"{PREFIX}floors"))
    floors = []
    for _, value in sorted(raw.items()):
        ends_ms, _, encoded = value.partition(b":")
        with contextlib.suppress(msgspec.MsgspecError, ValueError):  # of another version: treated as missing
            floor = msgspec.msgpack.decode(encoded, type=Floor)
            floors.append(msgspec.structs.replace(floor, left_s=_seconds(ends_ms) - redis_now_s))
    return tuple(f for f in floors if f.left_s > 0)


async def _unplaced(redis: Redis) -> tuple[Unplaced, ...]:
    raw = await cast(Any, redis.get(f"{PREFIX}unplaced"))
    with contextlib.suppress(msgspec.MsgspecError):  # of another version: treated as missing
        return msgspec.msgpack.decode(raw, type=tuple[Unplaced, ...]) if raw else ()
    return ()


def _text(raw: bytes) -> str:
    """A name; something that is none, but can be shown, for bytes that are no text."""
    return raw.decode(errors="backslashreplace")


def _seconds(raw_ms: bytes) -> float:
    """Raises ``ValueError`` for what is no time."""
    at_s = float(raw_ms) / 1000
    if not 0 <= at_s <= MAX_TIME_S:
        raise ValueError(f"{raw_ms[:40]!r} is no time")
    return at_s


def _times(raw: Mapping[bytes, bytes], since_redis_s: float) -> dict[str, float]:
    """By name; without those that are no times. ``since_redis_s``: to be added to Redis's times."""
    times = {}
    for name, at_ms in raw.items():
        with contextlib.suppress(ValueError):
            times[_text(name)] = _seconds(at_ms) + since_redis_s
    return times


def _lease(worker_id: str, fields: Sequence[bytes | None], until_s: float) -> Lease | None:
    """None for none, and for one that this version cannot read: whoever was leased it asks again."""
    plan, model, role, epoch = (field.decode(errors="replace") if field is not None else None for field in fields)
    if plan is None:
        return None
    role = role or "colocated"
    if model is None or role not in get_args(Role) or not (epoch or "").isdecimal() or int(epoch or "") > MAX_COUNT:
        log.error("the lease of worker %s in Redis is passed over", worker_id)
        return None
    return Lease(worker_id, plan, model, cast(Role, role), int(epoch or ""), until_s)


def _readable(value: bytes | None, kind: type[M], name: str) -> M | None:
    """The record; None if this version cannot read it: one bad entry must not hide the others."""
    if value is None:
        return None
    try:
        return decode(value, kind)
    except MalformedMessage as error:
        log.error("%s in Redis is passed over: %s", name, error)
        return None
