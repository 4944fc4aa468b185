"""What the source's engine does for a pair: the rest of the layers of the batches that it pulled.

On the engine thread, but for ``remaining_s``. One layer per step, or part of one where a prompt is long, so that decode
steps come in between and what waits for the engine never waits for a whole prompt.

Those layers need the hidden states alone. The KV of the layers before, which the target ran, comes meanwhile: with the
last layer a batch gives its first tokens, and once its KV is here, too, its requests decode.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from services.worker.engine.base import Activation
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.live.batch import PromptBatch
from services.worker.live.report import Timeline
from shared.transport.base import Buffer

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
    kv: Kv = field(init=False)
    """Changed on the engine's thread only, like the next."""
    has_failed: bool = False
    """The engine cannot run it: its requests are computed in ordinary steps."""

    def __post_init__(self) -> None:
        self.kv = Kv.COMING if self.first_layer else Kv.HERE


@dataclass(slots=True)
class _Run:
    pulled: SourceBatch
    next_layer: int
    next_token: int = 0
    """Of the next layer: those before it have run."""
    activation: Activation = None
    broken: Exception | None = None
    """It cannot be run."""
    busy_s: float = 0.0


class SourceStepper:
    """``PartialWork`` of the source. ``on_done(pulled)`` and ``on_free()`` are called on the engine thread."""

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
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """``has_room()``: asked on the engine's thread, whether the batch that probably comes fits."""
        self._loop = loop
        self._runs: deque[_Run] = deque()
        self._on_done = on_done
        self._on_free = on_free
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
        return sum(run.pulled.batch.layer_s * (num_layers - run.next_layer) for run in list(self._runs))

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
        run = _Run(pulled, pulled.first_layer)
        if pulled.first_layer and not pulled.batch.ended:
            try:
                run.activation = self._loop.engine.resume(
                    pulled.batch.as_engine_batch(), pulled.hidden, next_layer=pulled.first_layer
                )
            except Exception as error:  # noqa: BLE001 - whatever it is, the batch ends with it in its turn
                run.broken = error
        self._runs.append(run)

    def kv_over(self, pulled: SourceBatch, *, is_here: bool) -> None:
        """The KV of a batch is whole, or will not come. Its blocks are not written any more."""
        pulled.kv = Kv.HERE if is_here else Kv.LOST
        if not any(run.pulled is pulled for run in self._runs):
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
        run = self._runs[0]
        batch, loop = run.pulled.batch, self._loop
        if batch.ended:
            return self._done(run, StepOutput(()))
        started_s = time.monotonic()
        failed = False
        output: StepOutput | None = None
        try:
            output = self._advance(run)
        except Exception:  # an engine may raise anything; ordinary steps find out which request it fails on
            log.exception(
                "layer %d of batch %s failed: its requests are computed in steps", run.next_layer, batch.batch_id
            )
            failed = True
        busy_s = time.monotonic() - started_s
        run.busy_s += busy_s
        loop.busy(busy_s)
        if failed:
            run.pulled.has_failed = True
            return self._done(run, StepOutput((), busy_s=busy_s))
        if output is None:
            return StepOutput((), busy_s=busy_s)
        layers_run = loop.engine.num_layers - run.pulled.first_layer
        loop.measured_prefill(batch.num_tokens, run.busy_s * loop.engine.num_layers / layers_run)
        return self._done(run, output)

    def ran_layer(self) -> None:
        self.layers.add(time.time())

    def stepped(self, output: StepOutput) -> None:
        if output.outputs:
            self.tokens.add(time.time(), sum(len(o.token_ids) for o in output.outputs))
        if self.is_free:
            self._on_free()

    def _advance(self, run: _Run) -> StepOutput | None:
        """One layer, or a part; the output once it was the last."""
        engine, batch = self._loop.engine, run.pulled.batch
        if run.broken is not None:
            raise run.broken
        if run.activation is None:
            run.activation = engine.embed(batch.as_engine_batch())
        run.next_token = run_part(self._loop, batch, run.activation, run.next_layer, run.next_token)
        if run.next_token:
            return None
        run.next_layer += 1
        self.ran_layer()
        if run.next_layer < engine.num_layers:
            return None
        return finish(self._loop, batch, run.activation, kv_here=run.pulled.kv is Kv.HERE)

    def _done(self, run: _Run, output: StepOutput) -> StepOutput:
        self._runs.popleft()
        scheduler, pulled = self._loop.scheduler, run.pulled
        if pulled.kv is Kv.HERE and not pulled.has_failed:
            scheduler.reservations.release([s for s in pulled.batch.sequences if s.finished])
        elif pulled.kv is not Kv.COMING:
            self._join(pulled)
        self._on_done(pulled)
        return output


def run_part(loop: EngineLoop, batch: PromptBatch, activation: Activation, layer: int, begin: int) -> int:
    """Run a layer from token ``begin`` on, of a long batch a part; where to go on, 0 once the layer has run."""
    end = batch.part_from(begin, loop.scheduler.config.prefill_chunk_tokens)
    loop.engine.run_part(activation, layer, begin, end)
    return 0 if end == batch.num_tokens else end


def finish(loop: EngineLoop, batch: PromptBatch, activation: Activation, *, kv_here: bool = True) -> StepOutput:
    """Norm, head and sampling of a batch that ran all layers: its requests decode here from now on, or with
    ``kv_here`` false once their KV is whole."""
    engine = loop.engine
    sampled = engine.sample(engine.head(activation), batch.sampling_rows())
    now_s = time.monotonic()
    adopt = functools.partial(loop.scheduler.reservations.adopt, now_s=now_s, kv_here=kv_here)
    outputs = [adopt(s, token) for s, token in zip(batch.sequences, sampled, strict=True)]
    return StepOutput(tuple(o for o in outputs if o is not None), num_prefill_tokens=batch.num_tokens)
