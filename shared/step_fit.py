"""What a step takes by what is in it, more closely than a line through the measurements.

    step = dense(prompt tokens + requests that decode)
         + attention of prompts = prompts + prompt tokens · prompt_token + pairs · pair
         + attention of decodes = decodes + requests · request + tokens of context · context_token

``dense`` is everything but attention. It takes prompt tokens and decoding requests alike, and is no line: up to some
hundred tokens the weights have to be read, whatever is computed with them; beyond, each token costs its arithmetic.
Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

Share = Annotated[float, Meta(ge=0.0, le=1e6)]


class DensePoint(msgspec.Struct, frozen=True, kw_only=True):
    """All of a step but attention, with so many tokens in it."""

    num_tokens: Annotated[int, Meta(ge=1, le=2**40)]
    seconds: Annotated[float, Meta(ge=1e-9, le=1e6)]


class StepFit(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    dense: Annotated[tuple[DensePoint, ...], Meta(min_length=1, max_length=1000)]
    """By tokens, rising; seconds never fall."""
    prompts_s: Share
    """Attention of prompts adds ``prompts_s + tokens · prompt_token_s + pairs · pair_s``."""
    prompt_token_s: Share
    pair_s: Share
    decodes_s: Share
    """Attention of decodes adds ``decodes_s + requests · request_s + (tokens of all contexts) · context_token_s``."""
    request_s: Share
    context_token_s: Share
    error: Share
    """The largest difference from a measured point, as a share of it."""

    def __post_init__(self) -> None:
        for low, high in pairwise(self.dense):
            if low.num_tokens >= high.num_tokens or low.seconds > high.seconds:
                raise ValueError(f"dense: {high} comes after {low}")

    def step_s(self, prompt_tokens: int, pairs: int, num_decodes: int, context_tokens: float) -> float:
        """``context_tokens``: of the requests that decode, together. Nothing takes no time."""
        seconds = self._dense_s(prompt_tokens + num_decodes)
        if prompt_tokens:
            seconds += self.prompts_s + prompt_tokens * self.prompt_token_s + pairs * self.pair_s
        if num_decodes:
            seconds += self.decodes_s + num_decodes * self.request_s + context_tokens * self.context_token_s
        return seconds

    def _dense_s(self, num_tokens: int) -> float:
        """Between two points their times on a line; before the first its time, after the last its speed."""
        if not num_tokens:
            return 0.0
        points = self.dense
        at = bisect_left(points, num_tokens, key=lambda point: point.num_tokens)
        if at == 0:
            return points[0].seconds
        if at == len(points):
            return points[-1].seconds * num_tokens / points[-1].num_tokens
        low, high = points[at - 1], points[at]
        share = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
        return low.seconds + share * (high.seconds - low.seconds)
