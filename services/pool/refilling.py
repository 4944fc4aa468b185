"""Writing the registry to a Redis that lost data, or may have: all of it, or what came last."""

from __future__ import annotations

from services.pool.core.copies import complete_copies
from services.pool.core.registry import Registry
from services.pool.store import Store


async def refill_models(store: Store, registry: Registry) -> None:
    """Have Redis hold the models, removals and floors that the registry knows, and no others; nothing may change them
    meanwhile. Raises ``RedisError``, ``BlitzError``: then once more."""
    await store.replace_models(registry.models.records(), registry.models.removed(), registry.models.floors())


async def refill_workers(store: Store, registry: Registry, lease_s: float, now_s: float) -> None:
    """The same of workers, what they reported, and what was promised of them; of what changes meanwhile, the newest.
    ``now_s``: monotonic."""
    reports = registry.reports()
    epochs = [r.instance.epoch for r in reports if r.instance is not None]
    epochs += [lease.epoch for lease in registry.leases.all()]
    await store.raise_epoch(max(epochs, default=0))
    strangers = set(await store.worker_ids()) - {report.worker.worker_id for report in reports}
    if strangers:
        await store.forget(sorted(strangers))
    for worker_id in [report.worker.worker_id for report in reports]:
        report = registry.report(worker_id)
        if report is None:
            continue
        await store.heartbeat(report, lease_s)
        retired = registry.retired_copies(worker_id)
        for model_hash, copy_id, *_ in complete_copies(report):
            if copy_id in retired:
                await store.retire(str(model_hash), str(copy_id), needed=False, sequence=report.sequence)
        if registry.report(worker_id) is None:
            await store.forget([worker_id])  # it left in that moment
    for lease in registry.leases.all():
        await store.put_lease(lease, lease.until_s - now_s)
