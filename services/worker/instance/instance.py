"""The worker's instance: one model copy, its engine, and its place in the life cycle; and the slot that it is in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from math import inf

from services.worker.core.lifecycle import InstanceLifecycle
from services.worker.core.scheduling.request_checks import check_request
from services.worker.core.scheduling.sequence import ActiveSequence, sequence_of
from services.worker.engine.serving import ServingEngine
from services.worker.engine.thread import EngineThread
from services.worker.memory.weight_copy import WeightCopy
from shared.errors import BadRequest, Conflict, Unavailable
from shared.layout import ArenaLayout
from shared.messages.common import InstanceState, Role
from shared.messages.generation import Submit
from shared.messages.plans import ChainMember, ScalePlan
from shared.messages.registry import CopyIs, InstanceInfo

log = logging.getLogger(__name__)

STOP_S = 30.0
"""Longest that one engine step may take when an instance is stopped."""


class Instance:
    """From ``loading`` to its end. All methods on the event loop; the engine has a thread of its own."""

    def __init__(
        self,
        plan: ScalePlan,
        member: ChainMember,
        copy: WeightCopy,
        engine: ServingEngine,
        *,
        default_slo_tbt_s: float = 0.0,
    ) -> None:
        """``engine``: not started. It is the instance's from now on. ``default_slo_tbt_s``: of models without an
        objective for the time between two tokens; 0: none."""
        self.record = plan.model
        self.role: Role = plan.role
        """Of what comes from now on; requests under way finish as they began."""
        self.ordered_role = 0, 0.0
        """Term and time of the newest plan that gave it a role after it had loaded."""
        self.on_first_work: Callable[[], object] | None = None
        """Called once, when something is accepted for the role that it has by then."""
        self.plan_id = plan.plan_id
        self.instance_id = member.instance_id
        self.epoch = member.epoch
        self.copy = copy
        self.engine = engine
        self.scheduler = engine.limits
        self.copy_is: CopyIs = "there"
        """For others to read; see ``InstanceInfo.copy``."""
        self.received_bytes = 0
        self._default_slo_tbt_s = default_slo_tbt_s
        self._slo_tbt_s = 0.0
        self.keep_tbt(self.record.slo_tbt_s)
        self._digest = ""
        self._begun_s = self.ordered_s = time.monotonic()
        """``ordered_s``: when the stream took the plan."""
        self.load_s = 0.0
        """How long it took to load; 0 until it serves."""
        self._lifecycle = InstanceLifecycle()
        self._lifecycle.move_to("loading")
        engine.prepare()  # while the weights come; nobody but ``stop`` waits for it
        self.num_pins = 0
        """How many workers read the copy, and how many requests that come from elsewhere have a reservation."""
        self._retired = False
        self._started = False
        self.on_layer_ready: Callable[[], None] = lambda: None
        """Called when a layer, or at last the whole copy, is ready."""
        self.queue_factor = 1
        """How many instances' queues the requests sent here fill: a live pair's requests all come to its source."""

    @property
    def layout(self) -> ArenaLayout:
        return self.copy.layout

    @property
    def layered(self) -> EngineThread:
        """The engine, for those who use single layers, or KV. Raises ``Conflict`` where it has none for others."""
        if not isinstance(self.engine, EngineThread):
            raise Conflict(f"instance {self.instance_id} computes by itself: no layer and no KV of it is another's")
        return self.engine

    @property
    def has_loaded(self) -> bool:
        """All its units are there, and its engine waits for none. Some serve before that."""
        return self.load_s > 0

    def has_copy(self) -> bool:
        """Whether its weights are there, for others to read, be it for the last time."""
        return self.copy_is != "gone"

    @property
    def state(self) -> InstanceState:
        return self._lifecycle.state

    def info(self) -> InstanceInfo:
        """What the registry should know."""
        return InstanceInfo(
            instance_id=self.instance_id,
            model=self.record.name,
            model_hash=self.record.model_hash,
            layout_hash=self.record.layout_hash,
            state=self.state,
            role=self.role,
            epoch=self.epoch,
            layers_ready=self.copy.layers_ready,
            weights_digest=self._digest,
            max_running_requests=self.scheduler.max_num_sequences,
            max_queued_tokens=self.queue_factor * self.scheduler.max_queued_tokens,
            context_tokens=self.scheduler.limit_tokens,
            plan_id=self.plan_id,
            copy=self.copy_is,
        )

    def keep_tbt(self, slo_tbt_s: float) -> None:
        """The model's objective for the time between two tokens is this from now on; 0: it has none."""
        wanted_s = slo_tbt_s if 0 < slo_tbt_s < inf else self._default_slo_tbt_s
        if wanted_s != self._slo_tbt_s:
            self._slo_tbt_s = wanted_s
            self.engine.keep_tbt(wanted_s)

    async def serve_early(self) -> bool:
        """Take requests while units still come, if the engine can; whether it does."""
        if not await self.engine.until_open() or self.state != "loading":
            return False
        self._lifecycle.move_to("serving")
        return True

    async def serve(self) -> None:
        """All units are ready: start the engine and take requests."""
        self._digest = self.copy.digest()
        self._start()
        await self.engine.until_ready()
        if self.state in ("loading", "live"):
            self._lifecycle.move_to("serving")
        self.load_s = time.monotonic() - self._begun_s

    def go_live(self) -> None:
        """Compute with the layers that are there, for another instance's requests. Raises the life cycle's error unless
        loading."""
        self._lifecycle.move_to("live")
        self._start()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.engine.start()

    def drain(self) -> None:
        """Take no new requests. Raises the life cycle's error unless serving."""
        self._lifecycle.move_to("draining")

    def revive(self) -> bool:
        """Serve again if it still drains; False once it was found idle and is on its way out."""
        if self.state != "draining" or self._retired:
            return False
        self._lifecycle.move_to("serving")
        return True

    def fail(self) -> None:
        """Something broke; the instance can only go."""
        self._lifecycle.move_to("failed")

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Another worker reads the copy, or has a reservation here: the instance must not go."""
        self.num_pins += 1
        try:
            yield
        finally:
            self.num_pins -= 1

    def check_admits(self, instance_id: str) -> None:
        """Raises ``Conflict`` unless this very instance takes requests now."""
        if instance_id != self.instance_id or self.state != "serving":
            raise Conflict(f"instance {instance_id} takes no requests here ({self.instance_id} is {self.state})")

    def began(self, roles: Collection[Role]) -> None:
        """Something was accepted that instances of these roles do."""
        if self.on_first_work is not None and self.role in roles:
            first, self.on_first_work = self.on_first_work, None
            first()

    def sequence_of(self, request: Submit) -> ActiveSequence:
        """A request as this instance's scheduler takes it. Raises ``BadRequest`` for tokens that the model lacks, for
        sampling that is out of range, and for names that no process can have, ``Conflict`` for a request for other
        weights: its tokens mean something else there."""
        if request.model_hash != self.record.model_hash:
            raise Conflict(
                f"instance {self.instance_id} has {self.record.name} of hash {self.record.model_hash}, the request is "
                f"for {request.model} of hash {request.model_hash}"
            )
        spec = self.record.basics
        check_request(request, spec.vocab_size)
        return sequence_of(request, spec.eos_token_ids)

    def check_token(self, token_id: int) -> None:
        """Raises ``BadRequest`` for a token that the model lacks."""
        if not 0 <= token_id < self.record.basics.vocab_size:
            raise BadRequest(f"token id {token_id} is outside 0..{self.record.basics.vocab_size - 1}", param="token_id")

    @property
    def num_requests(self) -> int:
        load = self.engine.stats().load
        return load.queued_requests + load.running_requests

    async def idle(self) -> bool:
        """Wait until nothing runs here and no worker reads the copy; False if it was revived before."""
        while self.state == "draining":
            # The thread's own figures may lag behind a request it was just handed.
            try:
                queued = await asyncio.wrap_future(self.engine.count_requests())
            except Unavailable:
                return True  # another waiter found it idle first, and stopped the engine
            if queued == 0 and self.num_pins == 0 and self.state == "draining":
                return True
            await asyncio.sleep(0.01)
        return False

    def retire(self) -> bool:
        """It is on its way out and cannot be revived any more; False if it was revived, or is read, after all."""
        self._retired = self.state == "draining" and self.num_pins == 0
        return self._retired

    async def stop(self) -> bool:
        """End what still runs, and the engine's thread; False if a step did not end within ``STOP_S``."""
        self.engine.stop()
        return await asyncio.to_thread(self.engine.join, STOP_S)


