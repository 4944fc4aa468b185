"""JSON and Python literals, read as they come: what is valid goes on as JSON, up to where it breaks.

Each character is looked at once. Nothing is kept but the open brackets.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar, Final, Literal

MAX_DEPTH = 128
"""Of brackets in each other."""

Status = Literal["open", "done", "broken"]
State = Literal[
    "value", "first_item", "item", "first_key", "key", "colon", "behind", "string", "escape", "digits", "number", "word"
]

_BLANK: Final = " \t\n\r"
_BLANKS = re.compile(r"[ \t\n\r]*")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_NUMBER: Final = {
    "-": {"0": "0", "d": "d"},
    "0": {".": ".", "e": "e"},
    "d": {"0": "d", "d": "d", ".": ".", "e": "e"},
    ".": {"0": "f", "d": "f"},
    "f": {"0": "f", "d": "f", "e": "e"},
    "e": {"0": "x", "d": "x", "-": "s", "+": "s"},
    "s": {"0": "x", "d": "x"},
    "x": {"0": "x", "d": "x"},
}
"""A number's grammar: what was read last, and what may follow. d: digits, f: fraction, e: the letter, x: exponent."""
_WHOLE_NUMBERS: Final = frozenset("0dfx")


def _number_character(character: str) -> str:
    if character in "123456789":
        return "d"
    return "e" if character == "E" else character


class JsonScanner:
    """One JSON value. Control characters inside of a string, which models write, come out escaped."""

    quotes: ClassVar[str] = '"'
    words: ClassVar[dict[str, str]] = {"true": "true", "false": "false", "null": "null"}
    comma, colon = ",", ":"
    blanks = True
    """Those between tokens go on; else they do not."""
    trailing_comma = False
    """Behind the last item."""
    plain: ClassVar[dict[str, re.Pattern[str]]] = {'"': re.compile(r'[^"\\\x00-\x1f]+')}
    """By quote: what goes on as it is inside of it."""

    __slots__ = ("_closers", "_digits", "_in_key", "_number", "_quote", "_state", "_wanted_digits", "_word", "status")

    def __init__(self) -> None:
        self.status: Status = "open"
        self._state: State = "value"
        self._closers: list[str] = []
        self._quote = ""
        self._in_key = False
        self._number = ""
        self._word = ""
        self._digits = ""
        self._wanted_digits = 0

    def feed(self, text: str, at: int, out: list[str]) -> int:
        """Read from ``text[at]`` on, add JSON to ``out``, and return where the reading ended: behind the value, before
        the character that breaks it, or at the end of the text."""
        while at < len(text) and self.status == "open":
            if self._state == "string":
                at = self._string(text, at, out)
            elif self._state in ("escape", "digits"):
                self._escaped(text[at], out)
                at += self.status == "open"
            elif self._state == "number":
                at = self._continue_number(text, at, out)
            elif self._state == "word":
                at = self._continue_word(text, at, out)
            elif text[at] in _BLANK:
                match = _BLANKS.match(text, at)
                assert match is not None
                if self.blanks:
                    out.append(match[0])
                at = match.end()
            else:
                at = self._structure(text[at], at, out)
        return at

    def _structure(self, character: str, at: int, out: list[str]) -> int:
        state = self._state
        if state in ("first_key", "key"):
            if character in self.quotes:
                self._comma(out)
                self._begin_string(character, out, in_key=True)
            elif character == "}" and (state == "first_key" or self.trailing_comma):
                self._close(out)
            else:
                return self._break(at)
        elif state == "colon":
            if character != ":":
                return self._break(at)
            out.append(self.colon)
            self._state = "value"
        elif state == "behind":
            if character == self._closers[-1]:
                self._close(out)
            elif character == ",":
                self._state = "key" if self._closers[-1] == "}" else "item"
                if not self.trailing_comma:
                    out.append(self.comma)
            else:
                return self._break(at)
        elif character == "]" and (state == "first_item" or (state == "item" and self.trailing_comma)):
            self._close(out)
        else:
            return self._begin_value(character, at, out)
        return at + 1

    def _begin_value(self, character: str, at: int, out: list[str]) -> int:
        opening = character in "{["
        if opening and len(self._closers) == MAX_DEPTH:
            return self._break(at)
        known = opening or character in self.quotes or character in "-0123456789"
        if not known and not self._continues(character):
            return self._break(at)
        self._comma(out)
        if opening:
            out.append(character)
            self._closers.append("}" if character == "{" else "]")
            self._state = "first_key" if character == "{" else "first_item"
        elif character in self.quotes:
            self._begin_string(character, out, in_key=False)
        elif known:
            out.append(character)
            self._number, self._state = _number_character(character), "number"
        else:
            self._state = "word"
            return self._continue_word(character, 0, out) + at
        return at + 1

    def _comma(self, out: list[str]) -> None:
        """The comma before an item or key, if it may have been behind the last one."""
        if self.trailing_comma and self._state in ("item", "key"):
            out.append(self.comma)

    def _begin_string(self, quote: str, out: list[str], *, in_key: bool) -> None:
        out.append('"')
        self._quote, self._in_key, self._state = quote, in_key, "string"

    def _string(self, text: str, at: int, out: list[str]) -> int:
        match = self.plain[self._quote].match(text, at)
        if match is not None:
            out.append(match[0])
            return match.end()
        character = text[at]
        if character == self._quote:
            out.append('"')
            if self._in_key:
                self._state = "colon"
            else:
                self._end_value()
        elif character == "\\":
            self._state = "escape"
        else:
            out.append(json.dumps(character)[1:-1])
        return at + 1

    def _escaped(self, character: str, out: list[str]) -> None:
        """A character behind a backslash."""
        if self._state == "digits":
            self._digit(character, out)
        elif character == "u":
            self._begin_digits(4)
        elif character in '"\\/bfnrt':
            out.append("\\" + character)
            self._state = "string"
        else:
            self.status = "broken"

    def _begin_digits(self, count: int) -> None:
        self._digits, self._wanted_digits, self._state = "", count, "digits"

    def _digit(self, character: str, out: list[str]) -> None:
        if character not in _HEX:
            self.status = "broken"
            return
        self._digits += character
        if len(self._digits) < self._wanted_digits:
            return
        code = int(self._digits, 16)
        if code > 0x10FFFF:
            self.status = "broken"
            return
        out.append("\\u" + self._digits if self._wanted_digits == 4 else json.dumps(chr(code))[1:-1])
        self._state = "string"

    def _continue_number(self, text: str, at: int, out: list[str]) -> int:
        following = _NUMBER[self._number].get(_number_character(text[at]))
        if following is not None:
            out.append(text[at])
            self._number = following
            return at + 1
        if self._number not in _WHOLE_NUMBERS:
            return self._break(at)
        self._end_value()
        return at

    def _continue_word(self, text: str, at: int, out: list[str]) -> int:
        word = self._word + text[at]
        known = self._continues(word)
        if not known:
            return self._break(at)
        out.append(self.words[known][len(word) - 1])
        self._word = word
        if word == known:
            self._word = ""
            self._end_value()
        return at + 1

    def _continues(self, word: str) -> str:
        """The word that begins so; no two begin alike, and what stands for one is as long."""
        return next((known for known in self.words if known.startswith(word)), "")

    def _close(self, out: list[str]) -> None:
        out.append(self._closers.pop())
        self._end_value()

    def _end_value(self) -> None:
        if self._closers:
            self._state = "behind"
        else:
            self.status = "done"

    def _break(self, at: int) -> int:
        self.status = "broken"
        return at


