"""An engine without a model: the same interface, deterministic tokens and a timing model.

The token behind a prefix is a function of all its tokens (``next_token``), so a request gives
the same text however it is chunked, batched, preempted or moved. The prefix is read from a
fake KV pool through the block table, as a real engine reads it: a scheduler that mixes up
blocks, positions or ends of slices gets an error or other tokens, not luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.worker.engine.base import Batch, Sampled, SamplingRow, Slice
from shared.messages.generation import TokenLogprobs

BYTE_TOKENS = 256
"""Tokens 0..255 are bytes; special tokens follow."""

_MASK = (1 << 64) - 1
_EMPTY = 0x9E3779B97F4A7C15
_PRINTABLE_FIRST, _PRINTABLE_COUNT = 32, 95
_SPIN_S = 50e-6
_SLEEP_SLACK_S = 80e-6


@dataclass(frozen=True, kw_only=True)
class MockTiming:
    """Seconds that a batch takes. All zero: as fast as Python."""

    step_overhead_s: float = 0.0
    """Per batch, at its embedding."""
    layer_base_s: float = 0.0
    """Per layer and batch: reading the weights."""
    layer_per_token_s: float = 0.0
    """Per layer and token of the batch."""
    layer_per_context_token_s: float = 0.0
    """Per layer and token of KV that the batch's slices attend to."""
    head_s: float = 0.0


@dataclass(slots=True)
class MockActivation:
    """A batch inside the mock: how far it is, and the prefix hash of each slice that samples."""

    batch: Batch
    num_tokens: int
    context_tokens: int
    layers_done: int = 0
    hashes: list[int] = field(default_factory=list)


