"""The registry in Redis: every change is one atomic script (``services.pool.scripts``)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.commands.core import AsyncScript
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from services.pool import scripts
from services.pool.core.copies import complete_copies
from services.pool.core.worker_entry import Lease
from services.pool.recovery import RecoveredState, recover, worker_ids_in
from services.pool.redis_password import FilePassword
from services.pool.scripts import PREFIX
from shared.errors import BadRequest, Conflict, ModelNotFound, NoCapacity, NotPermitted, Unavailable, WrongCluster
from shared.messages.codec import decode, encode
from shared.messages.common import Role
from shared.messages.registry import Floor, LeaseGrant, ModelRecord, Unplaced, WorkerHeartbeat
from shared.subjects import MAX_NAME, Process

log = logging.getLogger(__name__)

_BATCH = 1000
"""Workers in one command."""
MAX_CONNECTIONS = 32
"""To Redis, which does one thing at a time: more would only wait there."""
CONNECTION_WAIT_S = 5.0
"""The wait for one of them when all are in use: all workers may register in the same moment."""
CONNECT_TIMEOUT_S = 2.0
MAX_DIGITS = 16
"""Of a term."""
WRONG_TYPE = "WRONGTYPE"
"""In Redis's errors."""


@dataclass(frozen=True, slots=True)
class LeaderStatus:
    """Whether this process leads, and else which one does."""

    leads: bool
    term: int
    leader: str
    expires_in_s: float
    terms_lost: bool = False
    """Redis forgot this owner's term: it lost its data."""
    same_seat: bool = False
    """The other leader has the same seat as the process that asked."""


