"""One stream's text where the model may think first: tokens in; its thought, text for the client and calls out."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.core.call_output import CallOutput
from services.gateway.core.text_output import Detokenizer, StopScanner
from services.gateway.core.thoughts import ThoughtParser
from services.gateway.core.tools.deltas import ParsedText


class ThinkingOutput(CallOutput):
    """``CallOutput``, whose text and calls are those behind the thought; ``take_thought`` gives that. Stop strings are
    looked for in all."""

    __slots__ = ("_pieces", "_thoughts", "num_thought_tokens")

    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: ThoughtParser,
        marks: Mapping[int, str],
        *,
        scanner: StopScanner | None,
        hidden_ids: frozenset[int],
        min_tokens: int,
    ) -> None:
        super().__init__(detokenizer, parser, marks, scanner=scanner, hidden_ids=hidden_ids, min_tokens=min_tokens)
        self._thoughts = parser
        self._pieces: list[str] = []
        self.num_thought_tokens = 0
        """Those inside of the thought: not its marks, where each is a token, and not the end of the output."""

    def take_thought(self) -> str:
        """What became certain of the thought since the last time."""
        if not self._pieces:
            return ""
        thought = "".join(self._pieces)
        self._pieces.clear()
        return thought

    def push(self, token_id: int) -> str:
        was_inside = self._thoughts.in_thought
        text = super().push(token_id)
        if was_inside and self._thoughts.in_thought and token_id not in self._hidden_ids:
            self.num_thought_tokens += 1
        return text

    def _kept(self, parsed: ParsedText) -> str:
        if parsed.thought:
            self._pieces.append(parsed.thought)
        return super()._kept(parsed)
