"""How the source of a pair gets work: batches back from the target, and at times one that never went there.

A batch is begun with its hidden states. The KV of the layers that the target ran follows while the others run, off the
engine's thread: one batch after the other, as they decode. The source asks for layers as it has memory for them; the
target keeps its copy until the claim is settled. What does not come is computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import deque
from dataclasses import dataclass, field

from services.worker.core.pairing.source_work import LOOK_S, PULL_WAIT_S, PullTime
from services.worker.engine.loop import StepOutput
from services.worker.instance.instance import Instance
from services.worker.kv_transfer.sender import KvSender
from services.worker.link import LinkLost
from services.worker.live.handover import HandedOver
from services.worker.live.links import LinkToTarget
from services.worker.live.steppers import SourceBatch, SourceStepper
from services.worker.live.tensors import Kind, Tensors, can_tag_kv
from shared.aio import Wakeup, in_thread
from shared.errors import BlitzError, DeadlineExceeded, TransferAborted, TransportError
from shared.messages.common import Ack
from shared.messages.live import Pull, Pulled, PullKv
from shared.transport.base import Buffer

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
"""Layers come together up to so many bytes; a larger layer comes alone."""
WINDOW_BYTES = 64 << 20
"""Of KV that may be on its way, or wait to be imported; at least one piece."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A batch whose KV is to be fetched."""

    pulled: SourceBatch
    claim_id: str
    serial: int
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    """The batch was begun here, or is known not to be."""


