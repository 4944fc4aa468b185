"""Moves batches between any two engines, and writes greedily with either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np

from services.worker.engine.base import Activation, Engine
from services.worker.engine.forward_batch import ForwardBatch
from services.worker.engine.mock.mock_engine import MockEngine
from tests.services.worker.engine.batches import forward
from tests.services.worker.engine.harness import DrivenSequence, loaded_engine, prompt_of

MakeEngine = Callable[..., Engine]
"""``(block_size=, num_blocks=)`` to an engine."""
NUM_LAYERS = 4


def mock_engine(*, block_size: int = 16, num_blocks: int = 64) -> MockEngine:
    """A mock with the tiny checkpoints' vocabulary; it verifies every prefix."""
    return MockEngine(
        num_layers=NUM_LAYERS,
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=264,
        verify=True,
        hidden_bytes_per_token=48,
        kv_bytes_per_token_layer=56,
    )


def maker(kind: str, dtype: str = "float32") -> MakeEngine:
    """``kind``: "mock" or that of a tiny checkpoint."""
    if kind == "mock":
        return mock_engine

    def make(*, block_size: int = 16, num_blocks: int = 64) -> Engine:
        return loaded_engine(kind, dtype=dtype, num_blocks=num_blocks, block_size=block_size)

    return make


def tables(engine: Engine, lengths: Sequence[int], *, more_tokens: int = 16, backwards: bool = False) -> list[range]:
    """Blocks for sequences that grow by ``more_tokens``: runs of blocks with a gap between them."""
    found, begin = [], 1
    for length in lengths:
        end = begin - (-(length + more_tokens) // engine.block_size)
        assert end < engine.num_blocks
        found.append(range(end - 1, begin - 1, -1) if backwards else range(begin, end))
        begin = end + 1
    return found


def sequences_of(engine: Engine, lengths: Sequence[int], *, backwards: bool = False) -> list[DrivenSequence]:
    """The same prompts for every engine, in blocks of this one."""
    found = tables(engine, lengths, backwards=backwards)
    return [
        DrivenSequence(i, prompt_of(n, i), blocks) for i, (n, blocks) in enumerate(zip(lengths, found, strict=True))
    ]


def batch_of(sequences: Sequence[DrivenSequence], max_tokens: int | None = None) -> ForwardBatch:
    """Whole prompts, or the next ``max_tokens`` of each."""
    return forward(*[s.next_slice(max_tokens) for s in sequences])


@dataclass
class Moved:
    """What one engine hands another: bytes only."""

    hidden: object
    kv: object
    num_layers: int


def run_part(
    engine: Engine, sequences: Sequence[DrivenSequence], num_layers: int, *, part_tokens: int | None = None
) -> Moved:
    """Run the first layers of the prompts, one by one or each in parts of so many tokens, and export."""
    lengths = [len(s.tokens) for s in sequences]
    activation = engine.embed(batch_of(sequences))
    for layer in range(num_layers):
        step = part_tokens or sum(lengths)
        for begin in range(0, sum(lengths), step):
            engine.run_part(activation, layer, begin, min(sum(lengths), begin + step)).result()
    kv = engine.export_kv([s.blocks for s in sequences], lengths, num_layers).result()
    return Moved(engine.hidden_states(activation).result(), kv, num_layers)


def take_over(
    engine: Engine, sequences: Sequence[DrivenSequence], moved: Moved, *, kv_after: int | None = None
) -> Activation:
    """Resume, import, and run the rest. ``kv_after``: the KV comes after so many more layers, layer by layer."""
    activation = engine.resume(batch_of(sequences), moved.hidden, next_layer=moved.num_layers)
    if kv_after is None:
        import_whole(engine, sequences, moved)
        engine.run_layers(activation, moved.num_layers, engine.num_layers).result()
        return activation
    middle = min(moved.num_layers + kv_after, engine.num_layers)
    engine.run_layers(activation, moved.num_layers, middle).result()
    import_by_layer(engine, sequences, moved)
    engine.run_layers(activation, middle, engine.num_layers).result()
    return activation


def import_whole(engine: Engine, sequences: Sequence[DrivenSequence], moved: Moved) -> None:
    """All layers at once."""
    lengths = [len(s.tokens) for s in sequences]
    engine.import_kv([s.blocks for s in sequences], lengths, moved.num_layers, moved.kv).result()


def import_by_layer(engine: Engine, sequences: Sequence[DrivenSequence], moved: Moved) -> None:
    """One layer after the other."""
    lengths, blocks = [len(s.tokens) for s in sequences], [s.blocks for s in sequences]
    layers = np.split(np.frombuffer(moved.kv, dtype=np.uint8), moved.num_layers) if moved.num_layers else []
    for layer, kv in enumerate(layers):
        engine.import_kv(blocks, lengths, layer + 1, kv, first_layer=layer).result()


def run_in_parts(engine: Engine, activation: Activation, first: int, part_tokens: int) -> None:
    """The layers from ``first`` on, each in parts of so many tokens."""
    num_tokens = activation.result().batch.num_tokens
    for layer in range(first, engine.num_layers):
        for begin in range(0, num_tokens, part_tokens):
            engine.run_part(activation, layer, begin, min(num_tokens, begin + part_tokens)).result()


def run_whole(engine: Engine, sequences: Sequence[DrivenSequence]) -> Activation:
    """All layers here."""
    activation = engine.embed(batch_of(sequences))
    engine.run_layers(activation, 0, engine.num_layers).result()
    return activation


def sample(engine: Engine, sequences: Sequence[DrivenSequence], activation: Activation) -> object:
    """Extend each sequence by its greedy token; returns the logits."""
    for sequence, sampled in zip(sequences, engine.sample(activation).result(), strict=True):
        sequence.tokens.append(sampled.token_id)
    return cast(Any, engine).head(activation)


def decode(engine: Engine, sequences: Sequence[DrivenSequence], num_steps: int) -> list[object]:
    """Greedy steps, all sequences in one batch; returns each step's logits."""
    return [sample(engine, sequences, run_whole(engine, sequences)) for _ in range(num_steps)]


@cache
def alone(kind: str, lengths: tuple[int, ...], num_steps: int) -> tuple[list[list[int]], list[object]]:
    """What one engine makes of the prompts: tokens of each sequence with them, and each step's logits."""
    engine = maker(kind)()
    sequences = sequences_of(engine, lengths)
    logits = decode(engine, sequences, num_steps)
    return [s.tokens for s in sequences], logits
