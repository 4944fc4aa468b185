"""What the deaths of workers say about a request that was running in them (``docs/decisions/0015-poison.md``).

Rules
- A death counts only if the attempt had produced few tokens: a request that kills at some position of its text kills
  there again, at once, because each attempt continues behind the last token. A request that got further was not at
  fault, and earlier deaths are forgotten: it is past that position. This death is the first of a new series.
- After two deaths a request is suspected: it is computed alone until it is past the position. Its worker announces
  the start and the end of each of its steps.
- A further death counts only if the request was in a step of its own. That is the third: the request is poison.
- Deaths that other requests caused do not count, but are bounded: a cluster whose workers all die can serve no
  request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SUSPECT_DEATHS = 2
POISON_DEATHS = 3
CLEARED_TOKENS = 16
"""With more new tokens than these, an attempt was past the position where the previous one died. Tokens of the last few
steps may be lost with the worker, so the position is known only roughly."""
MAX_OTHER_DEATHS = 20
"""In a row, without progress in between."""


@dataclass(frozen=True, slots=True)
class Deaths:
    """Of workers that had one request, without progress in between."""

    counted: int = 0
    others: int = 0
    """Of a suspect's workers, outside of its own steps."""
    workers: tuple[str, ...] = ()
    """The workers whose deaths count, in order."""

    @property
    def suspected(self) -> bool:
        """Whether the next attempt is computed alone."""
        return self.counted >= SUSPECT_DEATHS

    @property
    def poison(self) -> bool:
        """Whether there is no next attempt."""
        return self.counted >= POISON_DEATHS

    def after(self, worker_id: str, *, num_new_tokens: int, in_own_step: bool) -> Deaths:
        """With one more, in an attempt that brought so many tokens. ``in_own_step``: the worker had said that it was
        computing this request alone."""
        if num_new_tokens > CLEARED_TOKENS:
            return Deaths(1, 0, (worker_id,))
        if self.suspected and not in_own_step:
            return replace(self, others=self.others + 1)
        return replace(self, counted=self.counted + 1, workers=(*self.workers, worker_id))
