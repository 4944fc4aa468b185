"""How likely a prompt's own tokens are, from the hidden states behind the last layer: logits in pieces, each of which
is gone before the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.worker.device.tensors import Array, Tensors
from services.worker.engine.forward_batch import ForwardBatch, Slice
from shared.messages.generation import PromptLogprobs

LOGITS_BYTES = 64 * 2**20
"""At once, with what is made of them, whatever vocabulary and chunk are; one row where that takes more."""
BYTES_PER_LOGIT = 10
"""Two tables of float32, one of bits, and what the head's own type takes."""


def scored_slices(batch: ForwardBatch) -> list[tuple[int, Slice]]:
    """Those of the batch, each with the place of its first token."""
    begin, found = 0, []
    for piece in batch.slices:
        if piece.scored is not None:
            found.append((begin, piece))
        begin += len(piece.token_ids)
    return found


def scored_rows(batch: ForwardBatch) -> Array:
    """``[num_scored]`` int64: whose next tokens are scored, of the batch's tokens, slice after slice."""
    rows = []
    for begin, piece in scored_slices(batch):
        assert piece.scored is not None
        first = begin + piece.scored.first
        rows.append(np.arange(first, first + len(piece.scored.next_ids)))
    return np.concatenate(rows)


def score(
    hidden: torch.Tensor,
    batch: ForwardBatch,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    tensors: Tensors,
) -> Callable[[], list[PromptLogprobs]]:
    """Of each scored slice, for who asks once it is there. ``hidden`` [num_scored, hidden_size]: behind the last layer;
    ``head`` gives logits [n, vocab_size] in float32. Inside of an operation of the compute stream."""
    slices = [piece for _, piece in scored_slices(batch)]
    targets = [piece.scored for piece in slices if piece.scored is not None]
    next_ids = np.concatenate([np.array(target.next_ids, dtype=np.int64) for target in targets])
    most = min(vocab_size, max(target.num_top for target in targets))
    rows_at_once = max(1, LOGITS_BYTES // (BYTES_PER_LOGIT * vocab_size))
    own = torch.split(tensors.upload(next_ids)[0], rows_at_once)
    pieces = zip(torch.split(hidden, rows_at_once), own, strict=True)
    parts = [_of_rows(head(rows), own_ids, most) for rows, own_ids in pieces]
    own_logprobs, ranks, top_ids, top = tensors.download(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def made() -> list[PromptLogprobs]:
        order = np.lexsort((top_ids, -top), axis=-1)  # equally likely ones by their ids
        ids, values = np.take_along_axis(top_ids, order, -1), np.take_along_axis(top, order, -1)
        return _by_slice(slices, own_logprobs, ranks, ids, values)

    return made


def _of_rows(logits: torch.Tensor, own_ids: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Of ``logits`` [n, vocab]: ``[n]`` float32 and int32 of their own tokens, ``[n, most]`` int32 and float32 of the
    likeliest."""
    table = torch.log_softmax(logits, dim=-1)
    own = table.gather(1, own_ids[:, None])
    ranks = (table >= own).sum(dim=-1, dtype=torch.int32)
    top, top_ids = table.topk(most, dim=-1)
    return own[:, 0], ranks, top_ids.int(), top


def _by_slice(slices: Sequence[Slice], own: Array, ranks: Array, top_ids: Array, top: Array) -> list[PromptLogprobs]:
    result, at = [], 0
    for piece in slices:
        scored = piece.scored
        assert scored is not None
        end, num_top = at + len(scored.next_ids), min(scored.num_top, top.shape[1])
        result.append(
            PromptLogprobs(
                start=piece.start + scored.first + 1,
                num_top=num_top,
                logprobs=own[at:end].astype("<f4").tobytes(),
                ranks=ranks[at:end].astype("<i4").tobytes(),
                top_ids=top_ids[at:end, :num_top].astype("<i4").tobytes(),
                top_logprobs=top[at:end, :num_top].astype("<f4").tobytes(),
            )
        )
        at = end
    return result
