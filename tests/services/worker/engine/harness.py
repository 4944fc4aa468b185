"""Drives a torch engine by hand, next to ``transformers`` on the same checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.worker.device.device import Device
from services.worker.device.host import HOST
from services.worker.engine.attention.kinds import BY_DEVICE
from services.worker.engine.forward_batch import Slice
from services.worker.engine.kv_pool import KvPool, kv_pool_bytes
from services.worker.engine.torch_engine import TorchEngine
from services.worker.memory.arena import Arena
from services.worker.memory.loader import load_unit
from shared.checkpoint import inspect_checkpoint
from tests.checkpoints import VOCAB_SIZE, tiny_checkpoint
from tests.services.worker.engine.batches import forward, slice_of

torch.set_num_threads(1)


@cache
def reference_model(kind: str, dtype: str = "float32") -> PreTrainedModel:
    """The checkpoint as ``transformers`` serves it."""
    path = tiny_checkpoint(kind, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()


@torch.inference_mode()
def reference_logits(kind: str, tokens: Sequence[int], dtype: str = "float32") -> torch.Tensor:
    """``[len(tokens), vocab]`` float32."""
    return reference_model(kind, dtype)(torch.tensor([list(tokens)])).logits[0].float()


def reference_greedy(kind: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What ``transformers.generate`` writes greedily, end of sequence ignored."""
    return list(_generated(kind, tuple(prompt), num_tokens))


# Several tests ask for the continuation of the same prompt.
@cache
@torch.inference_mode()
def _generated(kind: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    generated = reference_model(kind).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(int(token) for token in generated[0, len(prompt) :])


def loaded_engine(
    kind: str,
    *,
    dtype: str = "float32",
    num_blocks: int = 256,
    block_size: int = 16,
    sharded: bool = False,
    attention: str = BY_DEVICE,
    device: Device = HOST,
) -> TorchEngine:
    """An engine with all of the checkpoint's weights."""
    checkpoint = inspect_checkpoint(tiny_checkpoint(kind, dtype=dtype, sharded=sharded), with_hash=False)
    layout = checkpoint.layout
    arena = Arena(device.allocate(layout.num_bytes))
    pool = KvPool(device.allocate(kv_pool_bytes(layout, block_size, num_blocks)))
    engine = TorchEngine(
        layout, arena, pool, num_blocks=num_blocks, block_size=block_size, attention=attention, device=device
    )
    for unit in layout.units:
        load_unit(checkpoint, layout, unit, arena)
    return engine


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return random.Random(seed * 1000 + length).choices(range(VOCAB_SIZE), k=length)


class DrivenSequence:
    """A sequence driven by hand: its tokens, its blocks, and how many tokens have KV."""

    def __init__(self, sequence_id: int, tokens: Iterable[int], blocks: Sequence[int]) -> None:
        self.sequence_id = sequence_id
        self.tokens = list(tokens)
        self.blocks = tuple(blocks)
        self.num_computed = 0

    def next_slice(self, max_tokens: int | None = None) -> Slice:
        """The next uncomputed tokens, at most ``max_tokens``; counts them as computed."""
        start = self.num_computed
        end = len(self.tokens) if max_tokens is None else min(len(self.tokens), start + max_tokens)
        self.num_computed = end
        return slice_of(self.sequence_id, self.tokens[start:end], start, self.blocks, end == len(self.tokens))


def compute(engine: TorchEngine, slices: Sequence[Slice], *, cuts: Sequence[int] = ()) -> torch.Tensor:
    """Logits of one batch; ``cuts`` splits the layers into ranges."""
    activation = engine.embed(forward(*slices))
    bounds = [0, *cuts, engine.num_layers]
    for first, last in pairwise(bounds):
        engine.run_layers(activation, first, last).result()
    return engine.head(activation)


def greedy(engine: TorchEngine, sequences: Sequence[DrivenSequence], num_tokens: int, chunk: int | None = None) -> None:
    """Extend every sequence by ``num_tokens``, all in one batch per step."""
    goals = {s.sequence_id: len(s.tokens) + num_tokens for s in sequences}
    while running := [s for s in sequences if len(s.tokens) < goals[s.sequence_id]]:
        slices = [s.next_slice(chunk) for s in running]
        logits = compute(engine, slices)
        sampling = [s for s, piece in zip(running, slices, strict=True) if piece.row is not None]
        for sequence, token in zip(sampling, logits.argmax(-1).tolist(), strict=True):
            sequence.tokens.append(token)
