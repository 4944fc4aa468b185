"""What all parsers of calls are: text as it comes in, what is for the client and what is a call out.

Who calls what: ``push`` for text, in pieces of any length; ``mark`` for a special token that the family uses, whose
text no client sees; ``flush`` once, at the end. What may yet become a call is held back, up to ``MAX_HELD_CHARACTERS``.
Once a function's name and the beginning of its arguments are there, they go out as they come. What looks like a call
and is none (another function, no JSON) is text, from its first character on. A call that breaks later, in its
arguments, ends there, so that they are no JSON; what is behind is text again.

How the text is cut into pieces changes nothing of what comes out in all.
"""

from __future__ import annotations

import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import ClassVar

from services.gateway.core.tools.deltas import NOTHING, CallDelta, ParsedText

MAX_HELD_CHARACTERS = 4096
"""Of what may yet become a call; also of blanks that may yet be what separates calls."""
_PIECE_CHARACTERS = 1024
"""Longer text is read in pieces."""

Step = Callable[[str, int], int]
"""Reads from that place of the text on, and returns where it ended; below 0: it needs more text to go on."""
WAIT = -1


class ToolParser(ABC):
    """One answer's. ``names``: the functions that may be called; ``parallel``: more than one call is passed on;
    ``new_id`` gives a call's id."""

    starts: ClassVar[tuple[str, ...]]
    """Texts with which a call, or a list of calls, may begin."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Texts of the format for which a tokenizer may have special tokens."""
    separators: ClassVar[str] = ""
    """What may be between two calls, beside blanks."""
    id_prefix: ClassVar[str] = "call_"
    id_alphabet: ClassVar[str] = string.ascii_letters + string.digits + "-_"
    id_length: ClassVar[int] = 24
    """Of a call's id, behind its prefix."""
    arguments_field: ClassVar[str] = "arguments"
    """Of a call that is an object."""

    def __init__(self, names: AbstractSet[str], new_id: Callable[[], str], *, parallel: bool) -> None:
        self.names = names
        self.num_complete = 0
        """Calls of which all arguments came, also those that are not passed on."""
        self._new_id = new_id
        self._parallel = parallel
        self._num_calls = 0
        self._step: Step = self._read_text
        self._tail = ""
        """The last characters, which may be the beginning of something: fewer than that has."""
        self._held: list[str] | None = None
        """What was read of a call that may turn out to be none; None: nothing such."""
        self._num_held = 0
        self._failed = False
        self._special = False
        self._between = ""
        """Blanks and separators before any text, or behind a call: shown if text follows."""
        self._may_separate = True
        self._text: list[str] = []
        self._calls: list[CallDelta] = []
        self._blank = re.compile(rf"[\s{re.escape(self.separators)}]*")
        self._any_start = re.compile("|".join(map(re.escape, self.starts)))

    @classmethod
    def forced(cls, mark: Callable[[str], str], *, parallel: bool) -> str | None:  # noqa: ARG003 - for those that have it
        """Rules of llguidance's Lark, from ``start`` on, of an answer that is calls alone, each an object of the rule
        ``call``; ``mark`` writes one of ``marks`` there. None: calls of this format cannot be asked for so."""
        return None

    @property
    def in_text(self) -> bool:
        """What comes is text as far as can be seen, not part of a call."""
        return self._step == self._read_text

    def push(self, text: str) -> ParsedText:
        """Text that came."""
        for at in range(0, len(text), _PIECE_CHARACTERS):
            self._read(text[at : at + _PIECE_CHARACTERS])
        return self._taken()

    def mark(self, mark: str) -> ParsedText:
        """One of ``marks``, as a special token: clients do not see it, whatever it turns out to be."""
        if mark in self.starts or self._tail or not (self.in_text or self._expects(mark)):
            self._interrupt()
        if self.in_text and mark not in self.starts:
            return self._taken()
        self._special = True
        self._read(mark)
        self._tail = ""
        self._special = False
        return self._taken()

    def flush(self) -> ParsedText:
        """No more text comes."""
        self._interrupt()
        if not self._num_calls:
            self._text.append(self._between)
        self._between = ""
        return self._taken()

    @abstractmethod
    def _begin(self, start: str) -> Step:
        """A start was read: what reads on."""

    def _expects(self, mark: str) -> bool:  # noqa: ARG002 - for those that have marks
        """Whether the call that is read may go on with that mark."""
        return False

    def _read(self, text: str) -> None:
        text = self._tail + text
        at = 0
        while at < len(text):
            end = self._stepped(text, at)
            if end == WAIT:
                break
            if self._failed:
                self._give_up(text[at:end])
            elif self._held is not None:
                self._hold(text[at:end])
            at = end
        self._tail = text[at:]

    def _stepped(self, text: str, at: int) -> int:
        if self._held is None:
            return self._step(text, at)
        left = MAX_HELD_CHARACTERS - self._num_held
        if left <= 0:
            return self._fail(at)
        if len(text) - at <= left:
            return self._step(text, at)
        end = self._step(text[: at + left], at)
        return self._fail(at) if end == WAIT else end

    def _hold(self, text: str) -> None:
        assert self._held is not None
        self._num_held += len(text)
        if not self._special:
            self._held.append(text)

    def _begin_holding(self) -> None:
        self._held, self._num_held = [], 0

    def _fail(self, at: int) -> int:
        """What is held is no call."""
        self._failed = True
        return at

    def _give_up(self, text: str) -> None:
        held = "".join(self._held or ()) + ("" if self._special else text)
        self._held, self._failed, self._step = None, False, self._read_text
        self._show(held)

    def _interrupt(self) -> None:
        """What is read ends here, as it is."""
        tail, self._tail = self._tail, ""
        if self._held is not None:
            self._give_up(tail)
        elif self.in_text:
            self._show(tail)
        self._step = self._read_text

    def _taken(self) -> ParsedText:
        if not self._text and not self._calls:
            return NOTHING
        taken = ParsedText("".join(self._text), tuple(self._calls))
        self._text, self._calls = [], []
        return taken

    def _show(self, text: str) -> None:
        """Text for the client: blanks that may separate calls wait for what follows them."""
        if not text:
            return
        if self._may_separate:
            match = self._blank.match(text)
            assert match is not None
            room = MAX_HELD_CHARACTERS - len(self._between)
            if match.end() == len(text) <= room:
                self._between += text
                return
            text, self._between, self._may_separate = self._between + text, "", False
        self._text.append(text)

    def _read_text(self, text: str, at: int) -> int:
        found = self._any_start.search(text, at)
        if found is None:
            end = len(text) - self._overlap(text, at)
            if not self._special:
                self._show(text[at:end])
            return end if end > at else WAIT
        if found.start() > at:
            self._show(text[at : found.start()])
            return found.start()
        self._begin_holding()
        self._step = self._begin(found[0])
        return found.end()

    def _overlap(self, text: str, at: int) -> int:
        """Length of the longest end of the text that begins a start."""
        longest = min(max(map(len, self.starts)) - 1, len(text) - at)
        for length in range(longest, 0, -1):
            if any(start.startswith(text[-length:]) for start in self.starts):
                return length
        return 0

    def _literal(self, literal: str, text: str, at: int) -> int:
        """Where that literal ends, if it is there; ``WAIT`` if it may be; ``at`` if it is not."""
        if text.startswith(literal, at):
            return at + len(literal)
        return WAIT if literal.startswith(text[at : at + len(literal)]) else at

    def _begin_call(self, name: str) -> None:
        """It is a call: nothing of it is text."""
        self._held = None
        self._between, self._may_separate = "", True
        self._emit(CallDelta(self._num_calls, self._new_id(), name, ""))
        self._num_calls += 1

    def _add_arguments(self, pieces: list[str]) -> None:
        """To the call that began last."""
        arguments = "".join(pieces)
        if arguments:
            self._emit(CallDelta(self._num_calls - 1, "", "", arguments))

    def _emit(self, delta: CallDelta) -> None:
        if delta.index == 0 or self._parallel:
            self._calls.append(delta)
