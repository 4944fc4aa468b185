"""One engine by itself, and the steps that are timed: as the engine loop runs them, without requests around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker.device.completion import waited
from services.worker.engine.base import Engine
from services.worker.engine.forward_batch import ForwardBatches, SamplingRow, Slice
from shared.messages.generation import SamplingParams

_GREEDY = SamplingRow(SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0, ignore_eos=True), position=0)


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """Part of a prompt that was computed in one step."""

    start: int
    num_tokens: int
    seconds: float


class Rig:
    """``max_requests`` requests side by side, each with the same share of the KV blocks."""

    def __init__(self, engine: Engine, vocab_size: int, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._clock = clock
        self._batches = ForwardBatches(engine.counts_of)

    @property
    def kv_tokens(self) -> int:
        """That all requests together may have."""
        return self._engine.num_blocks * self._engine.block_size

    def prefill(self, num_tokens: int, chunk_tokens: int) -> list[TimedChunk]:
        """A prompt alone, at the beginning of the KV."""
        blocks = self._blocks(0, num_tokens)
        chunks: list[TimedChunk] = []
        for start in range(0, num_tokens, chunk_tokens):
            end = min(start + chunk_tokens, num_tokens)
            tokens = tuple(position % self._vocab_size for position in range(start, end))
            piece = Slice(0, tokens, start, blocks, _GREEDY if end == num_tokens else None)
            chunks.append(TimedChunk(start, end - start, self._step((piece,))))
        return chunks

    def spread(self, num_tokens: int, num_requests: int, room: int) -> None:
        """The prompt that was computed last becomes that of so many requests, each with ``room`` tokens more."""
        kv = waited(self._engine.export_kv([self._blocks(0, num_tokens)], [num_tokens], self._engine.num_layers))
        for index in range(num_requests):
            table = self._blocks(index, num_tokens + room)
            waited(self._engine.import_kv([table], [num_tokens], self._engine.num_layers, kv))

    def decode(self, num_requests: int, context_tokens: int, room: int, at: int) -> float:
        """Seconds of a step of all of them, the ``at``-th after ``spread``."""
        start = context_tokens + at
        slices = [
            Slice(index, (start % self._vocab_size,), start, self._blocks(index, context_tokens + room), _GREEDY)
            for index in range(num_requests)
        ]
        return self._step(slices)

    def _step(self, slices: Sequence[Slice]) -> float:
        engine = self._engine
        while (rehearsed := engine.rehearse()) is not None:
            waited(rehearsed)
        started_s = self._clock()
        activation = engine.embed(self._batches.of(slices))
        if len(slices[0].token_ids) == 1 and slices[0].row is not None:
            waited(engine.run_layers(activation, 0, engine.num_layers))
        else:
            for layer in range(engine.num_layers):
                waited(engine.run_layers(activation, layer, layer + 1))
        if any(piece.row is not None for piece in slices):
            waited(engine.sample(activation))
        return self._clock() - started_s

    def _blocks(self, index: int, num_tokens: int) -> range:
        """Of the request at that place, if each has so many tokens."""
        count = -(-num_tokens // self._engine.block_size)
        return range(index * count, (index + 1) * count)
