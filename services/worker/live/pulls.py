"""How the source of a pair gets work: batches back from the target, and at times one that never went there."""

from __future__ import annotations

import asyncio
import logging
import time

from services.worker.instance.instance import Instance
from services.worker.live.batch import PromptBatch
from services.worker.live.handover import HandedOver
from services.worker.live.kv_fetching import Coming, KvFetching
from services.worker.live.link_to_target import LinkToTarget
from services.worker.live.source_stepper import SourceBatch, SourceStepper
from services.worker.live.tensors import Kind, Tensors, can_tag_kv
from shared.errors import DeadlineExceeded, TransportError
from shared.messages.live import Pull, Pulled
from shared.transport.base import Buffer

log = logging.getLogger(__name__)

PULL_WAIT_S = 0.25
"""How long one pull waits at the target for a batch."""
MAX_LEAD_LAYERS = 1.0
"""A batch is asked for at most so long before the one in hand is done."""
_SMOOTHING = 0.5


class Puller:
    """One batch after the other. Everything raises ``LinkLost`` when the target is gone."""

    def __init__(
        self,
        pair_id: str,
        instance: Instance,
        handed_over: HandedOver,
        link: LinkToTarget,
        stepper: SourceStepper,
        tensors: Tensors,
        kv: KvFetching,
        *,
        pull_s: float,
    ) -> None:
        """``pull_s``: as measured so far."""
        self._pair_id = pair_id
        self._instance = instance
        self._kv = kv
        self._handed = handed_over
        self._link = link
        self._stepper = stepper
        self._tensors = tensors
        self.num_claims = 0
        self.pull_s = pull_s
        """Seconds that a pull takes, as measured."""
        self.free = asyncio.Event()
        """Set when the engine is free, or there is another reason to look."""

    async def until_free(self) -> None:
        """Until the engine is free for another batch, or there is another reason to look."""
        await self._link.until(self.free.wait())
        self.free.clear()

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
            kv_apart=self.can_take_kv_apart(serial),
        )
        answer = await self._link.ask_pair("pull", message, Pulled, wait_s=PULL_WAIT_S)
        if answer.batch_id:
            await self.take(answer.batch_id, answer.first_layer, claim_id, serial, kv_apart=answer.kv_apart)
            self._took(time.monotonic() - started_s)
        else:
            self.free.set()  # it still is, unless something comes in between
        return answer

    def can_take_kv_apart(self, serial: int) -> bool:
        """Whether there are tags for it."""
        return can_tag_kv(serial, self._instance.layout.num_layers)

    async def take(self, batch_id: str, first_layer: int, claim_id: str, serial: int, *, kv_apart: bool) -> None:
        """Get a batch here that the target gave, and begin it. Its KV follows."""
        batch = self._handed.handed[batch_id]
        self._handed.given.add(batch_id)
        pulled, unasked = SourceBatch(batch), None
        if first_layer:
            if not kv_apart:
                unasked = self._expect_kv(batch, first_layer, serial)
            num_bytes = batch.num_tokens * self._instance.engine.loop.engine.hidden_bytes_per_token
            try:
                hidden = await self._link.until(self._tensors.receive(num_bytes, serial, Kind.PULLED_HIDDEN))
                pulled = SourceBatch(batch, first_layer, hidden)
            except (TransportError, DeadlineExceeded) as error:
                log.warning("batch %s is computed from the beginning: %s", batch_id, error)
        if not pulled.first_layer:
            self._link.settle(claim_id)
            if unasked is not None:
                unasked.cancel()
        await self._begin(pulled)
        del self._handed.handed[batch_id]
        if pulled.first_layer:
            self._kv.fetch(Coming(pulled, claim_id, serial, unasked))

    def _expect_kv(self, batch: PromptBatch, num_layers: int, serial: int) -> asyncio.Future[Buffer]:
        """The target sends it whole and unasked."""
        num_bytes = num_layers * batch.num_tokens * self._instance.engine.loop.engine.kv_bytes_per_token_layer
        coming = asyncio.ensure_future(self._tensors.receive(num_bytes, serial, Kind.PULLED_KV))
        coming.add_done_callback(lambda done: done.cancelled() or done.exception())  # the batch may be lost before
        return coming

    async def _begin(self, pulled: SourceBatch) -> None:
        batch, scheduler = pulled.batch, self._instance.engine.loop.scheduler

        def start() -> bool:
            if not batch.ended and not scheduler.reservations.reserve(batch.sequences):
                return False
            batch.begun = True
            self._stepper.start(pulled)
            return True

        while not await self._handed.call(start):
            self.free.clear()
            await self._link.until(self.free.wait())
        # What the engine said before it had this batch does not count any more.
        self.free.clear()

    async def run_from_backlog(self) -> None:
        """The target has nothing to pull, and no room or no use for what waits here: it is begun here."""
        async with self._handed.lock:
            if self._handed.backlog:
                await self._begin(SourceBatch(self._handed.backlog[0]))
                self._handed.backlog.popleft()

    def _took(self, seconds: float) -> None:
        self.pull_s += _SMOOTHING * (seconds - self.pull_s)
        layer_s = max((b.layer_s for b in self._handed.handed.values()), default=0.0)
        self._stepper.lead_s = min(self.pull_s, MAX_LEAD_LAYERS * layer_s)