class PythonScanner(JsonScanner):
    """One Python literal: strings, numbers, words, lists and dictionaries with strings as keys, as JSON.

    Without: tuples, sets, bytes, prefixes and triple quotes of strings, names of characters, octal escapes.
    """

    quotes = "\"'"
    words: ClassVar[dict[str, str]] = {
        "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
    }  # fmt: skip
    comma, colon = ", ", ": "
    blanks = False
    trailing_comma = True
    plain: ClassVar[dict[str, re.Pattern[str]]] = {
        '"': re.compile(r'[^"\\\x00-\x1f]+'),
        "'": re.compile(r"[^'\"\\\x00-\x1f]+"),
    }

    __slots__ = ()

    def _escaped(self, character: str, out: list[str]) -> None:
        if self._state == "digits":
            self._digit(character, out)
        elif character in "xuU":
            self._begin_digits({"x": 2, "u": 4, "U": 8}[character])
        elif character == "N":
            self.status = "broken"
        else:
            self._state = "string"
            if character == "\n":
                return
            if character in '"\\bfnrt':
                out.append("\\" + character)
            elif character in "'av":
                out.append({"'": "'", "a": "\\u0007", "v": "\\u000b"}[character])
            else:
                # Python leaves the backslash of an escape that it does not know.
                out.append("\\\\" + json.dumps(character, ensure_ascii=False)[1:-1])
