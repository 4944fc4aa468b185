"""Where an engine's tokens come from: the seam between its model and what samples, by device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from services.worker.core.scheduling.schedule import Sampled
from services.worker.engine.forward_batch import ForwardBatch

Drawn = Callable[[], list[Sampled]]
"""What was sampled, for who asks once it is there."""

Known = Any
"""A sampler's own, of the tokens of one batch."""


class Sampler(Protocol):
    """Of one engine. On its thread."""

    def known(self, batch: ForwardBatch) -> Known:
        """What the batch's tokens are, or will be by the time that its stream comes to them. Raises ``BadRequest`` for
        a row that none of the newest steps has, or a token outside of the vocabulary."""

    def token_ids(self, known: Known) -> torch.Tensor:
        """``[num_tokens]`` int64 on the device. Inside of an operation of the compute stream."""

    def counts_of(self, prompt: Sequence[int], output: Sequence[int]) -> Any:
        """See ``Engine``."""

    def sample(self, logits: torch.Tensor, batch: ForwardBatch) -> Drawn:
        """One token per row of ``logits [num_sampled, vocab_size]``, float32, which may be changed; counts get what is
        sampled. Inside of an operation of the compute stream."""
