"""Looks at a BlitzScale cluster through ``/admin`` while a replay runs. Other endpoints have none."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

import msgspec

from bench.replay.observations import ClusterLog
from bench.stream_client import Endpoint, StreamClient, StreamFailed
from shared.messages.admin import PoolStatus, Status, TrafficStatus
from shared.messages.scaling import ScaleRecords

T = TypeVar("T")

INTERVAL_S = 0.2
_SLOWLY = 5
"""Each so many looks, also what asks every worker, or the planner."""
_TIMEOUT_S = 5.0


class Observer:
    """Of one model. Made by ``find``; close it."""

    def __init__(self, client: StreamClient, log: ClusterLog) -> None:
        self._client = client
        self.log = log

    @classmethod
    async def find(cls, endpoint: Endpoint, model: str, *, admin_key: str | None) -> Observer | None:
        """An observer, or None if the endpoint has no ``/admin`` that is ours, or does not let this key in."""
        observer = cls(StreamClient(endpoint, api_key=admin_key), ClusterLog(model))
        status = await observer._get("/admin/status", Status)
        if status is not None and any(one.name == model for one in status.models):
            return observer
        observer.close()
        return None

    async def look(self, at_s: float, *, at_everything: bool) -> None:
        """Once. What does not answer is not noted."""
        if (status := await self._get("/admin/status", Status)) is not None:
            self.log.saw_status(at_s, status)
        if (pool := await self._get("/admin/pool", PoolStatus)) is not None:
            self.log.saw_pool(at_s, pool)
        if not at_everything:
            return
        if (traffic := await self._get("/admin/traffic", TrafficStatus)) is not None:
            self.log.saw_traffic(at_s, traffic)
        if (operations := await self._get("/admin/scale?limit=100", ScaleRecords)) is not None:
            self.log.saw_operations(operations.records)

    async def run(self, start_s: float) -> None:
        """Look until cancelled. ``start_s``: of the replay, as ``time.perf_counter()`` says it."""
        count = 0
        while True:
            await self.look(time.perf_counter() - start_s, at_everything=count % _SLOWLY == 0)
            count += 1
            await asyncio.sleep(INTERVAL_S)

    async def _get(self, path: str, kind: type[T]) -> T | None:
        try:
            reply = await self._client.request("GET", path, timeout_s=_TIMEOUT_S)
            return msgspec.json.decode(reply.body, type=kind) if reply.status == 200 else None
        except (StreamFailed, msgspec.MsgspecError):
            return None

    def close(self) -> None:
        self._client.close()
