"""A batch that the engine cannot compute is run again in parts, until what it cannot compute is alone.

Running a slice again is harmless: it writes the same KV into the same slots, and a draw is keyed by (seed, position).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.worker.core.scheduling.schedule import Sampled, ScheduledSlice
from services.worker.device.completion import waited
from services.worker.engine.base import Engine
from services.worker.engine.forward_batch import ForwardBatches, SamplingRow, Slice
from shared.errors import BlitzError, EngineBroken, RequestFailed
from shared.messages.common import ErrorInfo
from shared.messages.generation import SamplingParams

_log = logging.getLogger(__name__)

Run = Callable[[Sequence[ScheduledSlice]], list[Sampled]]
"""Computes slices together: one token for each that samples, in order. Raises whatever the engine raises."""

_ENDED = ErrorInfo.of(RequestFailed("it has ended before"))
"""Nobody is told."""
_PROBE = SamplingRow(SamplingParams(max_tokens=1, seed=0, temperature=0.0), position=0)


@dataclass(slots=True)
class Computed:
    """What became of a batch."""

    sampled: list[Sampled] = field(default_factory=list)
    """One per slice that samples and did not fail, in their order."""
    failures: dict[int, ErrorInfo] = field(default_factory=dict)
    """Why slices could not be computed, by their place in the batch."""
    at_once: bool = True
    """Nothing was run twice."""


def halve(
    slices: Sequence[ScheduledSlice], failure: Exception, run: Run, engine: Engine, batches: ForwardBatches
) -> Computed:
    """Run a batch that failed again, in parts. What fails alone is at fault, if the engine computes anything else.

    n slices of which one fails cost about twice their work in 2 log2(n) runs more. Raises ``EngineBroken`` when the
    engine does not even compute a single token.
    """
    _log.warning("an engine step of %d slices failed, it is run again in parts: %s", len(slices), failure)
    computed = Computed(at_once=False)
    if slices:
        _Bisection(slices, run, engine, batches, computed).run_again()
    return computed


class _Bisection:
    """One batch that failed."""

    def __init__(
        self,
        slices: Sequence[ScheduledSlice],
        run: Run,
        engine: Engine,
        batches: ForwardBatches,
        computed: Computed,
    ) -> None:
        self._slices = slices
        self._run = run
        self._engine = engine
        self._batches = batches
        self._computed = computed
        self._engine_works = False

    def run_again(self) -> None:
        count = len(self._slices)
        if count == 1:
            self._run_part(0, 1)  # by itself, too, it gets a second chance
        else:
            self._run_halves(0, count)

    def _run_halves(self, first: int, last: int) -> None:
        middle = (first + last) // 2
        self._run_part(first, middle)
        self._run_part(middle, last)

    def _run_part(self, first: int, last: int) -> None:
        if last - first == 1 and self._slices[first].sequence.finished:  # it has ended between two layers of this
            self._computed.failures[first] = _ENDED
            return
        try:
            sampled = self._run(self._slices[first:last])
        except Exception as failure:  # noqa: BLE001 - as above
            if last - first > 1:
                self._run_halves(first, last)
                return
            self._check_engine(self._slices[first], failure)
            sequence = self._slices[first].sequence
            _log.error("request %s: the engine fails on it", sequence.request_id, exc_info=failure)
            self._computed.failures[first] = _reason(failure)
        else:
            self._engine_works = True
            self._computed.sampled += sampled

    def _check_engine(self, piece: ScheduledSlice, failure: Exception) -> None:
        """Raises ``EngineBroken`` unless something was computed in this batch, or one token by itself can be.

        That is written where the failed slice was to be: whatever comes out of this, its request ends.
        """
        engine, sequence = self._engine, piece.sequence
        # A request that has ended meanwhile, between two layers, has no block left: it says nothing of the engine.
        if self._engine_works or not sequence.block_table:
            return
        block = sequence.block_table[piece.start // engine.block_size]
        probe = self._batches.of([Slice(sequence.id, (0,), 0, (block,), _PROBE)])
        try:
            activation = engine.embed(probe)
            waited(engine.run_layers(activation, 0, engine.num_layers))
            waited(engine.sample(activation))
        except Exception as broken:
            raise EngineBroken(f"the engine computes nothing any more: {_describe(failure)}") from broken
        self._engine_works = True


def _reason(failure: Exception) -> ErrorInfo:
    if isinstance(failure, BlitzError):
        return ErrorInfo.of(failure)
    return ErrorInfo.of(RequestFailed(f"the engine failed on this request: {_describe(failure)}"))


def _describe(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"
