"""An engine without a model: the same interface, deterministic tokens and a timing model.

The token behind a context is a function of all its tokens (``next_token``), so a request gives
the same text however it is chunked, batched, preempted or moved. The context is read from a
fake KV pool (``mock.kv``) through the block table, as a real engine reads it: a scheduler that mixes up
blocks, positions or ends of slices gets an error or other tokens, not luck. So do two engines that hand a
batch over: hidden states and KV have a real model's sizes, and say whose they are and how far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.worker.core.scheduling.schedule import Sampled
from services.worker.device.completion import Completion
from services.worker.device.device import Device
from services.worker.device.host import HOST
from services.worker.engine.forward_batch import ForwardBatch, SampledSteps
from services.worker.engine.handoff import (
    Bytes,
    asked_of,
    check_batch,
    check_layers,
    check_next,
    check_next_layer,
    check_part,
    check_tokens,
    check_whole,
    host_bytes,
)
from services.worker.engine.mock.hidden import HIDDEN_MIN_BYTES, check_hidden, hidden_of
from services.worker.engine.mock.kv import MockKv, Slots
from services.worker.engine.mock.played import played_step_s
from services.worker.engine.mock.settings import MockFaults, MockTiming
from services.worker.engine.mock.sleep import PreciseSleep
from services.worker.engine.mock.tokens import prompt_logprobs, sample
from shared.messages.generation import PromptLogprobs
from shared.profile import Profile
from shared.transport.base import Buffer

LAUNCHED_AHEAD_S = 5e-3
"""A layer of a step that begins so long after the one before it was to end is not late: a GPU has the kernels of the
step's next layers in its queue, and does not wait for a host that is busy."""
BYTE_TOKENS = 256
"""Tokens 0..255 are bytes; special tokens follow."""


@dataclass(slots=True)
class MockActivation:
    """A batch inside the mock: how far it is, and the prefix hash of each slice that samples."""

    batch: ForwardBatch
    num_tokens: int
    layer_s: float
    """What one of its layers takes."""
    layers_done: int = 0
    next_token: int = 0
    """Of the next layer: those before it have run."""
    due: float | None = None
    """``perf_counter`` when what has run was to end, as far as the mock slept for it."""
    hashes: list[int] = field(default_factory=list)
    slots: Slots | None = None
    """KV slots of the batch's tokens, from its first layer here on."""
    resumed: bool = False
    """Its first layers ran elsewhere: their KV comes by import."""


Activation = Completion[MockActivation]


def _context_tokens(batch: ForwardBatch) -> int:
    return sum([piece.start + len(piece.token_ids) for piece in batch.slices])


def _tokens_of(batch: ForwardBatch) -> list[int]:
    return [token_id for piece in batch.slices for token_id in piece.token_ids]


