"""A call as an object of JSON: ``{"name": ..., "arguments": {...}}``, in any order, read as it comes."""

from __future__ import annotations

import json
from collections.abc import Set as AbstractSet
from typing import Literal

from services.gateway.core.tools.literals import JsonScanner, Status

State = Literal["open", "first_key", "key", "in_key", "colon", "value", "in_value", "behind"]

MAX_STRING_CHARACTERS = 512
"""Of the JSON of a field's name or of a function's."""

_BLANK = " \t\n\r"
_ARGUMENTS = frozenset({"arguments", "parameters"})
_FIELDS = frozenset({"name", "type", "id", *_ARGUMENTS})
"""An object with other fields is no call: so it is known soon of an object that the model shows."""
_FOLLOWING: dict[tuple[State, str], State] = {
    ("open", "{"): "first_key",
    ("colon", ":"): "value",
    ("behind", ","): "key",
}


class CallObject:
    """One object, from its ``{`` on. ``names``: the functions that may be called.

    It ``is_call`` once the function is known and its arguments have begun as an object, and will not become text then.
    It is broken where it is no JSON, where its function is none of them, and by arguments that are no object.
    """

    __slots__ = (
        "_early",
        "_field",
        "_names",
        "_scanner",
        "_scratch",
        "_state",
        "complete",
        "is_call",
        "name",
        "status",
    )

    def __init__(self, names: AbstractSet[str]) -> None:
        self.status: Status = "open"
        self.name = ""
        """Of the function; empty: not known yet."""
        self.is_call = False
        self.complete = False
        """All arguments are there."""
        self._names = names
        self._state: State = "open"
        self._field = ""
        self._scanner = JsonScanner()
        self._scratch: list[str] = []
        """The JSON of a field's or function's name, as far as it came."""
        self._early: list[str] | None = None
        """Arguments that came before the name."""

    def feed(self, text: str, at: int, out: list[str]) -> int:
        """Read from ``text[at]`` on, add arguments to ``out`` once it ``is_call``, and return where the reading ended:
        behind the object, before the character that breaks it, or at the end of the text."""
        while at < len(text) and self.status == "open":
            if self._state == "in_key" or (self._state == "in_value" and self._field == "name"):
                at = self._read_string(text, at, out)
            elif self._state == "in_value":
                at = self._read_value(text, at, out)
            elif text[at] in _BLANK:
                at += 1
            else:
                at = self._structure(text[at], at)
        return at

    def _structure(self, character: str, at: int) -> int:
        following = _FOLLOWING.get((self._state, character))
        if following is not None:
            self._state = following
            return at + 1
        if character == "}" and self._state in ("first_key", "behind"):
            self.status = "done" if self.complete and self.is_call else "broken"
            return at + 1
        if self._state in ("first_key", "key") and character == '"':
            self._begin("in_key")
        elif self._state == "value" and character in self._openings():
            self._begin("in_value")
        else:
            self.status = "broken"
        # The scanner reads the first character, too.
        return at

    def _openings(self) -> str:
        """What the value of the field may begin with."""
        if self._field in _ARGUMENTS:
            return "{"
        return '"' if self._field == "name" else '"{[-0123456789tfn'

    def _begin(self, state: State) -> None:
        self._state = state
        self._scanner = JsonScanner()
        self._scratch = []
        if state == "in_value" and self._field in _ARGUMENTS and not self.complete:
            if self.name:
                self.is_call = True
            else:
                self._early = []

    def _read_string(self, text: str, at: int, out: list[str]) -> int:
        left = MAX_STRING_CHARACTERS - sum(map(len, self._scratch))
        piece = text[at : at + left]
        at += self._scanner.feed(piece, 0, self._scratch)
        if self._scanner.status == "done":
            self._take_string(json.loads("".join(self._scratch)), out)
        elif self._scanner.status == "broken" or len(piece) == left:
            self.status = "broken"
        else:
            self._scratch = ["".join(self._scratch)]
        return at

    def _take_string(self, value: str, out: list[str]) -> None:
        if self._state == "in_key":
            self._field, self._state = value, "colon"
            if value not in _FIELDS:
                self.status = "broken"
            return
        self._state = "behind"
        if self.name:
            return
        if value not in self._names:
            self.status = "broken"
            return
        self.name = value
        if self._early is not None:
            out += self._early
            self._early, self.is_call = None, True

    def _read_value(self, text: str, at: int, out: list[str]) -> int:
        own = self._field in _ARGUMENTS and not self.complete
        sink = [] if not own else out if self._early is None else self._early
        at = self._scanner.feed(text, at, sink)
        self.status = "broken" if self._scanner.status == "broken" else "open"
        if self._scanner.status == "done":
            self._state = "behind"
            self.complete = self.complete or own
        return at
