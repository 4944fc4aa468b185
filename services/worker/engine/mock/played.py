"""How long the instance that was profiled would take for a batch."""

from __future__ import annotations

from services.worker.core.scheduling.prompt_cost import num_pairs
from services.worker.engine.forward_batch import ForwardBatch
from shared.profile import Profile


def played_step_s(profile: Profile, batch: ForwardBatch) -> float:
    """Seconds through all layers, head and sampling included. A slice of one token that is sampled decodes."""
    prompt_tokens = pairs = num_decodes = context_tokens = 0
    for piece in batch.slices:
        count = len(piece.token_ids)
        if count == 1 and piece.row is not None:
            num_decodes += 1
            context_tokens += piece.start + 1
        else:
            prompt_tokens += count
            pairs += num_pairs(piece.start, count)
    return profile.step_s(prompt_tokens, pairs, num_decodes, context_tokens)