def extend_hash(prefix_hash: int, token_id: int) -> int:
    """The hash of a prefix and one more token."""
    mixed = ((prefix_hash ^ (token_id + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 29)


def hash_tokens(token_ids: Sequence[int], prefix_hash: int = _EMPTY) -> int:
    """The hash of a whole prefix."""
    for token_id in token_ids:
        prefix_hash = extend_hash(prefix_hash, token_id)
    return prefix_hash


def token_of(prefix_hash: int) -> int:
    """The printable ASCII byte that follows a prefix of this hash."""
    return _PRINTABLE_FIRST + (prefix_hash >> 32) % _PRINTABLE_COUNT


def next_token(token_ids: Sequence[int]) -> int:
    """The token that follows this prefix when no end-of-sequence is drawn."""
    return token_of(hash_tokens(token_ids))


def precise_sleep(seconds: float) -> None:
    """Sleep without the timer's overshoot: the GIL is released for all but the last tens of microseconds."""
    if seconds <= 0:
        return
    deadline = time.perf_counter() + seconds
    coarse = seconds - _SLEEP_SLACK_S
    if coarse > 0:
        time.sleep(coarse)
    while (left := deadline - time.perf_counter()) > 0:
        if left > _SPIN_S:
            time.sleep(left - _SPIN_S)


class MockEngine:
    """``services.worker.engine.base.Engine`` without compute.

    ``eos_every`` > 0 ends about one in so many tokens with the row's first end-of-sequence
    token, where ``min_tokens`` and ``ignore_eos`` allow it. ``verify`` reads the whole prefix
    back at every slice (O(context) a step) instead of only the hash before the slice (O(1)).
    Sampling parameters other than those are accepted and change nothing; logprobs are made up
    and well formed.
    """

    def __init__(
        self,
        *,
        num_layers: int = 4,
        num_blocks: int = 1024,
        block_size: int = 16,
        vocab_size: int = BYTE_TOKENS + 4,
        timing: MockTiming | None = None,
        eos_every: int = 0,
        verify: bool = False,
        sleep: Callable[[float], None] = precise_sleep,
    ) -> None:
        self._num_layers = num_layers
        self._num_blocks = num_blocks
        self._block_size = block_size
        self.vocab_size = vocab_size
        self._timing = timing or MockTiming()
        self._eos_every = eos_every
        self._verify = verify
        self._sleep = sleep
        slots = num_blocks * block_size
        self._tokens = [-1] * slots
        self._positions = [-1] * slots
        self._hashes = [0] * slots

    @property
    def num_layers(self) -> int:
        return self._num_layers

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    def embed(self, batch: Batch) -> MockActivation:
        """Start a batch."""
        self._sleep(self._timing.step_overhead_s)
        num_tokens = context_tokens = 0
        for piece in batch.slices:
            count = len(piece.token_ids)
            num_tokens += count
            context_tokens += piece.start + count
        return MockActivation(batch, num_tokens, context_tokens)

    def run_layers(self, activation: MockActivation, first: int, last: int) -> None:
        """Take the layers' time; the first one writes the KV.

        Raises ``ValueError`` for layers out of order, ``RuntimeError`` for a block table that
        does not hold the prefix.
        """
        if first != activation.layers_done or not first <= last <= self._num_layers:
            raise ValueError(f"layers {first}..{last} of {self._num_layers}, but {activation.layers_done} are done")
        timing = self._timing
        layer_s = (
            timing.layer_base_s
            + timing.layer_per_token_s * activation.num_tokens
            + timing.layer_per_context_token_s * activation.context_tokens
        )
        self._sleep(layer_s * (last - first))
        if first == 0 and last > 0:
            for piece in activation.batch.slices:
                prefix_hash = self._write(piece)
                if piece.sample:
                    activation.hashes.append(prefix_hash)
        activation.layers_done = last

    def head(self, activation: MockActivation) -> list[int]:
        """The prefix hash of each slice that samples. Raises ``ValueError`` before the last layer."""
        if activation.layers_done != self._num_layers:
            raise ValueError(f"head after {activation.layers_done} of {self._num_layers} layers")
        self._sleep(self._timing.head_s)
        return activation.hashes

    def sample(self, logits: list[int], rows: Sequence[SamplingRow]) -> list[Sampled]:
        """The token behind each prefix."""
        sampled: list[Sampled] = []
        for prefix_hash, row in zip(logits, rows, strict=True):
            params = row.params
            token_id = token_of(prefix_hash)
            if (
                self._eos_every
                and prefix_hash % self._eos_every == 0
                and row.eos_token_ids
                and not params.ignore_eos
                and len(row.output) >= params.min_tokens
            ):
                token_id = row.eos_token_ids[0]
            elif params.stop_token_ids and len(row.output) < params.min_tokens:
                while token_id in params.stop_token_ids:
                    prefix_hash = extend_hash(prefix_hash, token_id)  # noqa: PLW2901 - redraws this row's token
                    token_id = token_of(prefix_hash)
            logprobs = None if params.logprobs is None else self._logprobs(token_id, prefix_hash, params.logprobs)
            sampled.append(Sampled(token_id, logprobs))
        return sampled

    def _logprobs(self, token_id: int, prefix_hash: int, count: int) -> TokenLogprobs:
        best = -0.05 - (prefix_hash & 0xFF) / 4096
        others = (t for t in range(self.vocab_size) if t != token_id)
        alternatives = [(t, best - 3.0 - rank) for rank, t in zip(range(count - 1), others, strict=False)]
        return TokenLogprobs(logprob=best, top=((token_id, best), *alternatives) if count else ())

    def _write(self, piece: Slice) -> int:
        """Write a slice's KV; returns the hash of the prefix that it ends."""
        size, table = self._block_size, piece.block_table
        end = piece.start + len(piece.token_ids)
        if end > len(table) * size:
            raise RuntimeError(f"sequence {piece.sequence_id}: {len(table)} blocks do not hold {end} tokens")
        prefix_hash = self._prefix_hash(piece)
        tokens, positions, hashes = self._tokens, self._positions, self._hashes
        for position, token_id in enumerate(piece.token_ids, piece.start):
            prefix_hash = extend_hash(prefix_hash, token_id)
            slot = table[position // size] * size + position % size
            tokens[slot] = token_id
            positions[slot] = position
            hashes[slot] = prefix_hash
        return prefix_hash

    def _prefix_hash(self, piece: Slice) -> int:
        """The hash of the KV before the slice, read through its block table."""
        size, table, start = self._block_size, piece.block_table, piece.start
        if start == 0:
            return _EMPTY
        slot = table[(start - 1) // size] * size + (start - 1) % size
        if self._positions[slot] != start - 1:
            raise RuntimeError(f"sequence {piece.sequence_id}: no KV at position {start - 1}, slot {slot}")
        if self._verify:
            gathered = hash_tokens([self._tokens[table[p // size] * size + p % size] for p in range(start)])
            if gathered != self._hashes[slot]:
                raise RuntimeError(f"sequence {piece.sequence_id}: the KV before position {start} was overwritten")
        return self._hashes[slot]
