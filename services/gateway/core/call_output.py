"""One stream's text where the model may call functions: tokens in, text for the client and parts of calls out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from services.gateway.core.text_output import Detokenizer, StopScanner, TextOutput
from services.gateway.core.tools.deltas import CallDelta, ParsedText


class AnswerParser(Protocol):
    """What reads an answer's text as it comes: ``ToolParser`` says who calls what."""

    @property
    def in_text(self) -> bool: ...

    @property
    def num_complete(self) -> int: ...

    def push(self, text: str) -> ParsedText: ...

    def mark(self, mark: str) -> ParsedText: ...

    def flush(self) -> ParsedText: ...


class CallOutput(TextOutput):
    """``TextOutput``, whose text is what is not part of a call; ``take_calls`` gives the rest. Stop strings are looked
    for in both.

    ``marks``: by id, the special tokens that the parser knows by their text; clients do not see them.
    """

    __slots__ = ("_calls", "_marks", "_parser")

    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: AnswerParser,
        marks: Mapping[int, str],
        *,
        scanner: StopScanner | None,
        hidden_ids: frozenset[int],
        min_tokens: int,
    ) -> None:
        super().__init__(detokenizer, scanner=scanner, hidden_ids=hidden_ids, min_tokens=min_tokens)
        self._parser = parser
        self._marks = marks
        self._calls: list[CallDelta] = []

    @property
    def called(self) -> bool:
        """The model has made a call, with all its arguments."""
        return self._parser.num_complete > 0

    @property
    def in_text(self) -> bool:
        """The last token was no part of a call, as far as can be seen."""
        return self._parser.in_text

    def take_calls(self) -> list[CallDelta]:
        """What became certain of calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def push(self, token_id: int) -> str:
        mark = self._marks.get(token_id) if token_id not in self._hidden_ids else None
        if mark is None:
            text = self._kept(self._parser.push(super().push(token_id)))
        else:
            # What comes before it does not go on behind it.
            text = self._kept(self._parser.push(super().flush()))
            self.num_tokens += 1
            if not self.stopped:
                text += self._kept(self._parser.mark(mark))
        return text + self._kept(self._parser.flush()) if self.stopped else text

    def flush(self) -> str:
        text = self._kept(self._parser.push(super().flush()))
        return text + self._kept(self._parser.flush())

    def _kept(self, parsed: ParsedText) -> str:
        self._calls += parsed.calls
        return parsed.text
