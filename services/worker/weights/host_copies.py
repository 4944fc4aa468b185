"""Copies of models in this machine's memory: placed by the pool, or cached by the worker (``host-cache``)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from services.worker.core.upstreams import DISK, StripeSources, Upstream
from services.worker.instance.instance import Instance
from services.worker.instance.registration import ASK_INTERVAL_S, Registration, wait_until_retired
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.copies import Offer
from services.worker.weights.flow_completion import BuffersStuck
from services.worker.weights.host_store import DROP_TIMEOUT_S, HostStore
from services.worker.weights.mover import WeightMover
from shared.aio import OwnedTasks, in_thread
from shared.checkpoint import inspect_registered
from shared.errors import BlitzError, Conflict, DeadlineExceeded, NotFound, SentBack, TransportError
from shared.messages.common import Ack
from shared.messages.copies import CanRead, CopySource, DropCopy, HoldCopy
from shared.messages.registry import HostCopy, ModelRecord

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 1024 * 1024
"""One hop: the chunk only has to keep the link full."""
RETRY_INTERVAL_S = 1.0
NO_WAIT_S = 0.01


class HostCopies:
    """Carries out what the pool decides about this worker's host memory, and reports."""

    def __init__(
        self,
        worker_id: str,
        store: HostStore,
        mover: WeightMover,
        registration: Registration,
        *,
        changed: Callable[[], None],
        fatal: Callable[[str], None],
    ) -> None:
        """``changed()``: the registry should know. ``fatal(why)``: this process must be restarted."""
        self._worker_id = worker_id
        self._store = store
        self._mover = mover
        self._registration = registration
        self._changed = changed
        self._fatal = fatal
        self._tasks = OwnedTasks()
        self._filling: set[str] = set()
        """Models whose copy is being filled: one task at a time."""
        self._agreed: set[str] = set()
        """Models whose retired copy may go, and was still in use when it should."""
        self._leaving = False

    async def run(self) -> None:
        """Let go of copies that may go and were still in use, until cancelled."""
        while True:
            await asyncio.sleep(RETRY_INTERVAL_S)
            for model_hash in sorted(self._agreed):
                await self._drop(model_hash, NO_WAIT_S)

    async def close(self) -> None:
        """Abort what runs."""
        await self._tasks.close()

    # --- hold --------------------------------------------------------------------------------

    async def on_hold(self, request: HoldCopy) -> Ack:
        """Begin to load a copy that the pool placed here. Raises ``NoCapacity``, or ``SentBack`` while leaving."""
        model_hash = request.model.model_hash
        if self._leaving:
            raise SentBack(f"worker {self._worker_id} stops")
        copy = self._store.reserve(request.model, cached=False, now_s=time.monotonic())
        if not copy.complete and model_hash not in self._filling:
            self._filling.add(model_hash)
            if request.sources and request.sources[0].worker_id != self._worker_id:
                self._store.comes_from(model_hash, request.sources[0].worker_id)
            self._offer(request.model, copy)
            self._tasks.start(self._load(request, copy))
        self._changed()
        return Ack()

    async def _load(self, request: HoldCopy, copy: WeightCopy) -> None:
        model = request.model
        upstreams = tuple(self._upstream(source) for source in request.sources)
        sources = StripeSources(1.0, (*upstreams, DISK), request.cap_gbps)
        try:
            with self._store.pinned(model.model_hash):
                await in_thread(copy.arena.pin)
                await self._mover.fill_host(model, copy, request.epoch, CHUNK_BYTES, sources)
            log.info("host copy of %s is complete (%d bytes)", model.name, copy.layout.num_bytes)
        except BuffersStuck as error:
            self._fatal(str(error))
            return
        except Exception as error:
            # In any case a copy that is not filled any more must go: the pool finds another place.
            log.warning("host copy of %s failed: %s", model.name, error, exc_info=not isinstance(error, BlitzError))
            await self._give_up(model.model_hash, copy)
        finally:
            self._filling.discard(model.model_hash)
        self._changed()

    def _upstream(self, source: CopySource) -> Upstream:
        if source.worker_id == self._worker_id:
            return Upstream("local", source.worker_id)
        return Upstream(
            source.kind, source.worker_id, source.host, source.transport_address, incarnation=source.incarnation
        )

    async def keep(self, instance: Instance) -> None:
        """Cache a copy of a loaded instance, if there is memory for it. The instance serves in the meantime."""
        record = instance.record
        if record.model_hash in self._filling or self._leaving:
            return
        needed = 0 if self._store.find(record.model_hash, record.layout_hash) else instance.layout.num_bytes
        try:
            for model_hash in self._store.evictable(needed):
                await self._let_go(model_hash)
            copy = self._store.reserve(record, cached=True, now_s=time.monotonic())
        except BlitzError as error:
            log.info("no host copy of %s is kept: %s", record.name, error)
            return
        if copy.complete or record.model_hash in self._filling:
            return
        self._filling.add(record.model_hash)
        try:
            with instance.pinned(), self._store.pinned(record.model_hash):
                await in_thread(copy.arena.pin)
                for unit in range(len(copy.layout.units)):
                    if not await in_thread(copy.copy_unit, unit, instance.copy):
                        raise TransportError(f"unit {unit} of {instance.instance_id} is not what was registered")
                    copy.mark_ready(unit)
        except Exception:
            # As in ``_load``; here a hold may have been acknowledged in between, too.
            log.warning("the host copy of %s failed", record.name, exc_info=True)
            await self._give_up(record.model_hash, copy)
        finally:
            self._filling.discard(record.model_hash)
        if self._store.find(record.model_hash, record.layout_hash) is copy:
            self._offer(record, copy)
        self._changed()

    def _offer(self, record: ModelRecord, copy: WeightCopy) -> None:
        @contextlib.contextmanager
        def pinned() -> Iterator[None]:
            with self._store.pinned(record.model_hash):
                self._store.touch(record.model_hash, time.monotonic())
                yield

        self._mover.copies.offer(Offer("host", record.model_hash, copy, pinned))

    # --- disk --------------------------------------------------------------------------------

    async def on_can_read(self, request: CanRead) -> Ack:
        """Whether the model's checkpoint is here, as far as its configuration and its files' headers tell. Raises
        ``BadCheckpoint``, ``CheckpointChanged``, or ``Conflict`` for other weights than those that are registered."""
        model = request.model
        checkpoint = await in_thread(
            partial(inspect_registered, Path(model.path), model.files, generic=model.generic is not None)
        )
        if checkpoint.layout.hash != model.layout_hash:
            raise Conflict(f"{model.path} here has layout {checkpoint.layout.hash}, not {model.layout_hash}")
        return Ack()

    # --- let go ------------------------------------------------------------------------------

    async def on_drop(self, request: DropCopy) -> Ack:
        """Begin to let a copy go, if the pool still agrees by then. Raises ``NotFound``."""
        if self._store.record(request.model_hash) is None:
            raise NotFound(f"no host copy of model {request.model_hash[:12]} here")
        self._tasks.start(self._let_go(request.model_hash))
        return Ack()

    async def _let_go(self, model_hash: str) -> None:
        """Retire, let the pool confirm that another copy stays, free. A copy that it refuses to let go is kept."""
        held, record = self._held(model_hash), self._store.record(model_hash)
        if held is None or record is None:
            return
        copy = self._store.find(model_hash, held.layout_hash)
        if copy is None or held.state == "loading":
            return  # on its way out already, or still filling: the pool asks again
        self._store.retire(model_hash)
        self._mover.copies.withdraw("host", copy)
        try:
            await self._registration.retire_host(held)
        except BlitzError as error:
            level = logging.DEBUG if isinstance(error, Conflict) else logging.INFO
            log.log(level, "the host copy of %s is kept: %s", held.model, error)
            self._store.keep(model_hash)
            self._store.touch(model_hash, time.monotonic())
            self._offer(record, copy)
            self._changed()
            return
        await self._drop(model_hash, DROP_TIMEOUT_S)

    def _held(self, model_hash: str) -> HostCopy | None:
        return next((copy for copy in self._store.report() if copy.model_hash == model_hash), None)

    async def _give_up(self, model_hash: str, copy: WeightCopy) -> None:
        """The copy failed: its readers are told to go elsewhere."""
        self._mover.copies.withdraw("host", copy)
        await self._mover.sender.end_feeds_of(copy)
        await self._drop(model_hash, DROP_TIMEOUT_S)

    async def _drop(self, model_hash: str, timeout_s: float) -> None:
        """Free a copy that may go, after its readers. One that is in use for longer is retried by ``run``."""
        try:
            await self._store.drop(model_hash, timeout_s=timeout_s)
        except DeadlineExceeded as error:
            if model_hash not in self._agreed:
                log.warning("%s", error)
            self._agreed.add(model_hash)
            return
        self._agreed.discard(model_hash)
        self._changed()

    async def let_all_go(self) -> None:
        """The process ends: take no more copies, and return once every complete one may go and has no reader.

        The pool has others take over those that are the last. No limit of its own: cancel it.
        """
        self._leaving = True
        complete = [copy.model_hash for copy in self._store.report() if copy.state != "loading"]
        await asyncio.gather(*(self._leave(model_hash) for model_hash in complete))

    async def _leave(self, model_hash: str) -> None:
        """Until it may go, others read the copy: they may be about to take it over."""
        while (held := self._held(model_hash)) is not None:
            copy = self._store.find(model_hash, held.layout_hash)
            if copy is None:  # another task asks already, or waits for the last reader
                await asyncio.sleep(ASK_INTERVAL_S)
                continue
            may_go = functools.partial(self._registration.retire_host, held, leaving=True)
            await wait_until_retired(may_go, f"the host copy of {held.model}")
            if self._store.find(model_hash, held.layout_hash) is copy:
                self._store.retire(model_hash)
                self._mover.copies.withdraw("host", copy)
                await self._drop(model_hash, DROP_TIMEOUT_S)
