"""The target of a pair: it takes batches over, runs the layers that it has, and gives batches back.

Everything here runs on the event loop; the engine's part is ``target_work``. The target owns a request from when it
finishes its batch, or keeps it when the pair is dissolved. Until then the source has it: should either go, the source,
or the gateway after it, starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from services.worker.core.pair import PairLife, PairState
from services.worker.engine.loop import EngineLoop
from services.worker.instance import Instance
from services.worker.live.batch import PromptBatch, sequence_of
from services.worker.live.gates import Gates
from services.worker.live.target_work import Held, TargetWork
from services.worker.live.tensors import Kind, Tensors, sent
from services.worker.serving import Serving
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BadRequest, BlitzError, Conflict, Overloaded
from shared.messages.common import Ack
from shared.messages.live import (
    Dissolve,
    Dissolved,
    Gate,
    Given,
    HandOver,
    PairEnded,
    Pull,
    Pulled,
    Seal,
    Settle,
    Taken,
    ZigzagAssignment,
)
from shared.zigzag.queue import Claim, Policy, Queue

log = logging.getLogger(__name__)

WATCH_S = 0.05
RPC_TIMEOUT_S = 1.0


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
        self._bus = bus
        self._tensors = tensors
        self._serving = serving
        self._silence_s = silence_s
        self._event_loop = asyncio.get_running_loop()
        self._changed = asyncio.Condition()
        self._heard_s = time.monotonic()
        self._all_loaded = False
        self._sequences: dict[str, PromptBatch] = {}
        """All batches of the source that came, by id, until they are the source's again or owned."""
        self._known: set[str] = set()
        self._finished_ids: list[str] = []
        self._claims: dict[str, int] = {}
        """Claims whose tensors are on their way or there, and their serials."""
        self._shares: Dissolved | None = None
        self._gates = Gates(assignment)
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue = Queue(instance.layout.num_layers, Policy(assignment.policy))
        self._work = TargetWork(
            instance.engine.loop,
            self._queue,
            decode_interval_s=assignment.slo_tbt_s / 2,
            start_at_s=time.time(),
            on_layer=self._from_engine(self._wake_pulls),
            on_finished=self._from_engine(self._finished),
            on_broken=self._from_engine(lambda error: self._fail_soon(f"the target's engine failed: {error}")),
        )

    def begin(self) -> None:
        """The offer is accepted: hand-overs may come."""
        self.instance.engine.call(lambda loop: setattr(loop, "partial", self._work))
        self.life.move_to(PairState.REDIRECTING)
        self.layers_ready()
        self._spawn(self._watch())

    # --- from the source ---------------------------------------------------------------------

    async def on_hand_over(self, message: HandOver) -> Ack:
        """Reserve blocks for a batch and wait for its hidden states. Raises ``Overloaded`` when there is no room now,
        ``BadRequest`` when there will never be."""
        self._heard()
        if message.batch_id in self._known:
            return Ack()
        limit = self.instance.scheduler.limit_tokens
        sequences = [sequence_of(r, self.instance.record.spec.eos_token_ids) for r in message.requests]
        for sequence in sequences:
            if sequence.num_tokens >= limit:
                raise BadRequest(f"{sequence.num_tokens} tokens: the target takes up to {limit - 1}", param="requests")
        self._known.add(message.batch_id)
        batch = PromptBatch(message.batch_id, message.serial, sequences, message.layer_s)
        engine = self.instance.engine
        reserved = await asyncio.wrap_future(
            engine.call(lambda loop: loop.scheduler.reserve(sequences), between_layers=True)
        )
        if not reserved:
            self._known.discard(message.batch_id)
            raise Overloaded(f"no room for {batch.num_tokens} tokens of KV now")
        self._check_lives()
        held = Held(batch, None)
        with self._work.lock:
            if self._queue.dissolved:
                engine.call(lambda loop: loop.scheduler.release(sequences), between_layers=True)
                raise Conflict(f"pair {message.pair_id} is dissolved")
            self._add(message, held)
        self._sequences[batch.batch_id] = batch
        self._serving.host(message.requests)
        self._spawn(self._receive(message, held))
        self._wake_pulls()
        return Ack()

    async def _receive(self, message: HandOver, held: Held) -> None:
        num_bytes = held.batch.num_tokens * self.instance.engine.loop.engine.hidden_bytes_per_token
        try:
            held.hidden = await self._tensors.receive(num_bytes, message.serial, Kind.HANDED_HIDDEN)
        except BlitzError as error:
            # The source can have it back as it is. Should it stay here, there is an embedding some day.
            log.warning("the hidden states of batch %s did not arrive: %s", message.batch_id, error)
            async with self._changed:
                await self._changed.wait_for(lambda: self._all_loaded or self.life.state is PairState.FAILED)
            if self.life.state is PairState.FAILED:
                return
            engine, tokens = self.instance.engine, held.batch.token_ids()
            held.hidden = await asyncio.wrap_future(engine.call(lambda loop: loop.engine.embed_tokens(tokens)))
        with self._work.lock:
            self._queue.arrived(message.batch_id)
            self._work.changed()
        self._wake()

    def _add(self, message: HandOver, held: Held) -> None:
        """Into the queue, behind all that were handed over before. Under the queue's lock."""
        self._work.held[message.batch_id] = held
        self._queue.add(message.batch_id, message.layer_s, behind_seal=message.behind_seal, absent=True)
        self._gates.added(self._queue, message.batch_id)

    async def on_seal(self, message: Seal) -> Ack:
        """All that waited is here. Raises ``Conflict`` if a batch is missing."""
        self._heard()
        if len(self._known) < message.count:
            raise Conflict(f"{len(self._known)} batches of {message.count} are here")
        if self.life.state is PairState.REDIRECTING:
            self.life.move_to(PairState.COOPERATING)
            self._move_on()
        return Ack()

    async def on_pull(self, message: Pull) -> Pulled:
        """The earliest batch for the source; waits up to ``wait_s`` for one that it may have."""
        deadline_s = time.monotonic() + message.wait_s
        while True:
            self._heard()
            self._check_lives()
            with self._work.lock:
                done = self._queue.dissolved or self._is_over()
                found = None if done else self._queue.pull(message.claim_id)
            if isinstance(found, Claim):
                self._give(found, message.serial)
                # What was in the way of a later batch may be gone.
                self._wake()
                return self._pulled(found)
            left_s = deadline_s - time.monotonic()
            # Nothing at all, or nothing for as long as the caller waits.
            if left_s <= 0 or done:
                return self._pulled(None)
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), timeout=left_s)
                except TimeoutError:
                    continue

    def _pulled(self, claim: Claim | None) -> Pulled:
        return Pulled(
            batch_id="" if claim is None else claim.batch_id,
            first_layer=0 if claim is None else claim.first_layer,
            layers_ready=self._queue.layers_ready,
            loaded=self._all_loaded,
            can_dissolve=claim is None and self._is_over(),
        )

    def _is_over(self) -> bool:
        """Cooperation has nothing left to gain. The baselines have none once everything is loaded."""
        return self._queue.can_dissolve if self._queue.policy is Policy.ZIGZAG else self._queue.loaded

    def _give(self, claim: Claim, serial: int) -> None:
        """Send what was computed of a batch, once."""
        if claim.claim_id in self._claims:
            return
        self._claims[claim.claim_id] = serial
        if claim.first_layer:
            self._spawn(self._send(self._work.held[claim.batch_id], claim.first_layer, serial))

    async def _send(self, held: Held, num_layers: int, serial: int) -> None:
        engine, batch = self.instance.engine.loop.engine, held.batch
        hidden = await asyncio.to_thread(engine.hidden_states, held.activation)
        first = self._tensors.send(hidden, serial, Kind.PULLED_HIDDEN)
        kv = await asyncio.to_thread(engine.export_kv, batch.block_tables, batch.lengths, num_layers)
        failure = await sent(first, self._tensors.send(kv, serial, Kind.PULLED_KV))
        if failure is not None:
            log.info("batch %s: %s; the source computes it from the beginning", batch.batch_id, failure)

    async def on_settle(self, message: Settle) -> Ack:
        """The source has these batches: they are free here. Without claims it only says that it lives."""
        self._heard()
        self._check_lives()
        await self._settle(message.claim_ids)
        return Ack()

    async def _settle(self, claim_ids: tuple[str, ...]) -> None:
        batch_ids: list[str] = []
        with self._work.lock:
            open_claims = {claim.claim_id: claim for claim in self._queue.open_claims()}
            for claim_id in claim_ids:
                if claim_id in open_claims:
                    self._queue.confirm(claim_id)
                    batch_ids.append(open_claims[claim_id].batch_id)
        await self._drop(tuple(batch_ids))
        self._wake()

    async def _drop(self, batch_ids: tuple[str, ...]) -> None:
        if not batch_ids:
            return
        call = self.instance.engine.call(lambda _: self._work.drop(batch_ids), between_layers=True)
        await asyncio.wrap_future(call)
        for batch_id in batch_ids:
            if (batch := self._sequences.pop(batch_id, None)) is not None:
                self._serving.unhost(batch.sequences)

    async def on_dissolve(self, message: Dissolve) -> Dissolved:
        """Part: begun batches stay here, untouched ones are shared. Repeating gives the same shares."""
        self._heard()
        if self._shares is not None:
            return self._shares
        self._check_lives()
        # Between two steps, so that no batch is inside a layer.
        self._shares = await asyncio.wrap_future(self.instance.engine.call(lambda _: self._dissolve(message)))
        self.life.move_to(PairState.DISSOLVED)
        kept = [self._sequences.pop(i) for i in self._shares.kept if i in self._sequences]
        self._serving.announce([s for batch in kept for s in batch.sequences])
        self._spawn(self._hand_back(self._shares.given))
        log.info("pair %s is dissolved: %d kept, %d given", message.pair_id, len(kept), len(self._shares.given))
        self._wake()
        return self._shares

    async def _hand_back(self, given: tuple[Given, ...]) -> None:
        """Send what was begun of the given batches, free them, and wait for the end of the kept ones."""
        await asyncio.gather(
            *(self._send(self._work.held[g.batch_id], g.first_layer, g.serial) for g in given if g.first_layer)
        )
        await self._drop(tuple(g.batch_id for g in given))
        async with self._changed:
            await self._changed.wait_for(lambda: not self._work.held)
        await self._detach()

    def _dissolve(self, message: Dissolve) -> Dissolved:
        with self._work.lock:
            shares = self._queue.dissolve(message.claim_id, source_busy=message.source_busy_s)
            for claim in shares.given:
                self._queue.confirm(claim.claim_id)
            self._work.changed()
        return Dissolved(
            kept=shares.kept,
            given=tuple(
                Given(batch_id=claim.batch_id, first_layer=claim.first_layer, serial=message.first_serial + i)
                for i, claim in enumerate(shares.given)
            ),
            finished=tuple(self._finished_ids),
            layer_runs=self._work.layers.runs(),
        )

    # --- from the instance -------------------------------------------------------------------

    def layers_ready(self) -> None:
        """A layer more is loaded."""
        copy = self.instance.copy
        # The last layer counts once embedding and head are there, too: after it comes the head.
        ready = copy.layers_ready if copy.complete else min(copy.layers_ready, self._queue.num_layers - 1)
        news = copy.complete and not self._all_loaded
        self._all_loaded = copy.complete
        with self._work.lock:
            self._queue.set_layers_ready(ready)
            self._work.changed()
        self._move_on()
        self._wake()
        if news:
            self._spawn(self._tell_taken())

    def set_gates(self, gates: tuple[Gate, ...]) -> None:
        """A split was computed: hold both sides to it."""
        with self._work.lock:
            if not self._queue.dissolved and not self._queue.loaded:
                self._gates.set(self._queue, gates)
                self._work.changed()
        self._wake()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Nobody waits for a request any more."""
        for batch in self._batches():
            for sequence in batch.sequences:
                if sequence.key == (request_id, attempt):
                    sequence.finished = True
                    if batch.ended:
                        self._spawn(self._cancel(batch))

    def cancel_gateway(self, gateway_id: str) -> None:
        """A gateway is gone."""
        for key in [s.key for b in self._batches() for s in b.sequences if s.gateway_id == gateway_id]:
            self.cancel(*key)

    def _batches(self) -> list[PromptBatch]:
        with self._work.lock:
            return [*self._sequences.values(), *(h.batch for h in self._work.held.values())]

    async def _cancel(self, batch: PromptBatch) -> None:
        with self._work.lock:
            if batch.batch_id not in self._work.held or self._queue.batch(batch.batch_id).holder is None:
                return
            if any(c.batch_id == batch.batch_id for c in self._queue.open_claims()):
                return  # the source sees that nobody waits, and settles it
            self._queue.cancel(batch.batch_id)
            inside = self._queue.batch(batch.batch_id).in_layer
        if not inside:  # otherwise the engine drops it when the layer ends
            await self._drop((batch.batch_id,))
        self._wake()

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

    def _heard(self) -> None:
        self._heard_s = time.monotonic()

    def _check_lives(self) -> None:
        if self.life.state is PairState.FAILED:
            raise Conflict(f"pair {self.assignment.pair_id} has failed here")

    def _move_on(self) -> None:
        if self._all_loaded and self.life.state is PairState.COOPERATING:
            self.life.move_to(PairState.LOADED)

    def _wake(self) -> None:
        """There may be a layer to run, or a batch to pull."""
        self.instance.engine.call(lambda _: None, between_layers=True)
        self._wake_pulls()

    def _wake_pulls(self) -> None:
        self._spawn(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _finished(self, batch: PromptBatch) -> None:
        self._finished_ids.append(batch.batch_id)
        self._sequences.pop(batch.batch_id, None)
        if self.life.ended:
            self._wake_pulls()
        else:
            self._spawn(self._tell_taken(batch.batch_id))

    async def _tell_taken(self, *batch_ids: str) -> None:
        message = Taken(pair_id=self.assignment.pair_id, batch_ids=batch_ids, loaded=self._all_loaded)
        subject = subjects.worker_live(self.assignment.source.worker_id, "taken")
        while not self.life.ended:
            try:
                await self._bus.request(subject, message, Ack, timeout_s=RPC_TIMEOUT_S)
            except BlitzError as error:
                log.debug("the source did not hear that %s are taken: %s", batch_ids, error)
                await asyncio.sleep(WATCH_S)
                continue
            return

    async def _watch(self) -> None:
        """Until the pair ends: does the source still live, do layers come as planned?"""
        while not self.life.ended:
            await asyncio.sleep(WATCH_S)
            with self._work.lock:
                lapsed = self._gates.lapse_if_late(self._queue, time.time())
                if lapsed:
                    self._work.changed()
            if lapsed:
                log.info("pair %s: layers are late, the split is off", self.assignment.pair_id)
                self._wake()
            connected_since_s = self._bus.connected_since_s
            if connected_since_s is None:
                self._heard()
            elif self._tensors.peer_is_lost:
                self._fail_soon("the connection to the source is lost")
            elif time.monotonic() - max(self._heard_s, connected_since_s) > self._silence_s:
                self._fail_soon(f"the source was silent for {self._silence_s:g} s")

    def _fail_soon(self, reason: str) -> None:
        if not self.life.ended:
            task = asyncio.create_task(self.fail(reason))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def fail(self, reason: str, *, tell: bool = True) -> None:
        """The pair is over: everything that is not owned here is dropped."""
        if not self.life.fail():
            return
        log.warning("pair %s failed: %s", self.assignment.pair_id, reason)
        if tell:
            message = PairEnded(pair_id=self.assignment.pair_id, reason=reason)
            try:
                await self._bus.publish(subjects.worker_pair_ended(self.assignment.source.worker_id), message)
            except BlitzError as error:
                log.debug("the source was not told: %s", error)
        self._tensors.abort()
        with contextlib.suppress(BlitzError):  # the engine has stopped, and freed everything
            await asyncio.wrap_future(self.instance.engine.call(lambda _: self._work.close()))
        for batch in self._sequences.values():
            self._serving.unhost(batch.sequences)
        self._sequences.clear()
        await self._notify()
        await self._detach()

    async def _detach(self) -> None:
        def detach(loop: EngineLoop) -> None:
            if loop.partial is self._work:
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
