"""Room for a request at the instance that is to decode it: what is asked for, how often, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.worker.core.pauses import growing
from shared.errors import BadRequest

RETRY_S = 0.02
MAX_RETRY_S = 0.3
ROOM_PATIENCE_S = 1.0
"""How long a request whose prompt is computed waits for capacity before it is decoded where it is."""


def pauses(uniform: Callable[[float, float], float]) -> Iterator[float]:
    """Between two questions for room: they are as long as the prompt, and others may wait as well. ``uniform``: of
    random numbers, as ``random.uniform``."""
    return (pause_s * uniform(0.5, 1.0) for pause_s in growing(RETRY_S, MAX_RETRY_S))


def is_asked_again(computed_at_s: float | None, now_s: float) -> bool:
    """Whether a request that found no room goes on asking. ``computed_at_s``: since when its prompt is computed, if it
    is: until then there is nothing to be lost by it."""
    return computed_at_s is None or now_s - computed_at_s <= ROOM_PATIENCE_S


def chunk_tokens(num_tokens: int, first_end: int, prefill_chunk_tokens: int) -> int:
    """Most tokens of the chunks in which the KV of a context leaves, of which ``first_end`` were computed first; 0: it
    leaves in one."""
    return prefill_chunk_tokens if first_end < num_tokens else 0


def check_fits(num_tokens: int, context_tokens: int, limit_tokens: int) -> None:
    """Raises ``BadRequest`` for what an instance whose requests have up to ``limit_tokens`` will never take: contexts
    of ``num_tokens`` tokens that may become ``context_tokens`` (0: not said)."""
    if not 0 < num_tokens < limit_tokens:
        raise BadRequest(f"{num_tokens} tokens: this instance takes up to {limit_tokens - 1}", param="request")
    if limit_tokens < context_tokens:
        raise BadRequest(f"a context of {context_tokens} tokens: {limit_tokens} here", param="context_tokens")
