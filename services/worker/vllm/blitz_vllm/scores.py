"""Log-probabilities of a prompt, of vLLM's lists, in the worker's words."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from . import words

PIECE_BYTES = 1 << 20
"""Of one word, at most, but for one that is a single row: far from what a frame may be."""


def pieces(request: words.Add, flat: Any) -> Iterator[words.PromptScores]:
    """``flat``: vLLM's ``FlatLogprobs`` of all that the request has, row after row, each with the token's own and then
    the likeliest. Of what was put out before, nothing is said."""
    num_top = request.sampling.prompt_logprobs
    assert num_top is not None
    wide = num_top + 1
    logprobs, ranks = array("f", flat.logprobs), array("i", flat.ranks[::wide])
    ids = array("i", flat.token_ids)
    own = logprobs[::wide]
    del logprobs[::wide], ids[::wide]  # the likeliest stay
    end, step = len(request.token_ids) - request.num_output - 1, max(1, PIECE_BYTES // (8 * wide))
    for first in range(0, end, step):
        rows = slice(first, min(first + step, end))
        tops = slice(rows.start * num_top, rows.stop * num_top)
        yield words.PromptScores(
            id=request.id,
            start=first + 1,
            num_top=num_top,
            logprobs=own[rows].tobytes(),
            ranks=ranks[rows].tobytes(),
            top_ids=ids[tops].tobytes(),
            top_logprobs=logprobs[tops].tobytes(),
        )
