"""Batches of a pair, with their requests and what an engine has of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence, submit_of
from services.worker.engine.base import Activation
from services.worker.engine.loop import EngineLoop, StepOutput
from services.worker.kv_transfer.connector import KvRange
from shared.errors import BlitzError, Internal
from shared.messages.generation import Submit
from shared.transport.base import Buffer


@dataclass(slots=True, eq=False)
class PromptBatch:
    """One or more whole prefixes (prompt, and output of earlier attempts), computed together."""

    batch_id: str
    sequences: tuple[ActiveSequence, ...]
    requests: tuple[Submit, ...] = ()
    """At the target, as they were handed over."""
    hidden: Buffer = None
    """What the other member sent, until a layer is begun."""
    activation: Activation | None = None
    broken: BlitzError | None = None
    """It could not be resumed, or a part of it failed: what is in flight behind that counts for nothing."""
    busy_s: float = 0.0
    """Of this engine, with it."""
    kv_direct: bool | None = None
    """At the target, once pulled: its KV leaves here for the decode instances."""
    lengths: tuple[int, ...] = field(init=False)
    """A prefix grows only once the batch is done; the sizes of what is on its way follow from these."""
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = tuple(s.num_tokens for s in self.sequences)
        self.num_tokens = sum(self.lengths)

    @property
    def ended(self) -> bool:
        """All of its requests have."""
        return all(s.finished for s in self.sequences)

    def kv(self, first_layer: int, last_layer: int) -> KvRange:
        """Of these layers, in the blocks that it has now."""
        return KvRange.of([s.block_table for s in self.sequences], self.lengths, range(first_layer, last_layer))

    def token_ids(self) -> list[int]:
        """All tokens, one prefix after another."""
        return [token for s in self.sequences for token in s.tokens]

    def submits(self, instance_id: str, model: str, model_hash: str) -> tuple[Submit, ...]:
        """The requests, as the target has to know them."""
        return tuple(submit_of(s, instance_id, model, model_hash) for s in self.sequences)

    def breaks(self, error: Exception) -> bool:
        """Whether it had not before. What the error holds on to, which may be much, is not kept."""
        is_first = self.broken is None
        self.broken = self.broken or Internal(f"{type(error).__name__}: {error}")
        self.forget_tensors()
        return is_first

    def forget_tensors(self) -> None:
        """They are large, and the batch's KV may still be on its way."""
        self.hidden = self.activation = None

    # --- on the engine's thread ---------------------------------------------------------------

    def tell_layers(self, loop: EngineLoop, num_layers: int) -> None:
        """So many layers have run here: the KV of those of its requests that are decoded elsewhere can leave; 0: the
        batch was begun."""
        if loop.prefill_listener is not None:
            for sequence, num_tokens in zip(self.sequences, self.lengths, strict=True):
                if sequence.decode_at is not None and not sequence.finished:
                    loop.prefill_listener.ran_layers(sequence, 0, num_tokens, num_layers)

    def adopt(self, loop: EngineLoop, sampled: Sequence[Sampled], *, kv_here: bool = True) -> StepOutput:
        """First tokens of a batch that ran all layers: its requests decode here from now on, or with ``kv_here`` false
        once their KV is whole."""
        reservations, now_s = loop.scheduler.reservations, time.monotonic()
        outputs = [
            reservations.adopt(sequence, token, now_s, kv_here=kv_here)
            for sequence, token in zip(self.sequences, sampled, strict=True)
        ]
        return StepOutput(tuple(o for o in outputs if o is not None), num_prefill_tokens=self.num_tokens)
