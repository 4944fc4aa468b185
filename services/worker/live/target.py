"""The target of a pair: its conversation with the source, and its life.

Everything here runs on the event loop. The batches are in ``target_batches``, how they go back in ``giving`` and
``parting``; the engine's part is ``target_work``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from services.worker.engine.loop import EngineLoop
from services.worker.instance.instance import Instance
from services.worker.link import ASK_TIMEOUT_S
from services.worker.live.batch import PromptBatch
from services.worker.live.gates import Gates
from services.worker.live.giving import Giving
from services.worker.live.link_to_source import LinkToSource
from services.worker.live.pair import PairLife, PairState
from services.worker.live.parting import Parting
from services.worker.live.target_batches import TargetBatches
from services.worker.live.target_stepper import TargetStepper
from services.worker.live.tensors import Tensors
from services.worker.requests.inbox import Serving
from services.worker.scheduling.gateways import Gone
from shared.aio import Wakeup
from shared.bus.base import Bus
from shared.errors import BlitzError, Conflict, Unavailable
from shared.messages.common import Ack
from shared.messages.live import (
    Dissolve,
    Dissolved,
    Gate,
    HandOver,
    Pull,
    Pulled,
    PullKv,
    Seal,
    Settle,
    ZigzagAssignment,
)
from shared.zigzag.queue import Policy, Queue

log = logging.getLogger(__name__)

WATCH_S = 0.05


class LiveTarget:
    """From the offer to the last of its batches. ``ended`` is set then."""

    def __init__(
        self,
        assignment: ZigzagAssignment,
        instance: Instance,
        bus: Bus,
        tensors: Tensors,
        serving: Serving,
        *,
        silence_s: float,
    ) -> None:
        """``silence_s``: a source that says nothing for so long is gone."""
        self.assignment = assignment
        self.instance = instance
        self.life = PairLife()
        self.ended = asyncio.Event()
        self._tensors = tensors
        self._link = LinkToSource(assignment, bus, tensors, self.life, silence_s=silence_s)
        self._event_loop = asyncio.get_running_loop()
        self._changed = Wakeup()
        self._has_parted = False
        self._source_knows = asyncio.Event()
        """That this one is loaded, or the pair has ended."""
        self._failure = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue = Queue(instance.layout.num_layers, Policy(assignment.policy))
        self._stepper = TargetStepper(
            instance.engine.loop,
            self._queue,
            decode_interval_s=assignment.slo_tbt_s / 2,
            start_at_s=time.time(),
            on_layer=self._from_engine(self._changed.fire),
            on_finished=self._from_engine(self._finished),
            on_broken=self._from_engine(self._engine_failed),
        )
        queue, work, changed = self._queue, self._stepper, self._changed
        self._batches = TargetBatches(instance, queue, work, Gates(assignment), tensors, serving, changed)
        self._giving = Giving(instance, queue, work, self._batches, tensors, changed)
        self._parting = Parting(instance, queue, work, self._batches, self._giving, serving, changed)

    def begin(self) -> None:
        """The offer is accepted: hand-overs may come."""
        self.instance.engine.call(lambda loop: setattr(loop, "partial", self._stepper))
        self.life.move_to(PairState.REDIRECTING)
        self.layers_ready()
        self._spawn(self._watch())

    # --- from the source ---------------------------------------------------------------------

    async def on_hand_over(self, message: HandOver) -> Ack:
        """Take a batch. Raises what ``TargetBatches.take_in`` raises."""
        self._check_lives()
        held = await self._batches.take_in(message)
        if held is not None:
            self._spawn(self._batches.fetch(held))
        return Ack()

    async def on_seal(self, message: Seal) -> Ack:
        """All that waited is here. Raises ``Conflict`` if a batch is missing."""
        self._check_lives()
        if self._batches.num_known < message.count:
            raise Conflict(f"{self._batches.num_known} batches of {message.count} are here")
        if self.life.state is PairState.REDIRECTING:
            self.life.move_to(PairState.COOPERATING)
            self._move_on()
        return Ack()

    async def on_pull(self, message: Pull) -> Pulled:
        """The earliest batch for the source; waits up to ``wait_s`` for one that it may have."""
        claim = await self._giving.pull(message, self._check_lives)
        if claim is not None:
            self._spawn(self._giving.give(claim, message.serial, kv_apart=message.kv_apart))
            # What was in the way of a later batch is gone.
            self._batches.look_again()
        return self._giving.answer(claim, kv_apart=message.kv_apart)

    async def on_pull_kv(self, message: PullKv) -> Ack:
        """The source has room for KV of a batch that it pulled. Raises what ``Giving.kv_wanted`` raises."""
        self._check_lives()
        held = self._giving.kv_wanted(message)
        if held is not None:
            self._spawn(self._giving.send_kv(held, message))
        return Ack()

    async def on_settle(self, message: Settle) -> Ack:
        """The source has these batches. Without claims it only says that it lives."""
        self._check_lives()
        await self._giving.settle(message.claim_ids)
        return Ack()

    async def on_dissolve(self, message: Dissolve) -> Dissolved:
        """Part. Repeating gives the same shares."""
        self._check_lives()
        if self._batches.loaded:
            # The source knows by now; its answer is about to be here.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    await self._source_knows.wait()
        shares = await self._parting.dissolve(message, self._check_lives)
        if not self._has_parted and not self.life.ended:
            self._has_parted = True
            self.life.move_to(PairState.DISSOLVED)
            log.info("pair %s is dissolved: %d kept, %d given", message.pair_id, len(shares.kept), len(shares.given))
            self._spawn(self._hand_back(shares))
        return shares

    async def _hand_back(self, shares: Dissolved) -> None:
        try:
            await self._parting.hand_back(shares, self._link.why_lost)
        finally:
            await self._detach()

    @property
    def shares(self) -> Dissolved | None:
        """What was agreed at parting."""
        return self._parting.shares

    # --- from the instance -------------------------------------------------------------------

    def layers_ready(self) -> None:
        """A layer more is loaded, or everything."""
        copy = self.instance.copy
        self._batches.set_layers_ready(min(copy.layers_ready, self._queue.num_layers - 1))
        if copy.complete and not self._batches.loaded:
            self._batches.loaded = True
            self._changed.fire()
            self._move_on()
            self._spawn(self._finish_from_now_on())

    async def _finish_from_now_on(self) -> None:
        """The source has to know before that this one finishes batches: should the two lose each other, it must not
        compute what may be finished here."""
        if await self._link.tell_taken(loaded=True):
            self._batches.set_layers_ready(self._queue.num_layers)
        self._source_knows.set()

    def set_gates(self, gates: tuple[Gate, ...]) -> None:
        """A split was computed."""
        self._batches.set_gates(gates)

    def cancel(self, request_id: str, attempt: int) -> None:
        """Nobody waits for a request any more."""
        self._spawn(self._batches.cancel(lambda sequence: sequence.key == (request_id, attempt)))

    def cancel_gateway(self, gone: Gone) -> None:
        """Gateways are gone."""
        self._spawn(self._batches.cancel(lambda s: gone.had(s.gateway_id, s.gateway_incarnation)))

    # --- inside ------------------------------------------------------------------------------

    def _from_engine(self, function: Callable[..., None]) -> Callable[..., None]:
        """Call ``function`` on the event loop, from the engine's thread."""

        def call(*arguments: object) -> None:
            self._event_loop.call_soon_threadsafe(function, *arguments)

        return call

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of pair %s broke", self.assignment.pair_id, exc_info=error)
            self._fail_soon(f"{type(error).__name__}: {error}")

    def _check_lives(self) -> None:
        """The source lives; do we?"""
        self._link.heard()
        if self.life.state is PairState.FAILED:
            raise Conflict(f"pair {self.assignment.pair_id} has failed here: {self._failure}")

    def _move_on(self) -> None:
        if self._batches.loaded and self.life.state is PairState.COOPERATING:
            self.life.move_to(PairState.LOADED)

    def _finished(self, batch: PromptBatch) -> None:
        self._batches.finished(batch)
        if not self.life.ended:
            self._spawn(self._tell_finished(batch))

    async def _tell_finished(self, batch: PromptBatch) -> None:
        await self._link.tell_taken(batch.batch_id, loaded=self._batches.loaded)

    async def _watch(self) -> None:
        """Until the pair ends: does the source still live, do layers come as planned?"""
        while not self.life.ended:
            await asyncio.sleep(WATCH_S)
            if self._batches.lapse_if_late(time.time()):
                log.info("pair %s: layers are late, the split is off", self.assignment.pair_id)
            if reason := self._link.why_lost():
                self._fail_soon(reason)

    def _fail_soon(self, reason: str) -> None:
        if not self.life.ended:
            task = asyncio.create_task(self.fail(reason))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def fail(self, reason: str, *, tell: bool = True) -> None:
        """The pair is over: everything that is not owned here is dropped."""
        if not self.life.fail():
            return
        self._failure = reason
        log.warning("pair %s failed: %s", self.assignment.pair_id, reason)
        self._tensors.abort()
        await self._batches.close()
        if tell:
            await self._link.tell_ended(reason, self._batches.finished_ids)
        await self._detach()

    def _engine_failed(self, error: Exception) -> None:
        if self._queue.dissolved:
            # What was kept is nobody else's any more, even if the source does not know yet.
            self._spawn(self._parting.abandon(Unavailable(f"the engine failed: {type(error).__name__}: {error}")))
        else:
            self._fail_soon(f"the target's engine failed: {error}")

    async def _detach(self) -> None:
        def detach(loop: EngineLoop) -> None:
            if loop.partial is self._stepper:
                loop.partial = None

        with contextlib.suppress(BlitzError):  # the engine has stopped
            await asyncio.wrap_future(self.instance.engine.call(detach))
        self.ended.set()

    async def close(self) -> None:
        """The instance or the process goes: leave the pair, and wait for what is under way."""
        await self.fail("the target leaves")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