class Puller:
    """One batch after the other. Event loop only. What pulls raises ``LinkLost`` when the target is gone."""

    def __init__(
        self,
        pair_id: str,
        instance: Instance,
        handed_over: HandedOver,
        link: LinkToTarget,
        stepper: SourceStepper,
        tensors: Tensors,
        kv_sender: KvSender,
        *,
        pull_s: float,
    ) -> None:
        """``pull_s``: as measured so far."""
        self._pair_id = pair_id
        self._instance = instance
        self._handed = handed_over
        self._link = link
        self._stepper = stepper
        self._tensors = tensors
        self._kv_sender = kv_sender
        self._num_direct = 0
        """Batches whose KV leaves from both members, and that are not decoded elsewhere yet."""
        self._direct_over = Wakeup()
        self._coming: deque[Coming] = deque()
        self._fetching: asyncio.Task[None] | None = None
        self.num_claims = 0
        self.time = PullTime(pull_s)
        """Of pulls, as measured."""
        self.free = asyncio.Event()
        """Set when the engine is free, or there is another reason to look."""

    async def until_free(self) -> None:
        """Until the engine is free for another batch, or there is another reason to look."""
        while True:
            await self._wait()
            if self.free.is_set():
                break
            # Requests that leave with their KV, or have ended, give their room back between two steps: no step says so.
            self._ask_engine()
        self.free.clear()

    async def _wait(self) -> None:
        """Until ``free`` is set, or a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._link.until(self.free.wait())

    def _ask_engine(self) -> None:
        """It says if it is free."""
        self._instance.engine.call(lambda _: self._stepper.stepped(StepOutput(())), between_layers=True)

    async def pull(self) -> Pulled:
        """Ask for the earliest batch, and begin it if there is one."""
        serial, started_s = self.num_claims, time.monotonic()
        self.num_claims += 1
        claim_id = f"{self._pair_id}-claim-{serial}"
        message = Pull(
            pair_id=self._pair_id,
            claim_id=claim_id,
            serial=serial,
            wait_s=PULL_WAIT_S,
        )
        answer = await self._link.ask_pair("pull", message, Pulled, wait_s=PULL_WAIT_S)
        if answer.batch_id:
            await self.receive(answer.batch_id, answer.first_layer, claim_id, serial, kv_direct=answer.kv_direct)
            self._took(time.monotonic() - started_s)
        else:
            self.free.set()  # it still is, unless something comes in between
        return answer

    async def receive(
        self, batch_id: str, first_layer: int, claim_id: str, serial: int, *, kv_direct: bool = False
    ) -> None:
        """Get a batch here that the target gave, and begin it. Its KV follows, or goes straight to who decodes it."""
        batch = self._handed.queue.handed[batch_id]
        self._handed.queue.pulled.add(batch_id)
        pulled = SourceBatch(batch)
        if first_layer:
            num_bytes = batch.num_tokens * self._instance.engine.loop.engine.hidden_bytes_per_token
            try:
                hidden = await self._link.until(self._tensors.receive(num_bytes, serial, Kind.PULLED_HIDDEN))
                pulled = SourceBatch(batch, first_layer, kv_direct, hidden=hidden)
            except (TransportError, DeadlineExceeded) as error:
                log.warning("batch %s is computed from the beginning: %s", batch_id, error)
        if not pulled.first_layer:
            self._link.settle(claim_id)
        coming = Coming(pulled, claim_id, serial)
        if pulled.kv_direct:
            self._send_rest(coming)  # before the engine says anything of it
        try:
            await self._begin(pulled)
        except BaseException:
            self._kv_sender.forget(batch.sequences)
            raise
        finally:
            coming.tried.set()
        del self._handed.queue.handed[batch_id]
        if pulled.first_layer and not pulled.kv_direct:
            self._fetch_soon(coming)

    def _send_rest(self, coming: Coming) -> None:
        self._num_direct += 1
        over = functools.partial(self._rest_is_over, coming)
        self._kv_sender.send_rest(coming.pulled.batch.sequences, coming.pulled.first_layer, over)

    async def _rest_is_over(self, coming: Coming) -> None:
        """Its requests are decoded elsewhere, have ended, or are to be decoded here: then KV of the first layers is
        needed after all."""
        batch = coming.pulled.batch
        await coming.tried.wait()  # all may be over while it waits for room here
        with contextlib.suppress(BlitzError):  # the engine has stopped, and ended everything
            if batch.begun and await self._handed.call(lambda: batch.ended):
                self._link.settle(coming.claim_id)
                await self._handed.call(functools.partial(self._stepper.kv_over, coming.pulled, is_here=True))
            elif batch.begun:
                self._fetch_soon(coming)
        self._num_direct -= 1
        self._direct_over.fire()

    async def until_all_is_over(self) -> None:
        """Until the target's copies of what was pulled are not needed any more. Raises ``LinkLost``."""
        await self._link.until(self._direct_over.until(lambda: not self._num_direct))
        await self.until_kv_is_over()

    async def _begin(self, pulled: SourceBatch) -> None:
        batch, scheduler = pulled.batch, self._instance.engine.loop.scheduler

        def start() -> bool:
            if not self._handed.queue.begin(batch, scheduler):
                return False
            self._stepper.start(pulled)
            return True

        while not await self._handed.call(start):
            self.free.clear()
            await self._wait()  # room may have come just before
        # What the engine said before it had this batch does not count any more. But by now it may be done with it, and
        # nothing else would say so.
        self.free.clear()
        self._ask_engine()

    async def run_from_backlog(self) -> None:
        """The target has nothing to pull, and no capacity or no use for what waits here: it is begun here."""
        async with self._handed.lock:
            backlog = self._handed.queue.backlog
            if backlog:
                await self._begin(SourceBatch(backlog[0]))
                backlog.popleft()

    def _took(self, seconds: float) -> None:
        layer_s = max((b.layer_s for b in self._handed.queue.handed.values()), default=0.0)
        self.time.took(seconds, layer_s)
        self._stepper.lead_s = self.time.lead_s

    # --- KV ----------------------------------------------------------------------------------

    def _fetch_soon(self, coming: Coming) -> None:
        """The batch was begun at the source, and has its blocks there."""
        self._coming.append(coming)
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch_all())

    async def until_kv_is_over(self) -> None:
        """Until nothing is fetched, and nothing written into any block, any more. Short once the pair is lost."""
        if self._fetching is not None:
            await asyncio.wait({self._fetching})

    async def stop(self) -> None:
        """At the end of the process."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait({self._fetching})

    async def _fetch_all(self) -> None:
        while self._coming:
            coming = self._coming.popleft()
            is_here = await self._fetch(coming)
            self._link.settle(coming.claim_id)
            over = functools.partial(self._stepper.kv_over, coming.pulled, is_here=is_here)
            with contextlib.suppress(BlitzError):  # the engine has stopped, and ended everything
                await self._handed.call(over)

    async def _fetch(self, coming: Coming) -> bool:
        batch = coming.pulled.batch
        try:
            await self._receive(coming)
        except (LinkLost, BlitzError) as error:
            log.log(
                logging.DEBUG if batch.ended else logging.WARNING,
                "batch %s is computed again: its KV does not come: %s",
                *(batch.batch_id, error),
            )
        except Exception:  # an engine may raise anything about KV that is not right
            log.exception("batch %s is computed again: its KV cannot be imported", batch.batch_id)
        else:
            return True
        return False

    async def _receive(self, coming: Coming) -> None:
        """Raises ``LinkLost``, ``BlitzError``, or what the engine raises."""
        pulled, engine = coming.pulled, self._instance.engine.loop.engine
        batch, tables = pulled.batch, pulled.batch.block_tables
        layer_bytes = batch.num_tokens * engine.kv_bytes_per_token_layer
        if not can_tag_kv(coming.serial, pulled.first_layer):
            raise TransportError(f"claim {coming.serial} is more than a pair can count for KV")
        each = max(1, PIECE_BYTES // layer_bytes)
        ahead = max(1, WINDOW_BYTES // (each * layer_bytes))
        firsts = deque(range(0, pulled.first_layer, each))
        posted: deque[tuple[int, int, asyncio.Future[Buffer]]] = deque()
        try:
            while firsts or posted:
                while firsts and len(posted) < ahead:
                    first = firsts.popleft()
                    last = min(first + each, pulled.first_layer)
                    piece: asyncio.Future[Buffer] = asyncio.ensure_future(
                        self._ask(coming, first, last, (last - first) * layer_bytes)
                    )
                    posted.append((first, last, piece))
                first, last, piece = posted[0]
                kv = await self._link.until(piece)
                if batch.ended:
                    raise TransferAborted("all of its requests were cancelled")
                posted.popleft()
                work = functools.partial(engine.import_kv, tables, batch.lengths, last, kv, first_layer=first)
                (await in_thread(work)).result()
        finally:
            for _, _, piece in posted:
                piece.cancel()
            await asyncio.gather(*(piece for _, _, piece in posted), return_exceptions=True)

    async def _ask(self, coming: Coming, first: int, last: int, num_bytes: int) -> Buffer:
        receiving = asyncio.ensure_future(self._tensors.receive_kv(num_bytes, coming.serial, first))
        receiving.add_done_callback(lambda done: done.cancelled() or done.exception())  # the question may fail first
        try:
            await asyncio.sleep(0)  # the receive is posted
            message = PullKv(
                pair_id=self._pair_id,
                batch_id=coming.pulled.batch.batch_id,
                serial=coming.serial,
                first_layer=first,
                last_layer=last,
            )
            await self._link.ask_pair("pull_kv", message, Ack)
            return await receiving
        finally:
            receiving.cancel()
