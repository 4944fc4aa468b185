"""Models that are added, changed, removed, and given back by workers; their floors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.pool.core.new_model import check_limits, name_of, path_of
from services.pool.core.registry import Registry
from services.pool.inspection import Inspections
from services.pool.leases import Terms
from services.pool.store import Store
from shared.errors import BadRequest, Conflict, ModelNotFound, Unavailable
from shared.messages.common import Ack
from shared.messages.registry import (
    MAX_HOLD_S,
    AddModel,
    Floor,
    ModelRecord,
    RemoveModel,
    RestoreModel,
    SetFloor,
    SetModel,
)
from shared.telemetry import tracer

log = logging.getLogger(__name__)

MAX_WANTED = 10_000
WANTED_S = 30.0
"""How long a worker may take to give a model back that it was asked for."""


class ModelAdmin:
    """Writes to the store first, then to the registry. All methods raise what ``Store`` raises."""

    def __init__(self, store: Store, registry: Registry, terms: Terms, roots: Sequence[Path]) -> None:
        """``roots``: checkpoints must be below one of these directories; empty: anywhere."""
        self._store = store
        self._registry = registry
        self._terms = terms
        self._roots = tuple(roots)
        self._wanted: dict[str, float] = {}
        self.inspections = Inspections()
        self.changing = asyncio.Lock()
        """Held so that the registry follows the changes in the store in their order."""

    async def add(self, request: AddModel) -> ModelRecord:
        """Read the checkpoint and register it; the older record if the name has the same weights already."""
        name = name_of(request)
        check_limits(request)
        path = path_of(request.path, self._roots)
        with tracer().start_as_current_span("pool.add_model", attributes={"blitz.model": name}):
            record = msgspec.structs.replace(
                await self.inspections.inspect(path, request.engine),
                name=name,
                added_at_s=time.time(),
                min_instances=request.min_instances,
                max_instances=request.max_instances,
                slo_ttft_s=request.slo_ttft_s,
                slo_tbt_s=request.slo_tbt_s,
                keep_alive_s=request.keep_alive_s,
                serving=request.serving,
                weight=request.weight,
                advise=request.advise,
                prefix_cache=request.prefix_cache,
                tool_parser=request.tool_parser,
                reasoning_parser=request.reasoning_parser,
                no_room_timeout_s=request.no_room_timeout_s,
                engine_args=request.engine_args,
                warm=request.warm,
            )
            async with self.changing:
                stored = self._registry.models.get(name) or await self._store.add_model(record)
                if stored is not None and (stored.engine, stored.engine_args) != (record.engine, record.engine_args):
                    raise Conflict(
                        f"{name!r} is registered with {_engine(stored)}: remove it first, or choose another name"
                    )
                if stored is None or stored.model_hash != record.model_hash:
                    raise Conflict(f"another model is registered as {name!r}: remove it first, or choose another name")
                self._registry.put_model(stored)
        if stored is record:
            log.info("model %s added from %s (%d bytes of weights)", name, stored.path, stored.weights_bytes)
        else:
            log.info("model %s is registered already, and stays as it is", name)
        return stored

    async def set(self, request: SetModel) -> ModelRecord:
        """Change what is given of a model's settings; the record as it is then."""
        given = msgspec.structs.asdict(request)
        name = given.pop("name")
        changes = {setting: value for setting, value in given.items() if value is not None}
        if not changes:
            raise BadRequest(f"nothing to change: give at least one of {', '.join(given)}")
        if request.no_room_timeout_s == "default":
            changes["no_room_timeout_s"] = None
        async with self.changing:
            known = self._registry.models.get(name)
            if known is None:
                raise ModelNotFound(f"model {name!r} is not registered", param="name")
            record = msgspec.structs.replace(known, **changes)
            check_limits(record)
            if not await self._store.set_model(record):
                # A removal whose answer was lost; or Redis lost its data, and is about to be given it again.
                raise Unavailable(f"model {name!r} is not in Redis now: ask again, or remove it", retry_after_s=1.0)
            self._registry.put_model(record)
        shown = ", ".join(f"{s} {value!r}" for s, value in changes.items() if value != getattr(known, s))
        if shown:
            log.info("model %s changed: %s", name, shown)
        return record

    async def remove(self, request: RemoveModel) -> Ack:
        """Its instances drain."""
        async with self.changing:
            # Redis may have removed it already: an earlier answer may have been lost.
            if not await self._store.remove_model(request.name) and self._registry.models.get(request.name) is None:
                raise ModelNotFound(f"model {request.name!r} is not registered", param="name")
            self._registry.remove_model(request.name, time.monotonic())
        log.info("model %s removed", request.name)
        return Ack()

    def want(self, *model_hashes: str) -> None:
        """Workers are asked to give these back."""
        for model_hash in model_hashes:
            self._wanted.pop(model_hash, None)
            self._wanted[model_hash] = time.monotonic() + WANTED_S
            if len(self._wanted) > MAX_WANTED:
                del self._wanted[next(iter(self._wanted))]

    async def restore(self, request: RestoreModel) -> Ack:
        """A worker gives a model back that it was asked for."""
        record = request.model
        if self._wanted.pop(record.model_hash, 0.0) < time.monotonic():
            raise Conflict(f"the pool did not ask for model {record.name!r}")
        name_of(AddModel(path=record.path, name=record.name))
        check_limits(record)
        path_of(record.path, self._roots)
        if self._registry.models.was_removed(record.name):
            return Ack()
        async with self.changing:
            stored = await self._store.add_model(record, unless_removed=True)
            if stored is not None:
                self._registry.put_model(stored)
        if stored is record:
            log.warning("model %s restored from a worker that holds it", record.name)
        return Ack()

    async def set_floor(self, request: SetFloor) -> Ack:
        """Until its time is over; none at all if it has no time."""
        self._terms.check("planner", request.term)
        if self._registry.models.get(request.model) is None:
            raise ModelNotFound(f"model {request.model!r} is not registered", param="model")
        if request.instances < 0 or not 0 <= request.hold_s <= MAX_HOLD_S:
            raise BadRequest(f"instances must not be negative, and hold_s from 0 to {MAX_HOLD_S:g}", param="hold_s")
        async with self.changing:
            if not request.hold_s:
                await self._store.lift_floor(request.model, request.role)
                self._registry.models.lift_floor(request.model, request.role)
                return Ack()
            floor = Floor(model=request.model, instances=request.instances, left_s=request.hold_s, role=request.role)
            await self._store.set_floor(floor)
            self._registry.models.set_floor(floor, time.monotonic())
        return Ack()


def _engine(record: ModelRecord) -> str:
    """In words."""
    if not record.engine:
        return "the system's own engine"
    return f"engine {record.engine}" if record.engine_args is None else f"engine {record.engine} and engine_args"