class MockEngine:
    """``services.worker.engine.base.Engine`` without compute.

    ``eos_every`` > 0 ends about one in so many tokens with the row's first end-of-sequence
    token, where ``min_tokens`` and ``ignore_eos`` allow it. ``verify`` reads the whole context
    back at every slice (O(context) a step) instead of only the hash before the slice (O(1)).
    Sampling parameters other than those are accepted and change nothing; logprobs are made up
    and well formed. ``hidden_bytes_per_token`` (8 or more) and ``kv_bytes_per_token_layer`` (even, 24 or
    more; ``ValueError`` below) are the sizes of what moves between two engines. With a ``profile`` its batches take as
    long as those of the instance that was profiled, by its fit, unless ``timing`` says something.
    """

    def __init__(
        self,
        *,
        num_layers: int = 4,
        num_blocks: int = 1024,
        block_size: int = 16,
        vocab_size: int = BYTE_TOKENS + 4,
        timing: MockTiming | None = None,
        profile: Profile | None = None,
        eos_every: int = 0,
        verify: bool = False,
        faults: MockFaults | None = None,
        hidden_bytes_per_token: int = 64,
        kv_bytes_per_token_layer: int = 64,
        sleep: Callable[[float], None] | None = None,
        device: Device = HOST,
    ) -> None:
        if hidden_bytes_per_token < HIDDEN_MIN_BYTES:
            raise ValueError(
                f"hidden states of {hidden_bytes_per_token} bytes per token: the mock needs {HIDDEN_MIN_BYTES}"
            )
        self._streams = device.streams
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._timing = timing or MockTiming()
        self._profile = profile if self._timing == MockTiming() else None
        self._eos_every = eos_every
        self._steps = SampledSteps()
        self._faults = faults if faults != MockFaults() else None
        self.hidden_bytes_per_token = hidden_bytes_per_token
        self.kv_bytes_per_token_layer = kv_bytes_per_token_layer
        precise = PreciseSleep()
        self._sleep = sleep or precise
        self._precise = precise if sleep is None else None
        self._kv = MockKv(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=num_layers,
            bytes_per_token_layer=kv_bytes_per_token_layer,
            verify=verify,
        )

    @property
    def prepared_blocks(self) -> int:
        """All."""
        return self.num_blocks

    def prepare(self, first: int, last: int) -> None:
        """Nothing to do."""

    rehearses = False

    def rehearse(self) -> None:
        """See ``Engine``: nothing."""

    def embed(self, batch: ForwardBatch) -> Activation:
        """Start a batch."""
        return self._streams.compute.run(lambda: self._begin(self._steps.known(batch), 0))

    def embed_tokens(self, token_ids: Sequence[int]) -> Completion[Buffer]:
        """See ``Engine``. Takes no time: the table is read, nothing is computed."""
        check_tokens(np.asarray(token_ids, dtype=np.int64), self.vocab_size)
        return self._streams.out.run(lambda: hidden_of(token_ids, 0, self.hidden_bytes_per_token))

    def resume(self, batch: ForwardBatch, hidden: Buffer, *, next_layer: int) -> Activation:
        """See ``Engine``. It fails with ``RuntimeError`` for hidden states of other tokens or of another layer."""
        check_next_layer(next_layer, self.num_layers)
        check_batch(batch, self.block_size)
        host_bytes(hidden, batch.num_tokens * self.hidden_bytes_per_token, "hidden states")
        return self._streams.compute.run(lambda: self._resume(batch, hidden, next_layer))

    def _resume(self, batch: ForwardBatch, hidden: Buffer, next_layer: int) -> MockActivation:
        check_hidden(hidden, _tokens_of(batch), next_layer, self.hidden_bytes_per_token)
        activation = self._begin(batch, next_layer)
        if next_layer > 0:
            activation.resumed = True
            self._kv.resume(self._place(activation), next_layer)
        return activation

    def _begin(self, batch: ForwardBatch, layers_done: int) -> MockActivation:
        self._sleep(self._timing.step_overhead_s)
        return MockActivation(batch, batch.num_tokens, self._layer_s(batch), layers_done)

    def hidden_states(self, activation: Activation) -> Completion[Buffer]:
        """See ``Engine``."""
        return asked_of(activation, self._streams.out.run(lambda: self._hidden_states(activation.result())))

    def _hidden_states(self, activation: MockActivation) -> Bytes:
        check_whole(activation.layers_done, activation.next_token, self.num_layers)
        return hidden_of(_tokens_of(activation.batch), activation.layers_done, self.hidden_bytes_per_token)

    def export_kv(
        self,
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        last_layer: int,
        *,
        first_layer: int = 0,
        first_tokens: Sequence[int] = (),
    ) -> Completion[Buffer]:
        """See ``Engine``. It fails with ``RuntimeError`` for layers that have not been run."""
        check_layers(first_layer, last_layer, self.num_layers)
        slots = self._kv.slots_of(block_tables, num_tokens, first_tokens)
        return self._streams.out.run(lambda: self._kv.export(slots, first_layer, last_layer))

    def import_kv(
        self,
        block_tables: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        last_layer: int,
        kv: Buffer,
        *,
        first_layer: int = 0,
        first_tokens: Sequence[int] = (),
    ) -> Completion[None]:
        """See ``Engine``. It fails with ``RuntimeError`` for bytes that are not the KV of these positions and layers,
        or where exactly the layers before are not there already."""
        check_layers(first_layer, last_layer, self.num_layers)
        slots = self._kv.slots_of(block_tables, num_tokens, first_tokens)
        ranges = zip(first_tokens or [0] * len(num_tokens), num_tokens, strict=True)
        positions = np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(*one) for one in ranges)])
        host_bytes(kv, (last_layer - first_layer) * len(slots) * self.kv_bytes_per_token_layer, "KV")
        return self._streams.into.run(lambda: self._kv.load(slots, positions, first_layer, last_layer, kv))

    def run_layers(self, activation: Activation, first: int, last: int) -> Completion[None]:
        """Take the layers' time; the first one of a batch that was not resumed writes the KV.

        Raises ``BadRequest`` for layers out of order. It fails with ``RuntimeError`` for a block table that
        does not hold the context, or for blocks that another batch has written.
        """
        return asked_of(
            activation, self._streams.compute.run(lambda: self._run_layers(activation.result(), first, last))
        )

    def _run_layers(self, activation: MockActivation, first: int, last: int) -> None:
        check_next(first, last, activation.layers_done, activation.next_token, self.num_layers)
        if first == last:
            return
        started = time.perf_counter()
        slots = self._place(activation)
        self._run(activation, slots, first, last, activation.layer_s, started)
        activation.layers_done = last

    def run_part(self, activation: Activation, layer: int, begin: int, end: int) -> Completion[None]:
        """See ``Engine``. A part reads the weights as a whole batch does."""
        return asked_of(
            activation, self._streams.compute.run(lambda: self._run_part(activation.result(), layer, begin, end))
        )

    def _run_part(self, activation: MockActivation, layer: int, begin: int, end: int) -> None:
        started = time.perf_counter()
        num_tokens = activation.num_tokens
        at = {"next_layer": activation.layers_done, "next_token": activation.next_token}
        check_part(layer, begin, end, **at, num_layers=self.num_layers, num_tokens=num_tokens)
        # Whoever runs parts looks after each one which batch's is next, and whether it may begin: none is in the queue.
        activation.due = None
        layer_s = self._layer_s(activation.batch.part(begin, end))
        self._run(activation, self._place(activation)[begin:end], layer, layer + 1, layer_s, started)
        activation.next_token = end
        if end == num_tokens:
            activation.layers_done, activation.next_token = layer + 1, 0

    def _layer_s(self, batch: ForwardBatch) -> float:
        if self._profile is not None:
            return played_step_s(self._profile, batch) / self.num_layers
        timing = self._timing
        return (
            timing.layer_base_s
            + timing.layer_per_token_s * batch.num_tokens
            + timing.layer_per_context_token_s * _context_tokens(batch)
        )

    def _run(
        self, activation: MockActivation, slots: Slots, first: int, last: int, layer_s: float, started: float
    ) -> None:
        if self._faults is not None:
            self._faults.strike(_tokens_of(activation.batch))
        self._kv.begin(slots, first, resumed=activation.resumed)
        self._play(activation, layer_s * (last - first), started)
        # Only now: a layer that still runs must not be exported.
        self._kv.advance(slots, last, resumed=activation.resumed)

    def _play(self, activation: MockActivation, seconds: float, started: float) -> None:
        precise = self._precise
        if precise is None:
            self._sleep(seconds)
            return
        if activation.due is None or started - activation.due >= LAUNCHED_AHEAD_S:
            # What the books take is part of the time: just after a sleep it is a fraction of a millisecond.
            activation.due = started - precise.late_s
        activation.due += seconds
        precise.until(activation.due)

    def _place(self, activation: MockActivation) -> Slots:
        """Write the batch's KV, the first time."""
        if activation.slots is None:
            slots: list[int] = []
            hashes = []
            for piece in activation.batch.slices:
                prefix_hash = self._kv.write(piece, slots)
                if piece.row is not None:
                    hashes.append(prefix_hash)
            activation.hashes = hashes
            activation.slots = np.array(slots, dtype=np.int64)
        return activation.slots

    def head(self, activation: Activation) -> list[int]:
        """The prefix hash of each slice that samples. Raises ``ValueError`` before the last layer."""
        begun = activation.result()
        if begun.layers_done != self.num_layers:
            raise ValueError(f"head after {begun.layers_done} of {self.num_layers} layers")
        self._sleep(self._timing.head_s)
        return begun.hashes

    def counts_of(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Nothing is penalised."""

    def score(self, activation: Activation) -> Completion[list[PromptLogprobs]]:
        """Made up (``mock.tokens``)."""
        return self._streams.compute.run(lambda: self._score(activation.result()))

    def _score(self, activation: MockActivation) -> list[PromptLogprobs]:
        if activation.layers_done != self.num_layers:
            raise ValueError(f"scores after {activation.layers_done} of {self.num_layers} layers")
        return [
            prompt_logprobs(piece.start + piece.scored.first + 1, piece.scored, vocab_size=self.vocab_size)
            for piece in activation.batch.slices
            if piece.scored is not None
        ]

    def sample(self, activation: Activation) -> Completion[list[Sampled]]:
        """The token behind each context."""
        return self._streams.compute.run(lambda: self._sample(activation))

    def _sample(self, activation: Activation) -> list[Sampled]:
        batch, hashes = activation.result().batch, self.head(activation)
        settings = {"eos_every": self._eos_every, "vocab_size": self.vocab_size}
        sampled = [sample(prefix_hash, row, **settings) for prefix_hash, row in zip(hashes, batch.rows, strict=True)]
        self._steps.add(batch.number, sampled)
        return sampled
