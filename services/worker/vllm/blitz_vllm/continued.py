"""Answers that go on: what was put out elsewhere is part of the prompt here, and output all the same.

vLLM counts a prompt's tokens for the repetition penalty alone. Presence and frequency penalties are of output tokens:
what they lack of the earlier ones is taken off here. For vLLM's runner of logits processors (V1).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from .words import NUM_OUTPUT

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


@dataclass
class _Earlier:
    token_ids: torch.Tensor
    counts: torch.Tensor
    presence: float
    frequency: float
    output: list[int]
    """What has been put out here, as it grows."""
    num_seen: int = 0
    seen: set[int] = field(default_factory=set)

    def penalties(self, dtype: torch.dtype) -> torch.Tensor:
        """Of each of the earlier tokens, beside what vLLM takes off."""
        for token in self.output[self.num_seen :]:
            self.seen.add(token)
        self.num_seen = len(self.output)
        is_new = torch.tensor([token not in self.seen for token in self.token_ids.tolist()])
        presence = self.presence * is_new.to(self.counts)  # a token that is present twice pays once
        return (presence + self.frequency * self.counts).to(dtype)


class Continued(LogitsProcessor):
    """A row costs something only if its request goes on with presence or frequency penalties."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        self._device = device
        self._rows: dict[int, _Earlier] = {}

    def is_argmax_invariant(self) -> bool:
        """Penalties change which token is likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See ``LogitsProcessor``."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._rows.pop(index, None)
            if (row := self._row(params, prompt, output)) is not None:
                self._rows[index] = row
        for first, second, direction in batch_update.moved:
            one, other = self._rows.pop(first, None), self._rows.pop(second, None)
            if one is not None:
                self._rows[second] = one
            if other is not None and direction is MoveDirectionality.SWAP:
                self._rows[first] = other

    def _row(self, params: SamplingParams, prompt: list[int] | None, output: list[int]) -> _Earlier | None:
        extra: dict[str, Any] = params.extra_args or {}
        num_output = extra.get(NUM_OUTPUT, 0)
        if not num_output or not prompt or not (params.presence_penalty or params.frequency_penalty):
            return None
        counts = Counter(prompt[-num_output:])
        return _Earlier(
            torch.tensor(list(counts), dtype=torch.long, device=self._device),
            torch.tensor(list(counts.values()), dtype=torch.float32, device=self._device),
            params.presence_penalty,
            params.frequency_penalty,
            output,
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See ``LogitsProcessor``."""
        for index, row in self._rows.items():
            logits[index, row.token_ids] -= row.penalties(logits.dtype).to(logits.device)
        return logits
