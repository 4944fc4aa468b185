"""What the target's engine does for a pair: layers of the batches in its queue, as the queue says; of long prompts in
parts, a part per step.

The queue's rules are ``shared.zigzag.queue``; this holds its batches' hidden states and runs them. The engine thread
steps; other threads look at and change the queue under ``lock``, between two layers or during one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.worker.engine.base import Activation
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.live.batch import PromptBatch
from services.worker.live.report import Timeline
from services.worker.live.source_stepper import finish, run_part
from shared.transport.base import Buffer
from shared.zigzag.batch import ENDED, State
from shared.zigzag.queue import Claim, Layer, Queue

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TargetBatch:
    """A batch at the target. Its sequences hold blocks here."""

    batch: PromptBatch
    hidden: Buffer
    """As the source embedded them, until the first layer is begun."""
    activation: Activation = None
    next_token: int = 0
    """Of the layer that it is inside of: those before it have run."""
    is_sent: bool = False
    """Once pulled, its hidden states are on their way, or there."""
    kv_sent: set[int] = field(default_factory=set)
    """The same of KV, by first layers."""


class TargetStepper:
    """``PartialWork`` of the target. The callbacks are called on the engine thread."""

    def __init__(
        self,
        loop: EngineLoop,
        queue: Queue,
        *,
        decode_interval_s: float,
        start_at_s: float,
        on_layer: Callable[[], None],
        on_finished: Callable[[PromptBatch], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        """``on_layer()``: a layer has ended; ``on_finished``: a batch has, and its requests decode here;
        ``on_broken``: the engine could not run a layer, this runs no more."""
        self._loop = loop
        self.queue = queue
        self.lock = threading.Lock()
        self.batches: dict[str, TargetBatch] = {}
        """Under ``lock``."""
        self.decode_interval_s = decode_interval_s
        self.layers = Timeline(start_at_s)
        self._on_layer = on_layer
        self._on_finished = on_finished
        self._on_broken = on_broken
        self.finished: list[str] = []
        """Batches that ended here, in order. Under ``lock``."""
        self.wanted = ""
        """The claim id of a pull that waits: the batch is its as soon as a layer ends, before another one is begun.
        Under ``lock``."""
        self._inside: Layer | None = None
        """Begun, with parts that are left. On the engine's thread."""
        self._maybe = False
        self._closed = False

    @property
    def ready(self) -> bool:
        return self._maybe

    @property
    def num_requests(self) -> int:
        return sum(len(held.batch.sequences) for held in list(self.batches.values()))

    @property
    def queued(self) -> tuple[int, int]:
        """Kept batches are the target's own; before the pair dissolves, all are the source's."""
        kept = [held.batch for held in list(self.batches.values())] if self.queue.dissolved else []
        return sum(len(b.sequences) for b in kept), sum(b.num_tokens for b in kept)

    @property
    def is_inside(self) -> bool:
        """A batch is inside a layer between two steps. On the engine's thread."""
        return self._inside is not None

    def changed(self) -> None:
        """The queue did; there may be a layer to run. Under ``lock``; the caller wakes the engine."""
        self._maybe = not self._closed

    def close(self) -> list[PromptBatch]:
        """Run nothing more and free all blocks. Between two steps. Returns what was here."""
        with self.lock:
            self._closed, self._maybe, self._inside = True, False, None
            batches = [held.batch for held in self.batches.values()]
            self.batches.clear()
        for batch in batches:
            self._loop.scheduler.reservations.release(batch.sequences)
        return batches

    def drop(self, batch_ids: tuple[str, ...]) -> list[PromptBatch]:
        """Free the blocks of batches that are the source's now. Between two steps or layers."""
        with self.lock:
            batches = [self.batches.pop(i).batch for i in batch_ids if i in self.batches]
        for batch in batches:
            self._loop.scheduler.reservations.release(batch.sequences)
        return batches

    def step(self) -> StepOutput | None:
        with self.lock:
            layer = None if self._closed else self._inside or self.queue.next_for_target()
            if layer is None:
                self._maybe = False
                return None
            self._inside = layer
            held = self.batches[layer.batch_id]
            is_wanted = self.queue.batch(layer.batch_id).state is not State.STOPPING
        started_s = time.monotonic()
        output = StepOutput(())
        try:
            if is_wanted:
                self._run(held, layer)
            if not is_wanted or not held.next_token:
                self._inside, held.next_token = None, 0
                output = self._end(held, layer, is_wanted)
        except Exception as error:  # an engine may raise anything; the source computes these batches then
            log.exception("layer %d of batch %s failed", layer.layer, layer.batch_id)
            with self.lock:
                self._closed, self._maybe, self._inside = True, False, None
            self._on_broken(error)
            return StepOutput(())
        self._loop.busy(time.monotonic() - started_s)
        return output

    def _run(self, held: TargetBatch, layer: Layer) -> None:
        engine = self._loop.engine
        if held.activation is None:
            held.activation = engine.resume(held.batch.as_engine_batch(), held.hidden, next_layer=0)
            held.hidden = None
        held.next_token = run_part(self._loop, held.batch, held.activation, layer.layer, held.next_token)
        if not held.next_token:
            self.ran_layer()

    def _end(self, held: TargetBatch, layer: Layer, ran: bool) -> StepOutput:
        """``ran``: the whole layer; else it was given up, because nobody waits for the batch any more."""
        output = StepOutput(())
        adopts = ran and layer.layer + 1 == self.queue.num_layers
        if adopts:
            # Before the queue knows: whoever asks next must find the requests in one place or the other.
            output = finish(self._loop, held.batch, held.activation)
        with self.lock:
            finished = self.queue.layer_done(layer.batch_id)
            ended = self.queue.batch(layer.batch_id).state in ENDED
            if ended:
                self.batches.pop(layer.batch_id, None)
            if finished:
                self.finished.append(layer.batch_id)
            if self.wanted and isinstance(self.queue.pull(self.wanted), Claim):
                self.wanted = ""  # whoever asked asks again, and gets the same answer
        if ended and not adopts:  # cancelled meanwhile
            self._loop.scheduler.reservations.release(held.batch.sequences)
        if finished:
            self._on_finished(held.batch)
        self._on_layer()
        return output

    def ran_layer(self) -> None:
        self.layers.add(time.time())

    def stepped(self, output: StepOutput) -> None:
        """Nobody asks."""
