"""What the source's engine does for a pair: the rest of the layers of the batches that it pulled.

On the engine thread, but for ``remaining_s``. One layer per step, so that decode steps come in
between and what waits for the engine never waits for a whole prompt.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.engine.base import Activation
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.live.batch import PromptBatch
from services.worker.live.timeline import Timeline
from shared.transport.base import Buffer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pulled:
    """A batch whose sequences have blocks here. ``hidden`` and ``kv``: as of ``first_layer``, if that is not 0."""

    batch: PromptBatch
    first_layer: int = 0
    hidden: Buffer = None
    kv: Buffer = None


@dataclass(slots=True)
class _Run:
    pulled: Pulled
    next_layer: int
    activation: Activation = None
    busy_s: float = 0.0


class SourceWork:
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
        on_done: Callable[[Pulled], None],
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

    def start(self, pulled: Pulled) -> None:
        """Run the rest of a batch, after those that are here already."""
        now_s = time.monotonic()
        for sequence in pulled.batch.sequences:
            sequence.first_scheduled_s = sequence.first_scheduled_s or now_s
        self._runs.append(_Run(pulled, pulled.first_layer))

    def step(self) -> StepOutput | None:
        """One layer of the first batch; after the last one its first tokens."""
        if not self._runs:
            return None
        run = self._runs[0]
        batch, loop = run.pulled.batch, self._loop
        if batch.ended:
            loop.scheduler.release(batch.sequences)
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
            loop.scheduler.readmit(batch.sequences)
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
        """One layer; the output once it was the last."""
        engine = self._loop.engine
        if run.activation is None:
            run.activation = self._begin(run.pulled)
        engine.run_layers(run.activation, run.next_layer, run.next_layer + 1)
        run.next_layer += 1
        self.ran_layer()
        return finish(self._loop, run.pulled.batch, run.activation) if run.next_layer == engine.num_layers else None

    def _begin(self, pulled: Pulled) -> Activation:
        engine, batch = self._loop.engine, pulled.batch
        if pulled.first_layer == 0:
            return engine.embed(batch.as_engine_batch())
        engine.import_kv(batch.block_tables, batch.lengths, pulled.first_layer, pulled.kv)
        return engine.resume(batch.as_engine_batch(), pulled.hidden, next_layer=pulled.first_layer)

    def _done(self, run: _Run, output: StepOutput) -> StepOutput:
        self._runs.popleft()
        self._on_done(run.pulled)
        return output


def finish(loop: EngineLoop, batch: PromptBatch, activation: Activation) -> StepOutput:
    """Norm, head and sampling of a batch that ran all layers: its requests decode here from now on."""
    engine = loop.engine
    sampled = engine.sample(engine.head(activation), batch.sampling_rows())
    now_s = time.monotonic()
    outputs = [loop.scheduler.adopt(s, token, now_s) for s, token in zip(batch.sequences, sampled, strict=True)]
    return StepOutput(tuple(o for o in outputs if o is not None), num_prefill_tokens=batch.num_tokens)
