"""The mock's tokens: a function of the context that they follow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.worker.core.scheduling.schedule import Sampled
from services.worker.engine.forward_batch import PromptRows, SamplingRow
from services.worker.engine.mock.kv import extend_hash, hash_tokens
from shared.messages.generation import PromptLogprobs, TokenLogprobs

_PRINTABLE_FIRST, _PRINTABLE_COUNT = 32, 95


def token_of(prefix_hash: int) -> int:
    """The printable ASCII byte that follows a context of this hash."""
    return _PRINTABLE_FIRST + (prefix_hash >> 32) % _PRINTABLE_COUNT


def next_token(token_ids: Sequence[int]) -> int:
    """The token that follows this context when no end-of-sequence is drawn."""
    return token_of(hash_tokens(token_ids))


def sample(prefix_hash: int, row: SamplingRow, *, eos_every: int, vocab_size: int) -> Sampled:
    """The token behind a context of this hash. About one in ``eos_every`` is the end of the sequence, if that is not
    0."""
    params = row.params
    token_id = token_of(prefix_hash)
    if eos_every and prefix_hash % eos_every == 0 and row.end_ids and not row.masks_ends:
        token_id = row.end_ids[0]
    elif params.stop_token_ids and row.masks_ends:
        while token_id in params.stop_token_ids:
            prefix_hash = extend_hash(prefix_hash, token_id)
            token_id = token_of(prefix_hash)
    if params.logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, _logprobs(token_id, prefix_hash, params.logprobs, vocab_size))


def _logprobs(token_id: int, prefix_hash: int, count: int, vocab_size: int) -> TokenLogprobs:
    best = -0.05 - (prefix_hash & 0xFF) / 4096
    others = (t for t in range(vocab_size) if t != token_id)
    alternatives = [(t, best - 3.0 - rank) for rank, t in zip(range(count - 1), others, strict=False)]
    return TokenLogprobs(logprob=best, top=((token_id, best), *alternatives) if count else ())


def prompt_logprobs(start: int, scored: PromptRows, *, vocab_size: int) -> PromptLogprobs:
    """Of a prompt's tokens from position ``start`` on: by token and position alone."""
    ids = np.array(scored.next_ids, dtype=np.int64)
    own = -((ids * 31 + np.arange(start, start + len(ids))) % 1000) / 100
    alternatives = np.arange(min(scored.num_top, vocab_size))
    return PromptLogprobs(
        start=start,
        num_top=len(alternatives),
        logprobs=own.astype("<f4").tobytes(),
        ranks=np.ones(len(ids), dtype="<i4").tobytes(),
        top_ids=((ids[:, None] + alternatives) % vocab_size).astype("<i4").tobytes(),
        top_logprobs=(own[:, None] - alternatives).astype("<f4").tobytes(),
    )
