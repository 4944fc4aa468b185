"""The engine: computes batches, layer by layer. Implementations: ``torch_engine`` and ``mock``.

The scheduler (``services.worker.core``) speaks in ids, token counts and block tables; an engine
turns a ``Batch`` into sampled tokens. All methods run on the engine thread. Nothing here
imports torch, so that the core, the mock and the tests start without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shared.messages.common import ErrorInfo
from shared.messages.generation import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Slice:
    """The tokens of one sequence that a batch computes: positions ``start .. start+len(token_ids)``."""

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    """Position of the first token; KV of all earlier positions is in the blocks."""
    block_table: Sequence[int]
    """KV blocks of positions 0.., enough for every position up to the slice's end."""
    sample: bool
    """Whether the last token's logits are wanted (the slice ends the known tokens)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Slices to compute together; decode slices have one token."""

    slices: tuple[Slice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to sample for one slice with ``sample`` set.

    ``prompt`` and ``output`` feed the penalties and give the draw its position.
    """

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    prompt: Sequence[int]
    output: Sequence[int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token. With ``error`` there is none: this row's request ends with it, the others go on."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: ErrorInfo | None = None


Activation = Any
"""Opaque state of a batch inside the engine: its attention plan and hidden states
[num_tokens, hidden_size]."""
Logits = Any
"""[num_sampled, vocab_size], in the order of the slices that sample."""


class Engine(Protocol):
    """A model bound to its weights (arena) and KV pool."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""

    def embed(self, batch: Batch) -> Activation:
        """Plan the batch's attention and embed its tokens."""

    def run_layers(self, activation: Activation, first: int, last: int) -> None:
        """Run decoder layers ``first <= i < last`` in place, writing their KV."""

    def head(self, activation: Activation) -> Logits:
        """Final norm and head of the tokens that are sampled."""

    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """One token per row. Draws depend on (seed, position) only, never on the batch."""
