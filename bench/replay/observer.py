"""Looks at a BlitzScale cluster through ``/admin`` while a replay runs. Other endpoints have none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from bench.replay.observations import ClusterLog
from bench.stream_client import Endpoint, StreamClient, StreamFailed
from shared.errors import Unauthorized
from shared.messages.admin import PoolStatus, Status, TrafficStatus
from shared.messages.operations import ScaleRecords

T = TypeVar("T")

INTERVAL_S = 0.2
SLOW_INTERVAL_S = 1.0
"""Of what asks every worker, or the planner."""
_TIMEOUT_S = 5.0


class Observer:
    """Of one model. Made by ``find``; close it."""

    def __init__(self, client: StreamClient, log: ClusterLog) -> None:
        self._client = client
        self._is_refused = False
        self.log = log

    @classmethod
    async def find(cls, endpoint: Endpoint, model: str, *, admin_key: str | None) -> Observer | None:
        """An observer, or None if the endpoint has no ``/admin`` that is ours. Raises ``Unauthorized`` if it has one,
        or something like it, and does not let this key in."""
        observer = cls(StreamClient(endpoint, api_key=admin_key), ClusterLog(model))
        status = await observer._get("/admin/status", Status)
        if status is not None and any(one.name == model for one in status.models):
            return observer
        observer.close()
        if observer._is_refused:
            raise Unauthorized("/admin wants an administrator's API key: set BLITZ_ADMIN_KEY")
        return None

    async def look(self, at_s: float) -> None:
        """At everything, once. What does not answer is not noted."""
        await self._look_at_state(at_s)
        await self._look_at_work(at_s)

    async def run(self, start_s: float) -> None:
        """Look until cancelled. ``start_s``: of the replay, as ``time.perf_counter()`` says it."""

        async def again(look: Callable[[float], Awaitable[None]], interval_s: float) -> None:
            while True:
                await look(time.perf_counter() - start_s)
                await asyncio.sleep(interval_s)

        # Apart: a worker that stands still holds up the second, and must not hold up the first.
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(again(self._look_at_state, INTERVAL_S))
            tasks.create_task(again(self._look_at_work, SLOW_INTERVAL_S))

    async def _look_at_state(self, at_s: float) -> None:
        if (status := await self._get("/admin/status", Status)) is not None:
            self.log.saw_status(at_s, status)
        if (pool := await self._get("/admin/pool", PoolStatus)) is not None:
            self.log.saw_pool(at_s, pool)

    async def _look_at_work(self, at_s: float) -> None:
        if (traffic := await self._get("/admin/traffic", TrafficStatus)) is not None:
            self.log.saw_traffic(at_s, traffic)
        if (operations := await self._get("/admin/scale?limit=100", ScaleRecords)) is not None:
            self.log.saw_operations(operations.records)

    async def _get(self, path: str, kind: type[T]) -> T | None:
        try:
            reply = await self._client.request("GET", path, timeout_s=_TIMEOUT_S)
            self._is_refused = reply.status in (401, 403)
            return msgspec.json.decode(reply.body, type=kind) if reply.status == 200 else None
        except (StreamFailed, msgspec.MsgspecError):
            return None

    def close(self) -> None:
        self._client.close()
