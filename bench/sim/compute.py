"""What steps take, from a profile: as long as the worker's mock engine plays for the same batch, so that the lab and
the simulator compute alike."""

from __future__ import annotations

import math
from typing import NamedTuple

from services.worker.core.scheduling.prompt_cost import num_pairs
from services.worker.core.scheduling.schedule import ScheduledBatch
from shared.profile import Profile


class Compute:
    """Of instances of one model on one kind of GPU."""

    def __init__(self, profile: Profile, *, scale: float = 1.0, overhead_s: float = 0.0) -> None:
        """``scale``: every time of the profile is so many times as long. ``overhead_s``: what a step takes beside its
        layers, whatever the scale. Raises ``ValueError``."""
        if not 0 < scale < math.inf or not 0 <= overhead_s < math.inf:
            raise ValueError(f"steps cannot take {scale!r} times as long, and {overhead_s!r} s more")
        self.profile = profile
        self.scale = scale
        self.overhead_s = overhead_s
        self.num_layers = profile.num_layers
        self.kv_bytes_per_token = profile.kv_bytes_per_token
        fit = profile.step_fit or profile.decode_fit
        self._context_token_s = scale * fit.context_token_s
        self._decodes_s: dict[int, float] = {}
        """Without context, by number of requests."""

    def step_s(self, prompt_tokens: int, pairs: int, num_decodes: int, context_tokens: int) -> float:
        """Through all layers. ``pairs``: of a prompt token and a token that it attends to. ``context_tokens``: of the
        requests that decode, together."""
        return self.scale * self.profile.step_s(prompt_tokens, pairs, num_decodes, context_tokens)

    def layer_s(self, prompt_tokens: int, pairs: int, num_decodes: int, context_tokens: int) -> float:
        """Through one layer, as ``step_s``."""
        return self.step_s(prompt_tokens, pairs, num_decodes, context_tokens) / self.num_layers

    def batch_s(self, batch: ScheduledBatch) -> float:
        """Through all layers."""
        prompt_tokens = pairs = num_decodes = context_tokens = 0
        for piece in batch.slices:
            # The last token of a prompt, by itself, is computed as decodes are.
            if piece.num_tokens == 1 and piece.sample:
                num_decodes += 1
                context_tokens += piece.start + 1
            else:
                prompt_tokens += piece.num_tokens
                pairs += num_pairs(piece.start, piece.num_tokens)
        return self.step_s(prompt_tokens, pairs, num_decodes, context_tokens)

    def decodes(self, started_s: float, num_requests: int, context_tokens: int, steps: int) -> DecodeRun:
        """So many steps of requests that decode, which attend to ``context_tokens`` in the first one."""
        base_s = self._decodes_s.get(num_requests)
        if base_s is None:
            base_s = self._decodes_s[num_requests] = self.step_s(0, 0, num_requests, 0)
        first_s = base_s + context_tokens * self._context_token_s + self.overhead_s
        return DecodeRun(started_s, steps, first_s, num_requests * self._context_token_s)


class DecodeRun(NamedTuple):
    """Decode steps of the same requests, one after another: each takes a little longer than the one before."""

    started_s: float
    steps: int
    first_s: float
    """Of the first step."""
    more_s: float
    """Of each step, than of the one before."""

    def ended_s(self, steps: int) -> float:
        """When so many of them have ended."""
        return self.started_s + (steps * self.first_s + steps * (steps - 1) / 2 * self.more_s)

    def ends_s(self, steps: int) -> list[float]:
        """When the first so many of them have ended, each."""
        started_s, first_s, more_s = self.started_s, self.first_s, self.more_s
        return [started_s + (i * first_s + i * (i - 1) / 2 * more_s) for i in range(1, steps + 1)]

    def num_ended(self, now_s: float) -> int:
        """Steps that have ended by then."""
        passed_s, first_s, more_s = now_s - self.started_s, self.first_s - self.more_s / 2, self.more_s / 2
        # more · n² + first · n = passed, in the form that loses no digits where more is next to nothing; then exactly.
        about = 2 * passed_s / (first_s + math.sqrt(first_s * first_s + 4 * more_s * max(0.0, passed_s)))
        steps = min(self.steps, max(0, int(about)))
        while steps < self.steps and self.ended_s(steps + 1) <= now_s:
            steps += 1
        while steps > 0 and self.ended_s(steps) > now_s:
            steps -= 1
        return steps

    def after(self, steps: int) -> DecodeRun:
        """What is left of it once so many have ended."""
        return DecodeRun(self.ended_s(steps), self.steps - steps, self.first_s + steps * self.more_s, self.more_s)

    def steps_s(self, first: int, last: int) -> list[float]:
        """What steps ``first <= i < last`` take each."""
        return [self.first_s + i * self.more_s for i in range(first, last)]
