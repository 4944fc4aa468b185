"""What a model thinks before it answers, ``<think>...</think>``: told apart from the answer as it comes.

A thought is at the beginning of an output, or there is none. The prompt says which: a template that opens the thought
itself ends with ``<think>``, one that turns thinking off with ``</think>``; behind any other the model may open one
itself. What is behind the thought is read by the answer's own parser, so nothing inside of a thought is a call.

Blanks around a thought, and the newlines behind its end, are nobody's: templates put them there again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.gateway.core.call_output import AnswerParser
from services.gateway.core.tools.deltas import NOTHING, CallDelta, ParsedText
from shared.messages.common import ReasoningParserName

MAX_BLANKS = 256
"""Of those that may turn out to be before a thought, or behind it: more than these are text."""
_BLANK = " \t\r\n"
_NEWLINES = "\r\n"

State = Literal["before", "thought", "behind", "answer"]


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """How a family's thoughts begin and end."""

    begin: str = "<think>"
    end: str = "</think>"
    assumed: bool = False
    """The model thinks, also where neither the prompt nor itself says that a thought begins."""

    def behind(self, prompt: str) -> Thinking | None:
        """What comes behind that prompt. None: an answer without a thought."""
        shown = prompt.rstrip(_BLANK)
        if shown.endswith(self.end):
            return None
        return Thinking(self, is_open=self.assumed or shown.endswith(self.begin))


class Thinking(NamedTuple):
    """Of one prompt."""

    format: ThoughtFormat
    is_open: bool
    """The output begins inside of a thought; else it may begin with one."""


_THINK = ThoughtFormat()
_NAMED: Mapping[ReasoningParserName, ThoughtFormat] = {
    "qwen3": _THINK,
    "deepseek_r1": ThoughtFormat(assumed=True),
}


def format_in(template: str) -> ThoughtFormat | None:
    """That of a model with such a chat template; None for one that does not think, or in a format unknown here."""
    return _THINK if _THINK.end in template else None


def chosen_format(name: ReasoningParserName, found: ThoughtFormat | None) -> ThoughtFormat | None:
    """The one that a model's setting names; ``found``: what its template says (``format_in``)."""
    return found if name == "auto" else _NAMED.get(name)


class PlainText:
    """``AnswerParser`` where there are no calls."""

    in_text = True
    num_complete = 0

    def push(self, text: str) -> ParsedText:
        return ParsedText(text, ()) if text else NOTHING

    def mark(self, mark: str) -> ParsedText:  # noqa: ARG002 - it has none
        return NOTHING

    def flush(self) -> ParsedText:
        return NOTHING


class ThoughtParser:
    """``AnswerParser`` of one output that may begin with a thought; ``answer`` reads what is behind it. How the text is
    cut into pieces changes nothing of what comes out in all."""

    def __init__(self, thinking: Thinking, answer: AnswerParser) -> None:
        self._format, self._is_open = thinking
        self._answer = answer
        self._state: State = "before"
        self._held = ""
        """Before: what may be blanks and the beginning's mark. In a thought: what may be the beginning of its end."""
        self._blanks = ""
        """In a thought: those that may be its last ones."""
        self._any_thought = False
        self._thought: list[str] = []
        self._text: list[str] = []
        self._calls: list[CallDelta] = []

    @property
    def in_thought(self) -> bool:
        """What comes is part of a thought, as far as can be seen."""
        return self._state == "thought" or (self._state == "before" and self._is_open)

    @property
    def in_text(self) -> bool:
        """What comes is text of the answer, as far as can be seen."""
        return self._state == "answer" and self._answer.in_text

    @property
    def num_complete(self) -> int:
        """Calls of the answer of which all arguments came."""
        return self._answer.num_complete

    def push(self, text: str) -> ParsedText:
        """Text that came."""
        if self._state == "answer":
            return self._answer.push(text)
        if self._state == "before":
            text = self._read_before(text)
        if self._state == "thought":
            text = self._read_thought(text)
        if self._state == "behind":
            text = text.lstrip(_NEWLINES)
            if text:
                self._state = "answer"
        if self._state == "answer":
            self._take(self._answer.push(text))
        return self._taken()

    def mark(self, mark: str) -> ParsedText:
        """A special token: that of the thought's beginning or end, or one of the answer's."""
        if self._state == "before":
            if mark == self._format.begin and not self._held.strip(_BLANK):
                self._held, self._state = "", "thought"
                return NOTHING
            self._give_up()
        if self._state == "thought":
            self._end_held()
            if mark == self._format.end:
                self._end_thought()
        elif mark not in (self._format.begin, self._format.end):
            self._state = "answer"
            self._take(self._answer.mark(mark))
        return self._taken()

    def flush(self) -> ParsedText:
        """No more text comes."""
        if self._state == "before":
            self._give_up()
        if self._state == "thought":
            self._end_held()
        self._take(self._answer.flush())
        return self._taken()

    def _read_before(self, text: str) -> str:
        """What is to be read on with, in the state that follows."""
        held = self._held + text
        shown, begin = held.lstrip(_BLANK), self._format.begin
        if len(held) - len(shown) <= MAX_BLANKS:
            if shown.startswith(begin):
                self._held, self._state = "", "thought"
                return shown[len(begin) :]
            if begin.startswith(shown):
                self._held = held
                return ""
        self._held, self._state = "", "thought" if self._is_open else "answer"
        return held

    def _give_up(self) -> None:
        """No thought begins here, or one that was open does not say so."""
        held, self._held = self._held, ""
        if self._is_open:
            self._state = "thought"
            self._think(held)
        else:
            self._state = "answer"
            self._take(self._answer.push(held))

    def _read_thought(self, text: str) -> str:
        """What is behind the thought, if it ends here."""
        text, end = self._held + text, self._format.end
        self._held = ""
        at = text.find(end)
        if at >= 0:
            self._think(text[:at])
            self._end_thought()
            return text[at + len(end) :]
        keep = next((n for n in range(min(len(end) - 1, len(text)), 0, -1) if end.startswith(text[-n:])), 0)
        self._held = text[len(text) - keep :]
        self._think(text[: len(text) - keep])
        return ""

    def _end_held(self) -> None:
        held, self._held = self._held, ""
        self._think(held)

    def _end_thought(self) -> None:
        self._blanks, self._state = "", "behind"

    def _think(self, text: str) -> None:
        if not self._any_thought:
            text = text.lstrip(_BLANK)
            self._any_thought = bool(text)
        text = self._blanks + text
        shown = max(len(text.rstrip(_BLANK)), len(text) - MAX_BLANKS)
        self._blanks = text[shown:]
        if shown:
            self._thought.append(text[:shown])

    def _take(self, parsed: ParsedText) -> None:
        if parsed.text:
            self._text.append(parsed.text)
        self._calls += parsed.calls

    def _taken(self) -> ParsedText:
        if not self._text and not self._calls and not self._thought:
            return NOTHING
        taken = ParsedText("".join(self._text), tuple(self._calls), "".join(self._thought))
        self._text, self._calls, self._thought = [], [], []
        return taken