class InstanceSlot:
    """The worker's one place for an instance. Event loop only. Listeners are called in the order in which they came."""

    def __init__(self) -> None:
        self._instance: Instance | None = None
        self._on_changed: list[Callable[[], None]] = []
        self._on_loaded: list[Callable[[Instance], None]] = []
        self._before_gone: list[Callable[[Instance, str], Awaitable[None]]] = []

    def current(self) -> Instance | None:
        """The instance, if there is one."""
        return self._instance

    # --- for those who want to know ----------------------------------------------------------

    def when_changed(self, listener: Callable[[], None]) -> None:
        """Called when the instance's state changed, and when one came or went."""
        self._on_changed.append(listener)

    def when_loaded(self, listener: Callable[[Instance], None]) -> None:
        """Called once an instance has all its weights."""
        self._on_loaded.append(listener)

    def before_gone(self, listener: Callable[[Instance, str], Awaitable[None]]) -> None:
        """Called with an instance, and the reason, before its engine is stopped; waited for."""
        self._before_gone.append(listener)

    # --- for who loads and drains ------------------------------------------------------------

    def put(self, instance: Instance) -> None:
        """An instance begins to load."""
        self._instance = instance
        self.changed()

    def changed(self) -> None:
        """The instance's state changed."""
        for listener in self._on_changed:
            listener()

    def loaded(self, instance: Instance) -> None:
        """The instance has all its weights."""
        for listener in self._on_loaded:
            listener(instance)

    async def going(self, instance: Instance, reason: str) -> None:
        """The instance's engine is about to stop."""
        for listener in self._before_gone:
            await listener(instance, reason)

    def clear(self) -> None:
        """The instance is gone."""
        self._instance = None
        self.changed()
