"""The registry as its readers get it: page by page, whole or what changed since they last read it."""

from __future__ import annotations

from collections.abc import Iterator

from services.pool.core.models import ModelEntry
from services.pool.core.registry import Registry
from services.pool.core.table import Table
from services.pool.core.worker_entry import WorkerEntry
from shared.messages.registry import Snapshot

PAGE_BYTES = 192 * 1024
"""Of one page of a snapshot, about."""


def page_of(registry: Registry, cursor: str, since: str, now_s: float) -> Snapshot | None:
    """A page of everything, or of what changed ``since``; None for a cursor that is not of this registry. ``now_s``:
    monotonic, for what floors have left."""
    start = _position(cursor, registry.publisher) if cursor else (registry.version.number, "m", "")
    if start is None:
        return None
    began, phase, after = start
    since_version = _version(since, registry.publisher)
    if not registry.knows(since_version):
        since_version = 0
    models: list[ModelEntry] = []
    workers: list[WorkerEntry] = []
    next_cursor, left = "", PAGE_BYTES
    for kind, name, entry in _entries(registry, since_version, phase, after):
        if entry.num_bytes > left and (models or workers):
            next_cursor = f"{registry.publisher}/{began}/{phase}/{after}"
            break
        left -= entry.num_bytes
        phase, after = kind, name
        if isinstance(entry, ModelEntry):
            models.append(entry)
        else:
            workers.append(entry)
    tells_gone = bool(since_version) and not cursor
    return Snapshot(
        publisher=registry.publisher,
        models=tuple(model.record for model in models),
        workers=tuple(worker.record for worker in workers),
        floors=tuple(held.at(now_s) for model in models for _, held in sorted(model.floors.items())),
        unplaced=tuple(model.unplaced for model in models if model.unplaced is not None),
        next_cursor=next_cursor,
        version=f"{registry.publisher}/{began}",
        partial=bool(since_version),
        gone_models=registry.models.entries.gone_since(since_version) if tells_gone else (),
        gone_workers=registry.workers.gone_since(since_version) if tells_gone else (),
        routes_sequence=registry.routes.sequence,
    )


def _entries(
    registry: Registry, since: int, phase: str, after: str
) -> Iterator[tuple[str, str, ModelEntry | WorkerEntry]]:
    """From behind that position on: models (``m``), then workers (``w``), each in the order of names."""
    tables: tuple[tuple[str, Table[ModelEntry] | Table[WorkerEntry]], ...]
    tables = (("m", registry.models.entries), ("w", registry.workers))
    for kind, table in tables:
        if kind >= phase:
            behind = after if kind == phase else ""
            names = sorted(table.changed_since(since)) if since else table.names_after(behind)
            yield from ((kind, name, table[name]) for name in names if name > behind)


def _position(cursor: str, publisher: str) -> tuple[int, str, str] | None:
    mine, _, rest = cursor.partition("/")
    began, _, rest = rest.partition("/")
    phase, _, after = rest.partition("/")
    if mine != publisher or not began.isdigit() or phase not in ("m", "w"):
        return None
    return int(began), phase, after


def _version(since: str, publisher: str) -> int:
    """0 if it is not of this registry."""
    mine, _, version = since.partition("/")
    return int(version) if mine == publisher and version.isdigit() else 0
