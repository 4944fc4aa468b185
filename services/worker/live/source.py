"""The source of a pair: it hands its queue over, pulls batches back, and keeps what clients were promised.

Everything here runs on the event loop; the engine's part is ``source_work``. Every request of the pair was accepted by
the source's scheduler and stays accepted there: whatever becomes of the target, the source can compute it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from opentelemetry import trace

from services.worker.core.pair import PairLife, PairState
from services.worker.instance import Instance
from services.worker.live.batch import PromptBatch
from services.worker.live.handing import Handing
from services.worker.live.peer import PairLost, Peer
from services.worker.live.report import PairRecord
from services.worker.live.source_work import Pulled, SourceWork
from services.worker.live.tensors import Kind, Tensors
from services.worker.serving import Serving
from shared.errors import (
    BlitzError,
    Conflict,
    DeadlineExceeded,
    TransportError,
)
from shared.messages.common import Ack
from shared.messages.live import (
    Dissolve,
    Dissolved,
    Given,
    LiveReport,
    PlanSplit,
    Pull,
    Seal,
    SplitBatch,
    Taken,
    ZigzagAssignment,
)
from shared.messages.live import Pulled as PulledAnswer

log = logging.getLogger(__name__)

PULL_WAIT_S = 0.25
"""How long one pull waits at the target for a batch."""
MAX_LEAD_LAYERS = 1.0
"""A batch is asked for at most so long before the one in hand is done."""
_SMOOTHING = 0.5


class LiveSource:
    """From the offer to the end of the last batch that it pulled: ``run``."""

    def __init__(
        self,
        assignment: ZigzagAssignment,
        instance: Instance,
        peer: Peer,
        connect: Callable[[], Awaitable[Tensors]],
        serving: Serving,
        ask_split: Callable[[PlanSplit], Awaitable[None]],
    ) -> None:
        """``connect()``: to the target; ``ask_split``: tells the planner what waits, who may answer with gates."""
        self.assignment = assignment
        self.instance = instance
        self.life = PairLife()
        self._peer = peer
        self._connect = connect
        self._serving = serving
        self._ask_split = ask_split
        self._event_loop = asyncio.get_running_loop()
        self._num_layers = instance.layout.num_layers
        self._record = PairRecord(assignment, time.time())
        self._tensors: Tensors | None = None
        self._handing = Handing(assignment, instance, peer)
        self._num_claims = 0
        self._target_loaded = False
        self._failure = ""
        self._arrivals = asyncio.Event()
        self._free = asyncio.Event()
        self._done = asyncio.Event()
        self._pull_s = 0.0
        self._work = SourceWork(
            instance.engine.loop,
            decode_interval_s=assignment.slo_tbt_s / 2,
            start_at_s=self._record.started_at_s,
            on_done=lambda pulled: self._from_engine(self._batch_done, pulled, time.time()),
            on_free=lambda: self._from_engine(self._free.set),
        )

    # --- the whole of it ---------------------------------------------------------------------

    async def run(self) -> LiveReport:
        """Cooperate until the pair ends, well or not, and everything that the source has is on its way."""
        try:
            await self._offer()
            await self._redirect()
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._hand_arrivals()), group.create_task(self._peer.keep_alive())]
                await self._pull_until_dissolved()
                for helper in helpers:
                    helper.cancel()
        except* (PairLost, BlitzError) as errors:
            await self._fail(str(errors.exceptions[0]))
        await self._handing.end()
        while self._work.ready:
            self._done.clear()
            await self._done.wait()
        await self._handing.call(self._detach)
        return self._record.report(self.life.state, self._failure, self._work)

    def arrived(self) -> None:
        """A request was accepted: it goes the way of the others."""
        self._arrivals.set()

    def cancel(self, request_id: str, attempt: int) -> None:
        """Nobody waits for a request any more: the target need not compute it."""
        if self._handing.holds(request_id, attempt):
            self._peer.cancel(request_id, attempt)

    async def leave(self, reason: str) -> None:
        """This process ends: the target need not wait."""
        await self._fail(reason)

    def lost(self, reason: str) -> None:
        """The target says that the pair is over."""
        self._peer.lose(reason)

    # --- offered, redirecting ------------------------------------------------------------------

    async def _offer(self) -> None:
        await self._peer.offer(self.assignment)
        self._tensors = await self._connect()
        self._peer.watch(self._tensors)
        self.life.move_to(PairState.REDIRECTING)

    async def _redirect(self) -> None:
        handing = self._handing
        await handing.lend(self._begin_lending)
        await handing.hand_over(self._require_tensors(), behind_seal=False)
        await self._peer.ask("seal", Seal(pair_id=self.assignment.pair_id, count=handing.num_handed), Ack)
        self.life.move_to(PairState.COOPERATING)
        trace.get_current_span().add_event("sealed", {"blitz.batches": handing.num_handed})
        await self._ask_for_split()

    def _begin_lending(self) -> None:
        loop = self.instance.engine.loop
        loop.partial = self._work
        loop.scheduler.lending = True
        if self._work.is_free:
            self._from_engine(self._free.set)

    async def _hand_arrivals(self) -> None:
        while True:
            await self._arrivals.wait()
            self._arrivals.clear()
            await self._handing.lend()
            await self._handing.hand_over(self._require_tensors(), behind_seal=True)

    async def _ask_for_split(self) -> None:
        waiting = [SplitBatch(batch_id=b.batch_id, layer_s=b.layer_s) for b in self._handing.handed.values()]
        measured = self.instance.engine.loop.prefill_token_s > 0
        if self.assignment.policy != "zigzag" or not measured or len({b.layer_s for b in waiting}) < 2:
            return  # equal batches need no split, and without a measurement there is none
        try:
            await self._ask_split(
                PlanSplit(
                    pair_id=self.assignment.pair_id,
                    batches=tuple(waiting),
                    source_free_at_s=time.time() + self._work.remaining_s,
                    pull_s=self._pull_s,
                )
            )
        except BlitzError as error:
            log.info("pair %s goes without a split: %s", self.assignment.pair_id, error)

    # --- cooperating, loaded -------------------------------------------------------------------

    async def _pull_until_dissolved(self) -> None:
        while True:
            await self._until_free()
            if self._is_over():
                await self._dissolve()
                return
            serial = self._num_claims
            self._num_claims += 1
            started_s = time.monotonic()
            answer = await self._pull(serial)
            self._target_loaded = self._target_loaded or answer.loaded
            if self._target_loaded and self.life.state is PairState.COOPERATING:
                self.life.move_to(PairState.LOADED)
            if answer.batch_id:
                await self._take(answer.batch_id, answer.first_layer, serial)
                self._took_s(time.monotonic() - started_s)
            elif answer.can_dissolve or self.instance.state != "serving":
                await self._dissolve()
                return
            elif self._handing.backlog:
                await self._run_from_backlog()

    async def _until_free(self) -> None:
        """No prefill is unfinished here, and there is room for the batch that probably comes; or it is over."""
        while True:
            await self._peer.until(self._free.wait())
            self._free.clear()
            if self._is_over():
                return
            handed, backlog = self._handing.handed, self._handing.backlog
            expected = next(iter(handed.values()), None) or (backlog[0] if backlog else None)
            if await self._handing.call(lambda: self._work.is_free and self._fits(expected)):  # noqa: B023 - awaited at once
                return
            # Steps tell when prefills end; blocks come free with decodes, which are steps as well.

    def _fits(self, batch: PromptBatch | None) -> bool:
        pool = self.instance.engine.loop.scheduler.pool
        return batch is None or pool.can_allocate(sum(pool.blocks_for(n) for n in batch.lengths))

    async def _pull(self, serial: int) -> PulledAnswer:
        pair_id = self.assignment.pair_id
        message = Pull(pair_id=pair_id, claim_id=f"{pair_id}-claim-{serial}", serial=serial, wait_s=PULL_WAIT_S)
        answer = await self._peer.ask("pull", message, PulledAnswer, wait_s=PULL_WAIT_S)
        if not answer.batch_id:
            self._free.set()  # it still is, unless something comes in between
        return answer

    async def _take(self, batch_id: str, first_layer: int, serial: int) -> None:
        """Get a claimed batch here and begin it."""
        batch = self._handing.handed[batch_id]
        hidden = kv = None
        if first_layer:
            engine, tensors = self.instance.engine.loop.engine, self._require_tensors()
            num_tokens = batch.num_tokens
            kv_bytes = first_layer * num_tokens * engine.kv_bytes_per_token_layer
            try:
                hidden, kv = await asyncio.gather(
                    self._peer.until(
                        tensors.receive(num_tokens * engine.hidden_bytes_per_token, serial, Kind.PULLED_HIDDEN)
                    ),
                    self._peer.until(tensors.receive(kv_bytes, serial, Kind.PULLED_KV)),
                )
            except (TransportError, DeadlineExceeded) as error:
                log.warning("batch %s is computed from the beginning: %s", batch_id, error)
                first_layer, hidden, kv = 0, None, None
        self._peer.settle(f"{self.assignment.pair_id}-claim-{serial}")
        await self._begin(Pulled(batch, first_layer, hidden, kv))
        del self._handing.handed[batch_id]
        if self._handing.backlog:
            # There is room at the target now.
            self._arrivals.set()

    async def _begin(self, pulled: Pulled) -> None:
        sequences = pulled.batch.sequences

        def start() -> bool:
            if not pulled.batch.ended and not self.instance.engine.loop.scheduler.reserve(sequences):
                return False
            pulled.batch.begun = True
            self._work.start(pulled)
            return True

        while not await self._handing.call(start):
            self._free.clear()
            await self._peer.until(self._free.wait())

    async def _run_from_backlog(self) -> None:
        """The target has nothing to pull, and no room or no use for what waits here: it is begun here."""
        async with self._handing.lock:
            if self._handing.backlog:
                await self._begin(Pulled(self._handing.backlog[0]))
                self._handing.backlog.popleft()

    def _took_s(self, seconds: float) -> None:
        self._pull_s += _SMOOTHING * (seconds - self._pull_s)
        layer_s = max((b.layer_s for b in self._handing.handed.values()), default=0.0)
        self._work.lead_s = min(self._pull_s, MAX_LEAD_LAYERS * layer_s)

    # --- the end -----------------------------------------------------------------------------

    async def _dissolve(self) -> None:
        pair_id, serial = self.assignment.pair_id, self._num_claims
        async with self._handing.lock:  # nothing is on its way there
            answer = await self._peer.ask(
                "dissolve",
                Dissolve(
                    pair_id=pair_id,
                    claim_id=f"{pair_id}-end",
                    first_serial=serial,
                    source_busy_s=self._work.remaining_s,
                ),
                Dissolved,
            )
            self.life.move_to(PairState.DISSOLVED)
            self._record.target_runs = answer.layer_runs
            self._owned_by_target((*answer.finished, *answer.kept))
        await self._take_given(answer.given)

    async def _take_given(self, given: tuple[Given, ...]) -> None:
        for each in given:
            if each.first_layer and each.batch_id in self._handing.handed:
                await self._take(each.batch_id, each.first_layer, each.serial)
        # Untouched ones are at the target still as far as we know: they come back with all that it does not own.

    def on_taken(self, message: Taken) -> Ack:
        """The target finished batches: their requests are its own."""
        self._owned_by_target(message.batch_ids)
        if self._handing.backlog:
            self._arrivals.set()  # there is room at the target now
        if message.loaded and not self._target_loaded:
            self._target_loaded = True
            self._free.set()  # the baselines part now, busy or not
        return Ack()

    def _is_over(self) -> bool:
        return self._target_loaded and self.assignment.policy != "zigzag" and not self.life.ended

    def _owned_by_target(self, batch_ids: Iterable[str]) -> None:
        handed = self._handing.handed
        batches = [handed.pop(i) for i in batch_ids if i in handed]
        for batch in batches:
            self._record.done(batch, first_layer=self._num_layers, num_layers=self._num_layers, at_s=time.time())
        sequences = [s for batch in batches for s in batch.sequences]
        self._serving.moved(sequences, self.assignment.target.worker_id)
        self.instance.engine.call(lambda loop: loop.scheduler.disown(sequences), between_layers=True)

    def _batch_done(self, pulled: Pulled, at_s: float) -> None:
        self._record.done(pulled.batch, first_layer=pulled.first_layer, num_layers=self._num_layers, at_s=at_s)
        self._done.set()

    async def _fail(self, reason: str) -> None:
        if not self.life.fail():
            return
        self._failure = reason
        log.warning("pair %s failed: %s", self.assignment.pair_id, reason)
        trace.get_current_span().add_event("failed", {"blitz.reason": reason})
        if self._tensors is not None:
            self._tensors.abort()
        await self._peer.tell_ended(reason)

    def _detach(self) -> None:
        loop = self.instance.engine.loop
        if loop.partial is self._work:
            loop.partial = None

    # --- inside ------------------------------------------------------------------------------

    def _from_engine(self, function: Callable[..., None], *arguments: object) -> None:
        self._event_loop.call_soon_threadsafe(function, *arguments)

    def _require_tensors(self) -> Tensors:
        if self._tensors is None:
            raise Conflict(f"pair {self.assignment.pair_id} has not begun")
        return self._tensors
