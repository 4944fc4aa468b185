"""A stream whose prompt's log-probabilities are asked for.

They come before the first token, in order of positions, from whoever computes the prompt. An attempt that begins anew
computes all of them again, and each position is taken once. Tokens that come before all of them are here are a gap:
the gateway asks for what is lacking, and its worker has it, or says that it does not; then there is another attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from services.gateway.core.stream import PartVerdict, Phase, StreamState
from shared.messages.generation import PromptLogprobs, StreamPart


@dataclass(slots=True)
class ScoredStream(StreamState):
    """See the module."""

    num_scored: int = 1
    """Tokens of the prompt, from the first on, which has none, whose log-probabilities have come."""
    came: list[PromptLogprobs] = field(default_factory=list)
    """Those that nobody has taken yet."""

    @property
    def prompt_offset(self) -> int | None:
        return self.num_scored if self.num_scored < len(self.prompt_token_ids) else None

    def take(self) -> list[PromptLogprobs]:
        """What has come since the last call."""
        came, self.came = self.came, []
        return came

    def accept(self, part: StreamPart) -> tuple[PartVerdict, int]:
        if part.attempt != self.attempt or self.phase not in (Phase.RUNNING, Phase.SUBMITTED):
            return PartVerdict.FOREIGN, 0
        if part.prompt is not None:
            return self._accept_prompt(part.prompt), 0
        # An attempt that fails, or is cancelled, ends without them.
        goes_on = bool(part.token_ids) or part.finish_reason in ("stop", "length")
        if goes_on and self.prompt_offset is not None:
            return PartVerdict.GAP, 0
        return StreamState.accept(self, part)

    def _accept_prompt(self, logprobs: PromptLogprobs) -> PartVerdict:
        if not self._is_ours(logprobs) or logprobs.end <= self.num_scored:
            return PartVerdict.DUPLICATE
        if logprobs.start > self.num_scored:
            return PartVerdict.GAP
        self.came.append(logprobs.part(self.num_scored, logprobs.end))
        self.num_scored = logprobs.end
        if self.prompt_offset is None:
            self.sampling = structs.replace(self.sampling, prompt_logprobs=None)  # no later attempt computes them
        self.phase = Phase.RUNNING
        return PartVerdict.NEW

    def _is_ours(self, logprobs: PromptLogprobs) -> bool:
        """Whether this is of such a prompt, and no more than was asked for. What came in a message may be anything."""
        asked = self.sampling.prompt_logprobs
        if asked is None or logprobs.num_top > asked or logprobs.end > len(self.prompt_token_ids):
            return False
        if not logprobs.is_whole:
            return False
        ids = memoryview(logprobs.top_ids).cast("i")
        return not ids or min(ids) >= 0
