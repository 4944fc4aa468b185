"""What the engines of a pair's members do for it, on their threads: one layer of a batch per step, or part of one where
a prompt is long, so that decode steps come in between and what waits for the engine never waits for a whole prompt.

The source runs the rest of the layers of the batches that it pulled. Those layers need the hidden states alone. The KV
of the layers before, which the target ran, comes in the meantime: with the last layer a batch gives its first tokens,
and once its KV is here, too, its requests decode.

The target runs layers of the batches in its queue, as the queue says (``shared.zigzag.queue``). Its engine's thread
steps; other threads look at and change the queue under ``lock``, between two layers or during one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.pairing.source_work import Kv, SourceRun, SourceWork
from services.worker.core.pairing.target_work import TargetRun, TargetWork
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.engine.base import Activation
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.live.report import Timeline
from shared.transport.base import Buffer

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SourceBatch(SourceRun):
    """A batch of the source, with what its engine has of it. Changed on the engine's thread only."""

    hidden: Buffer = None
    """As of ``first_layer``, if that is not 0."""
    activation: Activation = field(init=False, default=None)
    broken: Exception | None = field(init=False, default=None)
    """It cannot be resumed."""


class SourceStepper:
    """``PartialWork`` of the source. On the engine's thread, but for ``remaining_s``; so are ``on_done(pulled)`` and
    ``on_free()``."""

    num_requests = 0
    """The scheduler counts all of them: they were accepted here."""
    queued = (0, 0)

    def __init__(
        self,
        loop: EngineLoop,
        *,
        decode_interval_s: float,
        start_s: float,
        on_done: Callable[[SourceBatch], None],
        on_free: Callable[[], None],
        on_token: Callable[[ActiveSequence, Sampled], None] = lambda _sequence, _token: None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """``on_token``: a request of a batch whose KV leaves from both members has its first token. ``has_room()``:
        asked on the engine's thread, whether the batch that probably comes fits."""
        self._loop = loop
        self._work: SourceWork[SourceBatch] = SourceWork(
            loop.engine.num_layers, loop.scheduler.config.prefill_chunk_tokens
        )
        self._on_done = on_done
        self._on_free = on_free
        self._on_token = on_token
        self._has_room = has_room
        self.decode_interval_s = decode_interval_s
        self.lead_s = 0.0
        """How long before it is free the source asks for the next batch: what a pull takes."""
        self.layers = Timeline(start_s)
        self.tokens = Timeline(start_s)

    @property
    def ready(self) -> bool:
        return bool(self._work)

    @property
    def remaining_s(self) -> float:
        """Expected seconds until the batches here are done."""
        return self._work.remaining_s

    @property
    def is_free(self) -> bool:
        """Another batch may be asked for: there is nothing else to run soon, and room for more."""
        return self._work.is_free(self._loop.scheduler, self.lead_s) and self._has_room()

    def start(self, pulled: SourceBatch) -> None:
        """Run the rest of a batch, after those that are here already. If it has a ``first_layer``, its KV may be
        imported as soon as this returns, and ``kv_over`` must follow."""
        if pulled.first_layer and not pulled.batch.ended:
            try:
                batch = self._loop.batches.of_prompts(pulled.batch.sequences)
                resumed = self._loop.engine.resume(batch, pulled.hidden, next_layer=pulled.first_layer)
                pulled.activation = resumed.result()
            except Exception as error:  # noqa: BLE001 - whatever it is, the batch ends with it in its turn
                pulled.broken = error
        self._work.begin(pulled, time.monotonic())

    def kv_over(self, pulled: SourceBatch, *, is_here: bool) -> None:
        """The KV of a batch is whole, or will not come. Its blocks are not written any more."""
        self._work.kv_over(pulled, self._loop.scheduler, is_here=is_here)

    def step(self) -> StepOutput | None:
        """One layer of the first batch, or a part of one; after the last one its first tokens."""
        pulled = self._work.first
        if pulled is None:
            return None
        batch, loop = pulled.batch, self._loop
        if batch.ended:
            return self._done(pulled, StepOutput(()))
        started_s = time.monotonic()
        output: StepOutput | None = StepOutput(())
        try:
            output = self._advance(pulled)
        except Exception:  # an engine may raise anything; ordinary steps find out which request it fails on
            log.exception(
                "layer %d of batch %s failed: its requests are computed in steps", pulled.next_layer, batch.batch_id
            )
            pulled.has_failed = True
        busy_s = time.monotonic() - started_s
        pulled.busy_s += busy_s
        loop.busy(busy_s)
        if output is None:
            return StepOutput(())
        if not pulled.has_failed:
            layers_run = loop.engine.num_layers - pulled.first_layer
            loop.measured_prefill(batch.num_tokens, pulled.busy_s * loop.engine.num_layers / layers_run)
        return self._done(pulled, output)

    def ran_layer(self) -> None:
        self.layers.add(time.monotonic())

    def stepped(self, output: StepOutput) -> None:
        if output.outputs:
            self.tokens.add(time.monotonic(), sum(len(o.token_ids) for o in output.outputs))
        if self.is_free:
            self._on_free()

    def _advance(self, pulled: SourceBatch) -> StepOutput | None:
        """One layer, or a part; the output once it was the last."""
        engine, batch = self._loop.engine, pulled.batch
        if pulled.broken is not None:
            raise pulled.broken
        if pulled.activation is None:
            pulled.activation = engine.embed(self._loop.batches.of_prompts(batch.sequences)).result()
        begin, end = self._work.next_part(pulled)
        engine.run_part(pulled.activation, pulled.next_layer, begin, end).result()
        if not self._work.ran(pulled, end):
            return None
        self.ran_layer()
        if pulled.kv_direct or pulled.kv is Kv.HERE:
            tell_layers(self._loop, batch, pulled.next_layer)
        if not self._work.is_through(pulled):
            return None
        output = finish(self._loop, batch, pulled.activation, kv_here=pulled.kv is Kv.HERE)
        if pulled.kv_direct:
            for sequence in batch.sequences:
                if (token := self._loop.scheduler.reservations.token_of(sequence)) is not None:
                    self._on_token(sequence, token)
        return output

    def _done(self, pulled: SourceBatch, output: StepOutput) -> StepOutput:
        pulled.activation = None  # it is large, and the batch's KV may still be on its way
        self._work.done(pulled, self._loop.scheduler)
        self._on_done(pulled)
        return output


@dataclass(slots=True)
class TargetBatch(TargetRun):
    """A batch of the target, with what its engine has of it."""

    hidden: Buffer = None
    """As the source embedded them, until the first layer is begun."""
    activation: Activation = None
    is_sent: bool = False
    """Once pulled, its hidden states are on their way, or there."""
    kv_sent: set[int] = field(default_factory=set)
    """The same of KV, by first layers."""
    kv_direct: bool | None = None
    """Once pulled: its KV leaves here for the decode instances."""


class TargetStepper:
    """``PartialWork`` of the target. The callbacks are called on the engine thread."""

    def __init__(
        self,
        loop: EngineLoop,
        work: TargetWork[TargetBatch],
        *,
        decode_interval_s: float,
        start_s: float,
        on_layer: Callable[[], None],
        on_finished: Callable[[PromptBatch], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        """``on_layer()``: a layer has ended; ``on_finished``: a batch has, and its requests decode here;
        ``on_broken``: the engine could not run a layer, this runs no more."""
        self._loop = loop
        self.lock = threading.Lock()
        self.work = work
        """Under ``lock``."""
        self.decode_interval_s = decode_interval_s
        self.layers = Timeline(start_s)
        self._on_layer = on_layer
        self._on_finished = on_finished
        self._on_broken = on_broken
        self._maybe = False

    @property
    def ready(self) -> bool:
        return self._maybe

    @property
    def num_requests(self) -> int:
        return sum(len(held.batch.sequences) for held in list(self.work.batches.values()))

    @property
    def queued(self) -> tuple[int, int]:
        """Kept batches are the target's own; before the pair dissolves, all are the source's."""
        work = self.work
        kept = [held.batch for held in list(work.batches.values())] if work.queue.dissolved else []
        return sum(len(b.sequences) for b in kept), sum(b.num_tokens for b in kept)

    def changed(self) -> None:
        """The queue did; there may be a layer to run. Under ``lock``; the caller wakes the engine."""
        self._maybe = not self.work.closed

    def close(self) -> list[PromptBatch]:
        """Run nothing more and free all blocks. Between two steps. Returns what was here."""
        with self.lock:
            self._maybe = False
            batches = self.work.close()
        return self._free(batches)

    def drop(self, batch_ids: tuple[str, ...]) -> list[PromptBatch]:
        """Free the blocks of batches that are the source's now. Between two steps or layers."""
        with self.lock:
            batches = self.work.drop(batch_ids)
        return self._free(batches)

    def _free(self, batches: list[PromptBatch]) -> list[PromptBatch]:
        for batch in batches:
            self._loop.scheduler.reservations.release(batch.sequences)
        return batches

    def step(self) -> StepOutput | None:
        with self.lock:
            held, layer = self.work.next(), self.work.inside
            if held is None or layer is None:
                self._maybe = False
                return None
            is_wanted = self.work.is_wanted
        started_s = time.monotonic()
        output = StepOutput(())
        try:
            if not is_wanted or self._run(held, layer.layer):
                output = self._end(held, layer.layer, is_wanted)
        except Exception as error:  # an engine may raise anything; the source computes these batches then
            log.exception("layer %d of batch %s failed", layer.layer, layer.batch_id)
            with self.lock:
                self._maybe = False
                self.work.halt()
            self._on_broken(error)
            return StepOutput(())
        self._loop.busy(time.monotonic() - started_s)
        return output

    def _run(self, held: TargetBatch, layer: int) -> bool:
        """A part of the layer; whether it was the last one."""
        engine = self._loop.engine
        if held.activation is None:
            batch = self._loop.batches.of_prompts(held.batch.sequences)
            held.activation = engine.resume(batch, held.hidden, next_layer=0).result()
            held.hidden = None
            tell_layers(self._loop, held.batch, 0)
        begin, end = self.work.next_part(held)
        engine.run_part(held.activation, layer, begin, end).result()
        if not self.work.ran(held, end):
            return False
        self.ran_layer()
        tell_layers(self._loop, held.batch, layer + 1)
        return True

    def _end(self, held: TargetBatch, layer: int, ran: bool) -> StepOutput:
        """``ran``: the whole layer; else it was given up, because the batch was cancelled."""
        output = StepOutput(())
        adopts = ran and layer + 1 == self._loop.engine.num_layers
        if adopts:
            # Before the queue knows: the next look must find the requests in one place or the other.
            output = finish(self._loop, held.batch, held.activation)
        with self.lock:
            end = self.work.end_layer(held)
        if end.ended and not adopts:  # cancelled while it ran
            self._loop.scheduler.reservations.release(held.batch.sequences)
        if end.finished:
            self._on_finished(held.batch)
        self._on_layer()
        return output

    def ran_layer(self) -> None:
        self.layers.add(time.monotonic())

    def stepped(self, output: StepOutput) -> None:
        """Only a source asks for its tokens."""


def tell_layers(loop: EngineLoop, batch: PromptBatch, num_layers: int) -> None:
    """So many layers of a batch have run here: the KV of those of its requests that are decoded elsewhere can leave; 0:
    the batch was begun."""
    if loop.prefill_listener is not None:
        for sequence, num_tokens in zip(batch.sequences, batch.lengths, strict=True):
            if sequence.decode_at is not None and not sequence.finished:
                loop.prefill_listener.ran_layers(sequence, 0, num_tokens, num_layers)


def finish(loop: EngineLoop, batch: PromptBatch, activation: Activation, *, kv_here: bool = True) -> StepOutput:
    """Norm, head and sampling of a batch that ran all layers: its requests decode here from now on, or with
    ``kv_here`` false once their KV is whole."""
    sampled = loop.engine.sample(activation).result()
    outputs = batch.adopt(loop.scheduler.reservations, sampled, time.monotonic(), kv_here=kv_here)
    return StepOutput(outputs, num_prefill_tokens=batch.num_tokens)
