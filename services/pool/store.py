"""The registry in Redis: every change is one atomic script (``services.pool.scripts``)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from services.pool import scripts
from services.pool.core.copies import complete_copies
from services.pool.core.leases import Lease
from shared.errors import Conflict, ModelNotFound, NoCapacity, NotPermitted, Unavailable
from shared.messages.codec import M, MalformedMessage, decode, encode
from shared.messages.common import Role
from shared.messages.registry import Floor, LeaseGrant, ModelRecord, Unplaced, WorkerHeartbeat

log = logging.getLogger(__name__)

PREFIX = "blitz:"
_BATCH = 1000
"""Workers in one command."""
MAX_CONNECTIONS = 32
"""To Redis, which does one thing at a time: more would only wait there."""
CONNECTION_WAIT_S = 5.0
"""For one of them, when more is to be done at once: all workers may register in the same moment."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What became of the wish to lead."""

    leads: bool
    term: int
    leader: str
    expires_in_s: float
    terms_lost: bool = False
    """Redis forgot this owner's term: it lost its data."""
    same_seat: bool = False
    """The leader that is in the way has the seat of the one that asked."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """All that Redis holds, for a process that begins to lead."""

    models: tuple[ModelRecord, ...]
    removed: Mapping[str, float]
    """Names, and when (unix time)."""
    floors: tuple[Floor, ...]
    unplaced: tuple[Unplaced, ...]
    reports: tuple[WorkerHeartbeat, ...]
    leases: tuple[Lease, ...]
    """Their ``until_s`` counts from now."""
    retired: tuple[tuple[str, str], ...]
    """(worker id, copy id) of copies that may go."""


class Store:
    """All methods raise ``redis.RedisError`` when Redis cannot answer, and, once ``fence`` was called, ``Unavailable``
    instead of changing anything when this process leads no more."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._fence = ""
        self._call = self._script(scripts.CALL)
        self._heartbeat = self._script(scripts.HEARTBEAT)
        self._leave = self._script(scripts.LEAVE)
        self._forget = self._script(scripts.FORGET)
        self._put_lease = self._script(scripts.PUT_LEASE)
        self._lease = self._script(scripts.LEASE)
        self._release = self._script(scripts.RELEASE)
        self._add_model = self._script(scripts.ADD_MODEL)
        self._remove_model = self._script(scripts.REMOVE_MODEL)
        self._next_epoch = self._script(scripts.NEXT_EPOCH)
        self._replace = self._script(scripts.REPLACE)
        self._raise_epoch = self._script(scripts.RAISE_EPOCH)
        self._retire = self._script(scripts.RETIRE)
        self._unretire = self._script(scripts.UNRETIRE)
        self._lead = redis.register_script(scripts.LEAD)
        self._abdicate = redis.register_script(scripts.ABDICATE)

    def _script(self, text: str) -> Callable[..., Awaitable[Any]]:
        script = self._redis.register_script(scripts.FENCE + text)

        async def run(*, keys: Sequence[str] = (), args: Sequence[Any] = ()) -> Any:
            try:
                return await script(keys=[*keys, self._fence], args=args)
            except ResponseError as error:
                if scripts.NOT_LEADING in str(error):
                    raise Unavailable("this pool process does not lead any more", retry_after_s=0.5) from error
                raise

        return run

    @classmethod
    def connect(cls, url: str, password: str | None = None) -> Store:
        """A store on the Redis at ``url``, whose own password wins; connects on first use."""
        pool = BlockingConnectionPool.from_url(
            url,
            password=password,
            max_connections=MAX_CONNECTIONS,
            timeout=CONNECTION_WAIT_S,
            socket_timeout=5.0,
            socket_connect_timeout=2.0,
        )
        return cls(Redis.from_pool(pool))

    async def close(self) -> None:
        await self._redis.aclose()

    async def check_password(self) -> None:
        """Raises ``NotPermitted`` when Redis refuses it; while Redis is away it is not known, and tried later."""
        try:
            await cast(Any, self._redis.ping())
        except RedisError as error:
            if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
                if self._redis.connection_pool.connection_kwargs.get("password") is None:
                    raise NotPermitted("Redis wants a password: set BLITZ_REDIS_PASSWORD_FILE") from error
                raise NotPermitted(f"Redis refuses the password (BLITZ_REDIS_PASSWORD_FILE): {error}") from error

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
                # No plan may lease a worker that is about to end.
                "stopping" if report.stopping else report.state,
                encode(report),
                round(lease_s * 1000),
                report.instance.epoch if report.instance else 0,
                PREFIX,
                msgspec.json.encode(complete_copies(report)),
            ],
        )
        return bool(taken)

    async def forget(self, worker_ids: Sequence[str]) -> None:
        """These workers are dead."""
        await self._forget(keys=[f"{PREFIX}workers"], args=[PREFIX, *worker_ids])

    async def renew(self, leases: Mapping[str, float]) -> None:
        """Let the leases of these workers run for so many seconds from now; of those that are gone, none."""
        if not leases:
            return
        seconds, micros = await cast(Any, self._redis.time())
        now_ms = seconds * 1000 + micros // 1000
        until = [str(item) for name, left_s in leases.items() for item in (now_ms + round(left_s * 1000), name)]
        for begin in range(0, len(until), 2 * _BATCH):
            await self._call(args=["ZADD", f"{PREFIX}workers", "XX", *until[begin : begin + 2 * _BATCH]])

    async def remember(self, now_s: float, unix_s: float) -> Remembered:
        """Everything, as of now (``now_s`` monotonic, ``unix_s`` unix time)."""
        worker_ids = await self.worker_ids()
        models = await self._models()
        hashes = sorted({m.model_hash for m in models})
        async with self._redis.pipeline(transaction=False) as pipe:
            for worker_id in worker_ids:
                pipe.hget(f"{PREFIX}worker:{worker_id}", "report")
                pipe.hmget(f"{PREFIX}lease:{worker_id}", "plan", "model", "role", "epoch")
                pipe.pttl(f"{PREFIX}lease:{worker_id}")
            raw = await pipe.execute()
        async with self._redis.pipeline(transaction=False) as pipe:
            for model_hash in hashes:
                pipe.hgetall(f"{PREFIX}copies:{model_hash}")
            copies = await pipe.execute()
        reports = (_readable(r, WorkerHeartbeat, w) for w, r in zip(worker_ids, raw[::3], strict=True))
        retired = [i.decode() for held in copies for i, serial in held.items() if serial.startswith(b"retired:")]
        removed = await cast(Any, self._redis.hgetall(f"{PREFIX}removed"))
        return Remembered(
            models=models,
            removed={name.decode(): float(at_ms) / 1000 for name, at_ms in removed.items()},
            floors=await self._floors(unix_s),
            unplaced=await self._unplaced(),
            reports=tuple(report for report in reports if report is not None),
            leases=tuple(
                Lease(w, plan.decode(), model.decode(), _role(role), int(epoch), now_s + max(0, left_ms) / 1000)
                for w, (plan, model, role, epoch), left_ms in zip(worker_ids, raw[1::3], raw[2::3], strict=True)
                if plan is not None
            ),
            retired=tuple((copy_id.partition("/")[0], copy_id) for copy_id in retired),
        )

    async def lead(self, service: str, owner: str, ttl_s: float, *, seat: str = "", last_term: int = 0) -> Standing:
        """Lead a kind of service, or go on; for ``ttl_s`` from now.

        ``seat``: of processes with one seat only one lives, so a new one need not wait until the old one's lease ends.
        ``last_term``: of this owner; 0 if it never led.
        """
        fence = f"{PREFIX}leads:" if service == "pool" else ""
        keys = [f"{PREFIX}leader:{service}", f"{PREFIX}terms"]
        answer = await self._lead(keys=keys, args=[service, owner, round(ttl_s * 1000), seat, str(last_term), fence])
        verdict, term, leader, left_ms, flag = [part.decode() for part in answer]
        leads = verdict == "1"
        return Standing(
            leads=leads,
            term=int(term),
            leader=leader,
            expires_in_s=int(left_ms) / 1000,
            # A term that was never given before this owner's first is no loss.
            terms_lost=leads and flag == "1" and last_term > 0,
            same_seat=not leads and flag == "1",
        )

    async def abdicate(self, service: str, owner: str) -> None:
        """Lead no longer: the next that asks may."""
        fence = f"{PREFIX}leads:" if service == "pool" else ""
        await self._abdicate(keys=[f"{PREFIX}leader:{service}"], args=[owner, fence])

    def fence(self, owner: str) -> None:
        """From now on change nothing unless ``owner`` leads the pools."""
        self._fence = f"{PREFIX}leads:{owner}"

    async def term(self, service: str) -> int:
        """The newest term of a service's leaders; 0 if it never had one."""
        return int(await cast(Any, self._redis.hget(f"{PREFIX}terms", service)) or 0)

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

    async def put_lease(self, lease: Lease, left_s: float) -> None:
        """Redis is to know a lease again."""
        left_ms = round(left_s * 1000)
        if left_ms > 0:
            args = [lease.plan_id, lease.model, lease.role, str(lease.epoch), left_ms]
            await self._put_lease(keys=[f"{PREFIX}lease:{lease.worker_id}"], args=args)

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

    async def set_unplaced(self, unplaced: tuple[Unplaced, ...]) -> None:
        """Keep the models that have no host copy, for every pool process to show."""
        await self._call(args=["SET", f"{PREFIX}unplaced", msgspec.msgpack.encode(unplaced)])

    async def _unplaced(self) -> tuple[Unplaced, ...]:
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

    async def _models(self) -> tuple[ModelRecord, ...]:
        """All models, in the order of names."""
        raw = await cast(Any, self._redis.hgetall(f"{PREFIX}models"))
        records = (_readable(value, ModelRecord, name.decode()) for name, value in sorted(raw.items()))
        return tuple(record for record in records if record is not None)

    async def replace_models(
        self, models: Iterable[ModelRecord], removed: Mapping[str, float], floors: Iterable[Floor]
    ) -> None:
        """These models are registered, these were removed on purpose at those unix times, these floors are set; and
        no others."""
        await self._replace(keys=[f"{PREFIX}models"], args=[a for m in models for a in (m.name, encode(m))])
        at_ms = [a for name, at_s in removed.items() for a in (name, str(round(at_s * 1000)))]
        await self._replace(keys=[f"{PREFIX}removed"], args=at_ms)
        encoded = [a for f in floors for a in (_floor_field(f.model, f.role), msgspec.msgpack.encode(f))]
        await self._replace(keys=[f"{PREFIX}floors"], args=encoded)

    async def raise_epoch(self, least: int) -> None:
        """That epoch was given out: no lease gets it again."""
        await self._raise_epoch(keys=[f"{PREFIX}workers", f"{PREFIX}epoch"], args=[least])

    async def worker_ids(self) -> tuple[str, ...]:
        """Of all workers that Redis holds, in order."""
        return tuple(sorted(i.decode() for i in await cast(Any, self._redis.zrange(f"{PREFIX}workers", 0, -1))))

    async def run_id(self) -> str:
        """Of the Redis process that answers: another after a restart, or when a replica took over."""
        return str((await cast(Any, self._redis.info("server")))["run_id"])

    async def forget_removed(self, names: Sequence[str]) -> None:
        """Nobody needs to know any more that these models were removed."""
        if names:
            await self._call(args=["HDEL", f"{PREFIX}removed", *names])

    async def set_floor(self, floor: Floor) -> None:
        """Set the manual floor of a model and role, in place of the one before."""
        field = _floor_field(floor.model, floor.role)
        await self._call(args=["HSET", f"{PREFIX}floors", field, msgspec.msgpack.encode(floor)])

    async def lift_floor(self, model: str, role: Role) -> None:
        """Forget the manual floor of a model and role, if there is one."""
        await self._call(args=["HDEL", f"{PREFIX}floors", _floor_field(model, role)])

    async def _floors(self, now_s: float) -> tuple[Floor, ...]:
        """Floors in force at unix time ``now_s``."""
        raw = await cast(Any, self._redis.hgetall(f"{PREFIX}floors"))
        floors = []
        for _, value in sorted(raw.items()):
            with contextlib.suppress(msgspec.MsgspecError):  # of another version: as good as none
                floors.append(msgspec.msgpack.decode(value, type=Floor))
        return tuple(f for f in floors if f.until_s > now_s)


def _floor_field(model: str, role: Role) -> str:
    """Names have no spaces, and colocated instances' floors are where they were before there were roles."""
    return model if role == "colocated" else f"{model} {role}"


def _role(raw: bytes | None) -> Role:
    return cast(Role, (raw or b"colocated").decode())


def _readable(value: bytes | None, kind: type[M], name: str) -> M | None:
    """The record, or None for one that this version cannot read: one bad entry must not hide the others."""
    if value is None:
        return None
    try:
        return decode(value, kind)
    except MalformedMessage as error:
        log.error("%s in Redis is passed over: %s", name, error)
        return None
