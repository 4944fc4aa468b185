"""What the engines of a pair's members do for it, on their threads: one layer of a batch per step, or part of one where
a prompt is long, so that decode steps come in between and what waits for the engine never waits for a whole prompt.

The source runs the rest of the layers of the batches that it pulled. Those layers need the hidden states alone. The KV
of the layers before, which the target ran, comes in the meantime: with the last layer a batch gives its first tokens,
and once its KV is here, too, its requests decode.

The target runs layers of the batches in its queue, as the queue says (``shared.zigzag.queue``). Its engine's thread
steps; other threads look at and change the queue under ``lock``, between two layers or during one.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import Sequence
from services.worker.engine.base import Activation
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.live.batch import PromptBatch
from services.worker.live.report import Timeline
from shared.transport.base import Buffer
from shared.zigzag.batch import ENDED, State
from shared.zigzag.queue import Claim, Layer, Queue

log = logging.getLogger(__name__)


class Kv(Enum):
    """Of the layers of a batch that ran at the target."""

    HERE = "here"
    COMING = "coming"
    """Its blocks are written."""
    LOST = "lost"


@dataclass(slots=True, eq=False)
class SourceBatch:
    """A batch whose sequences have blocks here. ``hidden``: as of ``first_layer``, if that is not 0."""

    batch: PromptBatch
    first_layer: int = 0
    hidden: Buffer = None
    kv_direct: bool = False
    """KV of the layers before leaves the target for the decode instances; that of the others leaves from here."""
    kv: Kv = field(init=False)
    """Changed on the engine's thread only, like all that follows."""
    next_layer: int = field(init=False)
    next_token: int = field(init=False, default=0)
    """Of the next layer: those before it have run."""
    activation: Activation = field(init=False, default=None)
    broken: Exception | None = field(init=False, default=None)
    """It cannot be resumed."""
    busy_s: float = field(init=False, default=0.0)
    has_failed: bool = field(init=False, default=False)
    """The engine cannot run it: its requests are computed in ordinary steps."""

    def __post_init__(self) -> None:
        self.kv = Kv.COMING if self.first_layer else Kv.HERE
        self.next_layer = self.first_layer


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
        start_at_s: float,
        on_done: Callable[[SourceBatch], None],
        on_free: Callable[[], None],
        on_token: Callable[[Sequence, Sampled], None] = lambda _sequence, _token: None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """``on_token``: a request of a batch whose KV leaves from both members has its first token. ``has_room()``:
        asked on the engine's thread, whether the batch that probably comes fits."""
        self._loop = loop
        self._runs: deque[SourceBatch] = deque()
        self._on_done = on_done
        self._on_free = on_free
        self._on_token = on_token
        self._has_room = has_room
        self.decode_interval_s = decode_interval_s
        self.lead_s = 0.0
        """How long before it is free the source asks for the next batch: what a pull takes."""
        self.layers = Timeline(start_at_s)
        self.tokens = Timeline(start_at_s)

    @property
    def ready(self) -> bool:
        return bool(self._runs)

    @property
    def remaining_s(self) -> float:
        """Expected seconds until the batches here are done."""
        num_layers = self._loop.engine.num_layers
        return sum(run.batch.layer_s * (num_layers - run.next_layer) for run in list(self._runs))

    @property
    def is_free(self) -> bool:
        """No prefill is unfinished here, or none for longer than ``lead_s``, and there is room for more."""
        if self._loop.scheduler.has_prefill or (self._runs and self.remaining_s > self.lead_s):
            return False
        return self._has_room()

    def start(self, pulled: SourceBatch) -> None:
        """Run the rest of a batch, after those that are here already. If it has a ``first_layer``, its KV may be
        imported as soon as this returns, and ``kv_over`` must follow."""
        now_s = time.monotonic()
        for sequence in pulled.batch.sequences:
            sequence.first_scheduled_s = sequence.first_scheduled_s or now_s
        if pulled.first_layer and not pulled.batch.ended:
            try:
                pulled.activation = self._loop.engine.resume(
                    pulled.batch.as_engine_batch(), pulled.hidden, next_layer=pulled.first_layer
                )
            except Exception as error:  # noqa: BLE001 - whatever it is, the batch ends with it in its turn
                pulled.broken = error
        self._runs.append(pulled)

    def kv_over(self, pulled: SourceBatch, *, is_here: bool) -> None:
        """The KV of a batch is whole, or will not come. Its blocks are not written any more."""
        pulled.kv = Kv.HERE if is_here else Kv.LOST
        if pulled not in self._runs:
            self._join(pulled)

    def _join(self, pulled: SourceBatch) -> None:
        """Both are over, its layers here and its KV."""
        scheduler, sequences = self._loop.scheduler, pulled.batch.sequences
        if pulled.has_failed:
            scheduler.reservations.compute_here(sequences)
        elif pulled.kv is Kv.HERE:
            scheduler.reservations.kv_arrived(sequences)
        else:
            scheduler.reservations.kv_lost(sequences)

    def step(self) -> StepOutput | None:
        """One layer of the first batch, or a part of one; after the last one its first tokens."""
        if not self._runs:
            return None
        pulled = self._runs[0]
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
        self.layers.add(time.time())

    def stepped(self, output: StepOutput) -> None:
        if output.outputs:
            self.tokens.add(time.time(), sum(len(o.token_ids) for o in output.outputs))
        if self.is_free:
            self._on_free()

    def _advance(self, pulled: SourceBatch) -> StepOutput | None:
        """One layer, or a part; the output once it was the last."""
        engine, batch = self._loop.engine, pulled.batch
        if pulled.broken is not None:
            raise pulled.broken
        if pulled.activation is None:
            pulled.activation = engine.embed(batch.as_engine_batch())
        pulled.next_token = run_part(self._loop, batch, pulled.activation, pulled.next_layer, pulled.next_token)
        if pulled.next_token:
            return None
        pulled.next_layer += 1
        self.ran_layer()
        if pulled.kv_direct or pulled.kv is Kv.HERE:
            tell_layers(self._loop, batch, pulled.next_layer)
        if pulled.next_layer < engine.num_layers:
            return None
        output = finish(self._loop, batch, pulled.activation, kv_here=pulled.kv is Kv.HERE)
        if pulled.kv_direct:
            for sequence in batch.sequences:
                if (token := self._loop.scheduler.reservations.token_of(sequence)) is not None:
                    self._on_token(sequence, token)
        return output

    def _done(self, pulled: SourceBatch, output: StepOutput) -> StepOutput:
        self._runs.popleft()
        pulled.activation = None  # it is large, and the batch's KV may still be on its way
        scheduler = self._loop.scheduler
        if pulled.kv is Kv.HERE and not pulled.has_failed:
            scheduler.reservations.release([s for s in pulled.batch.sequences if s.finished])
        elif pulled.kv is not Kv.COMING:
            self._join(pulled)
        self._on_done(pulled)
        return output


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
    kv_direct: bool | None = None
    """Once pulled: its KV leaves here for the decode instances."""


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
            tell_layers(self._loop, held.batch, 0)
        held.next_token = run_part(self._loop, held.batch, held.activation, layer.layer, held.next_token)
        if not held.next_token:
            self.ran_layer()
            tell_layers(self._loop, held.batch, layer.layer + 1)

    def _end(self, held: TargetBatch, layer: Layer, ran: bool) -> StepOutput:
        """``ran``: the whole layer; else it was given up, because the batch was cancelled."""
        output = StepOutput(())
        adopts = ran and layer.layer + 1 == self.queue.num_layers
        if adopts:
            # Before the queue knows: the next look must find the requests in one place or the other.
            output = finish(self._loop, held.batch, held.activation)
        with self.lock:
            finished = self.queue.layer_done(layer.batch_id)
            ended = self.queue.batch(layer.batch_id).state in ENDED
            if ended:
                self.batches.pop(layer.batch_id, None)
            if finished:
                self.finished.append(layer.batch_id)
            if self.wanted and isinstance(self.queue.pull(self.wanted), Claim):
                self.wanted = ""  # the source asks again, and gets the same answer
        if ended and not adopts:  # cancelled while it ran
            self._loop.scheduler.reservations.release(held.batch.sequences)
        if finished:
            self._on_finished(held.batch)
        self._on_layer()
        return output

    def ran_layer(self) -> None:
        self.layers.add(time.time())

    def stepped(self, output: StepOutput) -> None:
        """Only a source asks for its tokens."""


def run_part(loop: EngineLoop, batch: PromptBatch, activation: Activation, layer: int, begin: int) -> int:
    """Run a layer from token ``begin`` on, of a long batch a part; where to go on, 0 once the layer has run."""
    end = batch.part_from(begin, loop.scheduler.config.prefill_chunk_tokens)
    loop.engine.run_part(activation, layer, begin, end)
    return 0 if end == batch.num_tokens else end


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
    engine = loop.engine
    sampled = engine.sample(engine.head(activation), batch.sequences)
    now_s = time.monotonic()
    adopt = functools.partial(loop.scheduler.reservations.adopt, now_s=now_s, kv_here=kv_here)
    outputs = [adopt(s, token) for s, token in zip(batch.sequences, sampled, strict=True)]
    return StepOutput(tuple(o for o in outputs if o is not None), num_prefill_tokens=batch.num_tokens)