class Store:
    """All methods raise ``redis.RedisError`` when Redis cannot answer, and, once ``fence`` was called, ``Unavailable``
    instead of changing anything when this process no longer leads."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._fence = ""
        self._known: dict[str, AsyncScript] = {}
        self.has_strangers = False
        """A step met a key of another type than this version writes: ``set_aside`` clears the way."""

    async def _run(self, text: str, *, keys: Sequence[str] = (), args: Sequence[Any] = (), fenced: bool = True) -> Any:
        """A script; if it is ``fenced``, only while this process leads."""
        script = self._known.get(text)
        if script is None:
            script = self._known[text] = self._redis.register_script(scripts.FENCE + text if fenced else text)
        try:
            return await script(keys=[*keys, self._fence] if fenced else keys, args=args)
        except ResponseError as error:
            if scripts.NOT_LEADING in str(error):
                raise Unavailable("this pool process does not lead any more", retry_after_s=0.5) from error
            self.has_strangers = self.has_strangers or WRONG_TYPE in str(error)
            raise

    @classmethod
    def connect(cls, url: str, password: str | None = None, password_file: Path | None = None) -> Store:
        """A store on the Redis at ``url``, whose own password wins; connects on first use. ``password_file``: where the
        password was read, and is read again for every connection."""
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=CONNECTION_WAIT_S,
            socket_timeout=5.0,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
        )
        known = pool.connection_kwargs
        if password is not None and "password" not in known:
            if password_file is None:
                known["password"] = password
            else:
                # redis-py takes either a user or a provider.
                user = known.pop("username", "")
                known["credential_provider"] = FilePassword(password_file, password, user)
        return cls(Redis.from_pool(pool))

    async def close(self) -> None:
        await self._redis.aclose()

    async def check_password(self) -> None:
        """Raises ``NotPermitted`` when Redis refuses it; while Redis is away it is not known, and tried later."""
        try:
            await cast(Any, self._redis.ping())
        except RedisError as error:
            if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
                known = self._redis.connection_pool.connection_kwargs
                if known.get("password") is None and "credential_provider" not in known:
                    raise NotPermitted("Redis wants a password: set BLITZ_REDIS_PASSWORD_FILE") from error
                raise NotPermitted(f"Redis refuses the password (BLITZ_REDIS_PASSWORD_FILE): {error}") from error

    async def heartbeat(self, report: WorkerHeartbeat, lease_s: float) -> bool:
        """Store a worker's report and renew its lease; False for an outdated report."""
        worker = report.worker
        if report.leaving:
            keys = [f"{PREFIX}workers", f"{PREFIX}worker:{worker.worker_id}", f"{PREFIX}lease:{worker.worker_id}"]
            return bool(await self._run(scripts.LEAVE, keys=keys, args=[worker.worker_id, worker.incarnation, PREFIX]))
        taken = await self._run(
            scripts.HEARTBEAT,
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
        await self._run(scripts.FORGET, keys=[f"{PREFIX}workers"], args=[PREFIX, *worker_ids])

    async def renew(self, leases: Mapping[str, float]) -> None:
        """Let the leases of these workers run for so many seconds from now; of those that are gone, none."""
        if not leases:
            return
        seconds, micros = await cast(Any, self._redis.time())
        now_ms = seconds * 1000 + micros // 1000
        until = [str(item) for name, left_s in leases.items() for item in (now_ms + round(left_s * 1000), name)]
        for begin in range(0, len(until), 2 * _BATCH):
            await self._run(scripts.CALL, args=["ZADD", f"{PREFIX}workers", "XX", *until[begin : begin + 2 * _BATCH]])

    async def recover(self, now_s: float) -> RecoveredState:
        """Everything, as of now (monotonic)."""
        try:
            return await recover(self._redis, now_s)
        except ResponseError as error:
            self.has_strangers = self.has_strangers or WRONG_TYPE in str(error)
            raise

    async def lead(
        self, service: str, owner: str, ttl_s: float, *, seat: str = "", last_term: int = 0, cluster: str = ""
    ) -> LeaderStatus:
        """Lead a kind of service, or go on; for ``ttl_s`` from now.

        ``seat``: of processes with one seat only one lives, so a new one need not wait until the old one's lease ends.
        ``last_term``: of this owner; 0 if it never led. Raises ``BadRequest`` if no leader can have had it.
        ``cluster``: the first that comes has this Redis; raises ``WrongCluster`` for another. Empty: not asked.
        """
        fence = f"{PREFIX}leads:" if service == "pool" else ""
        keys = [f"{PREFIX}leader:{service}", f"{PREFIX}terms", f"{PREFIX}cluster"]
        args = [service, owner, round(ttl_s * 1000), seat, str(last_term), fence, cluster]
        answer = await self._run(scripts.LEAD, keys=keys, args=args, fenced=False)
        verdict, *rest = [part.decode(errors="replace") for part in answer]
        if verdict == "ahead":
            raise BadRequest(f"no {service} can have led with term {last_term} yet", param="term")
        if verdict == "other":
            raise WrongCluster(
                f"this Redis holds the registry of the cluster {rest[0][:MAX_NAME]!r}, and BLITZ_CLUSTER is "
                f"{cluster!r}: give each its own Redis, or delete the key {PREFIX}cluster if it has another name now"
            )
        term, leader, left_ms, flag = rest
        leads = verdict == "1"
        return LeaderStatus(
            leads=leads,
            term=int(term),
            leader=leader,
            expires_in_s=int(left_ms) / 1000,
            # A term that was never given before this owner's first is no loss.
            terms_lost=leads and flag == "1" and last_term > 0,
            same_seat=not leads and flag == "1",
        )

    async def set_aside(self) -> None:
        """Rename keys of a type that this version never writes: they stop every step that needs them."""
        cursor, moved = "0", list[str]()
        while True:
            found = await self._run(scripts.SET_ASIDE, args=[PREFIX, cursor], fenced=False)
            cursor, *keys = [part.decode(errors="replace") for part in found]
            moved += keys
            if cursor == "0":
                break
        self.has_strangers = False
        if moved:
            log.error("Redis held keys that no pool wrote, now %sunreadable:…: %.300s", PREFIX, ", ".join(moved))

    async def abdicate(self, service: str, owner: str) -> None:
        """Lead no longer: the next that asks may."""
        fence = f"{PREFIX}leads:" if service == "pool" else ""
        await self._run(scripts.ABDICATE, keys=[f"{PREFIX}leader:{service}"], args=[owner, fence], fenced=False)

    def fence(self, owner: str) -> None:
        """From now on change nothing unless ``owner`` leads the pools."""
        self._fence = f"{PREFIX}leads:{owner}"

    async def term(self, service: str) -> int:
        """The newest term of a service's leaders; 0 if it never had one."""
        known = await cast(Any, self._redis.hget(f"{PREFIX}terms", service)) or b"0"
        return int(known) if known.isdigit() and len(known) <= MAX_DIGITS else 0

    async def lease(
        self, plan_id: str, model: str, workers: Sequence[Process], ttl_s: float, role: Role = "colocated"
    ) -> LeaseGrant:
        """Lease spare workers for instances of ``role``, all or none. Raises ``ModelNotFound``, ``NoCapacity`` (a
        worker is gone) or ``Conflict`` (busy, leased to another plan, or another process)."""
        answer = await self._run(
            scripts.LEASE,
            keys=[f"{PREFIX}workers", f"{PREFIX}epoch", f"{PREFIX}models"],
            args=[PREFIX, plan_id, model, role, round(ttl_s * 1000), *chain.from_iterable(workers)],
        )
        verdict, *rest = [part.decode() for part in answer]
        if verdict == "ok":
            return LeaseGrant(plan_id=plan_id, epochs=tuple(zip((w.id for w in workers), map(int, rest), strict=True)))
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
            await self._run(scripts.PUT_LEASE, keys=[f"{PREFIX}lease:{lease.worker_id}"], args=args)

    async def release(self, plan_id: str, worker_ids: tuple[str, ...]) -> int:
        """Give leases back; how many were still the plan's."""
        return int(await self._run(scripts.RELEASE, args=[PREFIX, plan_id, *worker_ids]))

    async def next_epoch(self, given: int = 0) -> int:
        """An epoch that no lease and no other transfer has, higher than one that was ``given`` out."""
        return int(await self._run(scripts.NEXT_EPOCH, keys=[f"{PREFIX}workers", f"{PREFIX}epoch"], args=[given]))

    async def retire(self, model_hash: str, copy_id: str, *, needed: bool, sequence: int = 0) -> bool:
        """Take a copy out of the count; False if it is the last of a model that is ``needed``: it counts on.

        It counts again, too, if its worker says so in a report after the one with this ``sequence``.
        """
        keys = [f"{PREFIX}copies:{model_hash}", f"{PREFIX}workers"]
        return bool(await self._run(scripts.RETIRE, keys=keys, args=[copy_id, "1" if needed else "0", sequence]))

    async def unretire(self, model_hash: str, copy_id: str) -> None:
        """A copy counts again."""
        await self._run(scripts.UNRETIRE, keys=[f"{PREFIX}copies:{model_hash}"], args=[copy_id])

    async def set_unplaced(self, unplaced: tuple[Unplaced, ...]) -> None:
        """Keep the models that have no host copy, so that every pool process can show them."""
        await self._run(scripts.CALL, args=["SET", f"{PREFIX}unplaced", msgspec.msgpack.encode(unplaced)])

    async def add_model(self, record: ModelRecord, *, unless_removed: bool = False) -> ModelRecord | None:
        """Store a record under its name; the stored record (the older one if the name was taken).

        None when ``unless_removed`` and the model was removed on purpose.
        """
        answer = await self._run(
            scripts.ADD_MODEL,
            keys=[f"{PREFIX}models", f"{PREFIX}removed"],
            args=[record.name, encode(record), "1" if unless_removed else "0"],
        )
        if answer == b"":
            return record
        return None if answer == b"removed" else decode(answer, ModelRecord)

    async def set_model(self, record: ModelRecord) -> bool:
        """Store other settings of a registered model; False if it was removed, or added again, since the record was
        read."""
        args = [record.name, encode(record), record.model_hash, repr(record.added_at_s)]
        return bool(await self._run(scripts.SET_MODEL, keys=[f"{PREFIX}models"], args=args))

    async def remove_model(self, name: str) -> bool:
        """Forget a model; False if there was none."""
        keys = [f"{PREFIX}models", f"{PREFIX}removed", f"{PREFIX}floors"]
        fields = [_floor_field(name, role) for role in get_args(Role)]
        return bool(await self._run(scripts.REMOVE_MODEL, keys=keys, args=[name, *fields]))

    async def replace_models(
        self, models: Iterable[ModelRecord], removed: Mapping[str, float], floors: Iterable[Floor], now_s: float
    ) -> None:
        """These models are registered, these were removed on purpose (and when, as ``now_s`` is measured), these floors
        are set; and no others."""
        await self._run(
            scripts.REPLACE, keys=[f"{PREFIX}models"], args=[a for m in models for a in (m.name, encode(m))]
        )
        await self._run(scripts.REPLACE_TIMES, keys=[f"{PREFIX}removed"], args=_ages(removed, now_s))
        await self._run(scripts.REPLACE, keys=[f"{PREFIX}floors"], args=[])
        for floor in floors:
            await self.set_floor(floor)

    async def worker_ids(self) -> tuple[str, ...]:
        """Of all workers that Redis holds, in order."""
        return await worker_ids_in(self._redis)

    async def run_id(self) -> str:
        """Of the Redis process that answers: another after a restart, or when a replica took over."""
        return str((await cast(Any, self._redis.info("server")))["run_id"])

    async def forget_removed(self, names: Sequence[str]) -> None:
        """Forget that these models were removed."""
        if names:
            await self._run(scripts.CALL, args=["HDEL", f"{PREFIX}removed", *names])

    async def set_cordons(self, last_alive_s: Mapping[str, float], now_s: float) -> None:
        """These workers, and no others, are to be free; when each last lived, as ``now_s`` is measured."""
        await self._run(scripts.REPLACE_TIMES, keys=[f"{PREFIX}cordons"], args=_ages(last_alive_s, now_s))

    async def set_floor(self, floor: Floor) -> None:
        """Set the manual floor of a model and role, in place of the one before."""
        args = [_floor_field(floor.model, floor.role), msgspec.msgpack.encode(floor), round(floor.left_s * 1000)]
        await self._run(scripts.SET_FLOOR, keys=[f"{PREFIX}floors"], args=args)

    async def lift_floor(self, model: str, role: Role) -> None:
        """Forget the manual floor of a model and role, if there is one."""
        await self._run(scripts.CALL, args=["HDEL", f"{PREFIX}floors", _floor_field(model, role)])


def _ages(times: Mapping[str, float], now_s: float) -> list[str]:
    """Names, each followed by how many milliseconds ago that was."""
    return [a for name, at_s in times.items() for a in (name, str(round((now_s - at_s) * 1000)))]


def _floor_field(model: str, role: Role) -> str:
    """Names have no spaces, and colocated instances' floors are where they were before there were roles."""
    return model if role == "colocated" else f"{model} {role}"
