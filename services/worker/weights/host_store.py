"""Host memory of one worker process, and the copies of models that it keeps there.

    reserve ──► loading ──► ready ──► retired ──► (freed)
                   │                     │
                   ╰─────────────────────╯        keep: the pool said that it is the last, it is ready again

Copies are *placed* by the pool, or *cached* by the worker for itself (the ``host-cache`` baseline). Placed copies
stay until the pool has them dropped. So do cached ones, or until they make way for other cached ones, least recently
used first, if the pool agrees. A pinned copy is being read or filled: its memory stays.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from services.worker.device.device import Device
from services.worker.device.host import HOST
from services.worker.memory.arena import Arena
from services.worker.memory.weight_copy import WeightCopy
from shared.aio import Wakeup, in_thread
from shared.errors import Conflict, DeadlineExceeded, NoCapacity, NotFound
from shared.layout import ArenaLayout, layout_of
from shared.messages.registry import HostCopy, ModelRecord

DROP_TIMEOUT_S = 60.0
"""Longer than any transfer that still gets bytes takes; the sender of a broken one gives up sooner."""


@dataclass(slots=True, eq=False)
class _Held:
    record: ModelRecord
    copy: WeightCopy
    arena: Arena
    serial: int
    cached: bool
    used_at_s: float
    pins: int = 0
    retired: bool = False
    freed: bool = False
    """Its pages are on their way back to the system: nothing keeps it any more."""
    source: str = ""

    @property
    def num_bytes(self) -> int:
        return self.copy.layout.num_bytes

    @property
    def idle(self) -> bool:
        return self.cached and self.pins == 0 and not self.retired


class HostStore:
    """At most one copy per model hash. All methods on the event loop; times are seconds of one clock."""

    def __init__(self, capacity_bytes: int, device: Device = HOST) -> None:
        """``device``: instances are loaded from here by its copies."""
        self.capacity_bytes = capacity_bytes
        self._device = device
        self._held: dict[str, _Held] = {}
        self._serial = 0
        self._changed = Wakeup()

    @property
    def used_bytes(self) -> int:
        """What the copies in every state take."""
        return sum(held.num_bytes for held in self._held.values())

    def reserve(self, record: ModelRecord, *, cached: bool, now_s: float) -> WeightCopy:
        """Memory for a copy of a model, empty; pin it while it is filled.

        A copy that is here already is given as it is, perhaps complete or being filled; a cached one becomes placed if
        ``cached`` is False. Nothing makes way by itself: see ``evictable``.
        Raises ``Conflict`` (the copy is on its way out, or has another layout), ``NoCapacity``.
        """
        layout = layout_of(record.basics)
        if layout.hash != record.layout_hash:
            raise Conflict(f"layout {layout.hash} here, {record.layout_hash} in the record: different versions?")
        held = self._held.get(record.model_hash)
        if held is None:
            held = self._allocate(record, layout, cached, now_s)
        elif held.retired or held.record.layout_hash != record.layout_hash:
            raise Conflict(f"a copy of {held.record.name} is on its way out of this worker's host memory")
        held.cached = held.cached and cached
        held.used_at_s = now_s
        return held.copy

    def comes_from(self, model_hash: str, worker_id: str) -> None:
        """A copy is about to be loaded from this worker's memory."""
        self._held[model_hash].source = worker_id

    def _allocate(self, record: ModelRecord, layout: ArenaLayout, cached: bool, now_s: float) -> _Held:
        free_bytes = self.capacity_bytes - self.used_bytes
        if layout.num_bytes > free_bytes:
            raise NoCapacity(
                f"a host copy of {record.name} needs {layout.num_bytes} bytes; "
                f"{free_bytes} of {self.capacity_bytes} are free"
            )
        try:
            arena = Arena(self._device.host_memory(layout.num_bytes))
        except (OSError, MemoryError, OverflowError) as error:
            raise NoCapacity(
                f"no {layout.num_bytes} bytes of memory for a host copy of {record.name}: {error}"
            ) from error
        self._serial += 1
        held = _Held(record, WeightCopy(layout, arena, record.unit_digests), arena, self._serial, cached, now_s)
        self._held[record.model_hash] = held
        return held

    def evictable(self, num_bytes: int) -> tuple[str, ...]:
        """The cached copies (model hashes) that have to go for so many bytes to fit; none if they would not do.

        The caller asks the pool about each before it drops it.
        """
        missing = num_bytes - (self.capacity_bytes - self.used_bytes)
        victims: list[str] = []
        for model_hash, held in sorted(self._held.items(), key=lambda item: (item[1].used_at_s, item[0])):
            if missing <= 0:
                break
            if held.idle:
                victims.append(model_hash)
                missing -= held.num_bytes
        return tuple(victims) if missing <= 0 else ()

    def find(self, model_hash: str, layout_hash: str) -> WeightCopy | None:
        """A copy that loads or is ready, of exactly this model and layout."""
        held = self._held.get(model_hash)
        if held is None or held.retired or held.record.layout_hash != layout_hash:
            return None
        return held.copy

    def record(self, model_hash: str) -> ModelRecord | None:
        """The model of a copy, if a registry lost it."""
        held = self._held.get(model_hash)
        return held.record if held is not None else None

    def touch(self, model_hash: str, now_s: float) -> None:
        """The copy was used: others make way before it."""
        if (held := self._held.get(model_hash)) is not None:
            held.used_at_s = max(held.used_at_s, now_s)

    @contextlib.contextmanager
    def pinned(self, model_hash: str) -> Iterator[None]:
        """The copy is being read or filled: its memory stays. Raises ``NotFound``."""
        held = self._held.get(model_hash)
        if held is None or held.freed:
            raise NotFound(f"no host copy of model {model_hash[:12]} here")
        held.pins += 1
        try:
            yield
        finally:
            held.pins -= 1
            self._changed.fire()

    def retire(self, model_hash: str) -> None:
        """The copy is a source no more, while the pool is asked whether it may go."""
        if (held := self._held.get(model_hash)) is not None:
            held.retired = True

    def keep(self, model_hash: str) -> None:
        """The pool refused: the copy is the last of its model. It gets another serial: should the pool have agreed,
        and its answer been lost, the copy counts again."""
        if (held := self._held.get(model_hash)) is not None and held.retired and not held.freed:
            held.retired = False
            self._serial += 1
            held.serial = self._serial
            self._changed.fire()

    async def drop(self, model_hash: str, *, timeout_s: float = DROP_TIMEOUT_S) -> bool:
        """Retire a copy and free its memory once it has no pin; False if there is none, or it was kept after all.

        The pool must have agreed, or the copy be incomplete. Raises ``DeadlineExceeded``: the copy stays retired.
        """
        held = self._held.get(model_hash)
        if held is None:
            return False
        held.retired = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.until(lambda: held.pins == 0 or not held.retired)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the host copy of {held.record.name} is still in use after {timeout_s:g} s ({held.pins} pins)"
            ) from None
        if self._held.get(model_hash) is not held or not held.retired or held.freed:
            return False
        held.freed = True
        try:
            # Views of the arena may outlive it; its pages must not. It takes longer than heartbeats may wait.
            await in_thread(held.arena.release)
        finally:
            del self._held[model_hash]
        return True

    def report(self) -> tuple[HostCopy, ...]:
        """For the heartbeat, in the order of model hashes."""
        return tuple(
            HostCopy(
                model=held.record.name,
                model_hash=model_hash,
                layout_hash=held.record.layout_hash,
                num_bytes=held.num_bytes,
                state="retired" if held.retired else "ready" if held.copy.complete else "loading",
                cached=held.cached,
                serial=held.serial,
                source="" if held.copy.complete else held.source,
            )
            for model_hash, held in sorted(self._held.items())
        )
