"""Batches given to an engine by hand, of texts that are known to their ends: logits at every place of interest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.gpu.engines import BLOCK_SIZE, EnginePlace
from bench.gpu.served import GREEDY
from services.worker.device.completion import waited
from services.worker.engine.base import Activation
from services.worker.engine.forward_batch import ForwardBatches, SamplingRow, Slice
from services.worker.engine.torch_engine import TorchEngine

_ROW = SamplingRow(GREEDY, position=0)


@dataclass(slots=True)
class ForcedText:
    """A prompt and how it goes on, whatever an engine would have written."""

    text_id: int
    tokens: tuple[int, ...]
    num_prompt: int
    blocks: tuple[int, ...]
    num_computed: int = 0
    """Tokens that have KV."""

    @property
    def is_over(self) -> bool:
        return self.num_computed == len(self.tokens)

    def next_slice(self, chunk_tokens: int) -> Slice:
        """The next tokens of the prompt, or the one behind them; counted as computed."""
        start = self.num_computed
        end = min(start + chunk_tokens, self.num_prompt) if start < self.num_prompt else start + 1
        self.num_computed = end
        row = _ROW if end >= self.num_prompt else None
        return Slice(self.text_id, self.tokens[start:end], start, self.blocks, row)


def texts_of(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], *, backwards: bool = False
) -> list[ForcedText]:
    """In blocks with a gap between one text's and the next one's, the second time in another order."""
    texts, begin = list[ForcedText](), 1
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        end = begin + -(-(len(prompt) + len(output)) // BLOCK_SIZE)
        blocks = range(end - 1, begin - 1, -1) if backwards else range(begin, end)
        texts.append(ForcedText(number, (*prompt, *output), len(prompt), tuple(blocks)))
        begin = end + 1
    return texts


class ForcedEngine:
    """An engine, and how far its logits are from those of a reference."""

    def __init__(self, engine: TorchEngine, place: EnginePlace, references: Sequence[torch.Tensor]) -> None:
        """``references``: of each text ``[num_tokens, vocab_size]`` float32 on the host."""
        self.engine = engine
        self._place = place
        self._references = references
        self.batches = ForwardBatches(engine.counts_of)

    def error_of(self, activation: Activation, slices: Sequence[Slice]) -> float:
        """Of a batch that has run all layers: the largest difference of any logit. Infinite where one is no number."""

        def logits() -> torch.Tensor:
            return self.engine.head(activation).to("cpu")

        found = waited(self._place.device.streams.compute.run(logits))
        worst = 0.0
        rows = [piece for piece in slices if piece.row is not None]
        for row, piece in zip(found, rows, strict=True):
            expected = self._references[piece.sequence_id][piece.start + len(piece.token_ids) - 1]
            error = float((row - expected).abs().max())
            worst = max(worst, math.inf if math.isnan(error) else error)
        return worst

    def step(self, slices: Sequence[Slice]) -> float:
        """The error of one batch, all its layers in one go."""
        activation = self.engine.embed(self.batches.of(slices))
        waited(self.engine.run_layers(activation, 0, self.engine.num_layers))
        return self.error_of(activation, slices) if any(piece.row is not None for piece in slices) else 0.0

    def alone(self, texts: Sequence[ForcedText], chunk_tokens: int) -> float:
        """The worst error of all texts to their ends, one after the other."""
        return max(self.together([text], chunk_tokens) for text in texts)

    def together(self, texts: Sequence[ForcedText], chunk_tokens: int, *, apart: int = 0) -> float:
        """The same of texts in the same batches. Each begins ``apart`` steps behind the one before, so that some are
        decoded beside prompts."""
        worst, number = 0.0, 0
        while not all(text.is_over for text in texts):
            begun = texts[: number // apart + 1] if apart else texts
            slices = [text.next_slice(chunk_tokens) for text in begun if not text.is_over]
            worst = max(worst, self.step(slices)) if slices else worst
            number += 1
        return worst
