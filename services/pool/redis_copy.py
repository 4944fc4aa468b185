"""What Redis holds of the registry: read by a process that begins to lead, and written anew when Redis lost it."""

from __future__ import annotations

import asyncio
import time

from services.pool.core.copies import complete_copies
from services.pool.core.registry import Registry
from services.pool.store import Store


class RedisCopy:
    """All methods raise what ``Store`` raises. ``open`` first."""

    def __init__(self, store: Store, registry: Registry, lease_s: float, changing: asyncio.Lock) -> None:
        """``changing``: held while models, removals or floors change."""
        self._store = store
        self._registry = registry
        self._lease_s = lease_s
        self._changing = changing
        self._run_id = ""
        """Of the Redis process that holds all that is known here."""

    async def open(self) -> None:
        """Learn what Redis holds."""
        registry, now_s = self._registry, time.monotonic()
        self._run_id = await self._store.run_id()
        known = await self._store.recover(now_s)
        for model in known.models:
            registry.put_model(model)
        registry.models.load_removed(known.removed)
        for floor in known.floors:
            registry.models.set_floor(floor, now_s)
        registry.models.set_unplaced(known.unplaced)
        registry.cordons.load(known.cordons)
        for report in known.reports:
            registry.load(report, now_s + self._lease_s)
        for lease in known.leases:
            registry.lease(lease)
        for worker_id, copy_id in known.retired:
            registry.retired(worker_id, copy_id)

    def lost_data(self) -> None:
        """Redis forgot something: refill it."""
        self._run_id = ""

    async def is_whole(self) -> bool:
        """Whether Redis holds what is known here. If it was started anew, whatever was written last before that may be
        lost."""
        return self._run_id == await self._store.run_id()

    async def refill(self) -> None:
        """Have Redis hold what is known here, and nothing else. If this fails, call it again."""
        run_id, registry = await self._store.run_id(), self._registry
        async with self._changing:
            models = registry.models
            now_s = time.monotonic()
            await self._store.replace_models(models.records(), models.removed(), models.floors(now_s), now_s)
        await self._store.set_cordons(registry.cordons.last_alive(), time.monotonic())
        await self._refill_workers()
        for lease in tuple(registry.leases.values()):
            await self._store.put_lease(lease, lease.until_s - time.monotonic())
        self._run_id = run_id

    async def _refill_workers(self) -> None:
        """Workers, and what they reported; if a report changes in the meantime, the newest."""
        store, registry = self._store, self._registry
        reports = registry.reports()
        epochs = [r.instance.epoch for r in reports if r.instance is not None]
        await store.next_epoch(max([*epochs, *(lease.epoch for lease in registry.leases.values())], default=0))
        strangers = set(await store.worker_ids()) - set(registry.workers)
        if strangers:
            await store.forget(sorted(strangers))
        for worker_id in [report.worker.worker_id for report in reports]:
            report = registry.report(worker_id)
            if report is None:
                continue
            await store.heartbeat(report, self._lease_s)
            retired = registry.retired_copies(worker_id)
            for model_hash, copy_id, *_ in complete_copies(report):
                if copy_id in retired:
                    await store.retire(model_hash, copy_id, needed=False, sequence=report.sequence)
            if registry.report(worker_id) is None:
                await store.forget([worker_id])  # it left in that moment
