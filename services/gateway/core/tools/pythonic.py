"""Calls as Python writes them: ``[f(a=1, b="x"), g()]`` (Llama 3.2 and 4)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from services.gateway.core.tools.literals import PythonScanner
from services.gateway.core.tools.parser import Step, ToolParser

MAX_KEYWORD_CHARACTERS = 256
_NAME = re.compile(r"[a-zA-Z0-9_.-]*")
_KEYWORD = re.compile(r"\w*")


class PythonicParser(ToolParser):
    """``ToolParser``. Arguments have keywords, and literals as values. What tells a call is a function's name and
    ``(``, then a keyword and ``=``, or ``)``."""

    starts = ("[",)

    def __init__(self, names: AbstractSet[str], new_id: Callable[[], str], *, parallel: bool) -> None:
        super().__init__(names, new_id, parallel=parallel)
        self._word: list[str] = []
        """A name or keyword, as far as it came."""
        self._name = ""
        self._num_arguments = 0
        self._scanner = PythonScanner()

    def _begin(self, start: str) -> Step:  # noqa: ARG002 - there is one
        self._word = []
        return self._read_name

    def _read_name(self, text: str, at: int) -> int:
        if text[at].isspace() and not self._word:
            return at + 1
        match = _NAME.match(text, at)
        assert match is not None
        end = match.end()
        self._word.append(match[0])
        if end == len(text):
            return end
        self._name, self._num_arguments = "".join(self._word), 0
        if text[end] != "(" or self._name not in self.names:
            return self._fail(end)
        self._step = self._read_argument
        return end + 1

    def _read_argument(self, text: str, at: int) -> int:
        """Behind ``(`` or a comma: a keyword, or the end of the call."""
        if text[at].isspace():
            return at + 1
        if text[at] == ")":
            return self._finish(at)
        if not (text[at].isidentifier()):
            return self._break(at)
        self._word, self._step = [], self._read_keyword
        return at

    def _read_keyword(self, text: str, at: int) -> int:
        match = _KEYWORD.match(text, at, at + MAX_KEYWORD_CHARACTERS - len("".join(self._word)))
        assert match is not None
        self._word = ["".join(self._word) + match[0]]
        if match.end() < len(text):
            self._step = self._read_equals
        return match.end()

    def _read_equals(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] != "=":
            return self._break(at)
        if self._held is not None:
            self._begin_call(self._name)
        keyword = json.dumps("".join(self._word), ensure_ascii=False)
        self._add_arguments([", " if self._num_arguments else "{", keyword, ": "])
        self._num_arguments += 1
        self._scanner, self._step = PythonScanner(), self._read_value
        return at + 1

    def _read_value(self, text: str, at: int) -> int:
        pieces: list[str] = []
        at = self._scanner.feed(text, at, pieces)
        self._add_arguments(pieces)
        if self._scanner.status == "done":
            self._step = self._read_behind_value
        return self._break(at) if self._scanner.status == "broken" else at

    def _read_behind_value(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] == ")":
            return self._finish(at)
        if text[at] != ",":
            return self._break(at)
        self._step = self._read_argument
        return at + 1

    def _finish(self, at: int) -> int:
        """A call's ``)``."""
        if self._held is not None:
            self._begin_call(self._name)
        self._add_arguments(["}" if self._num_arguments else "{}"])
        self.num_complete += 1
        self._step = self._read_behind_call
        return at + 1

    def _read_behind_call(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] == ",":
            self._begin_holding()
            self._word, self._step = [], self._read_name
            return at + 1
        self._step = self._read_text
        return at + 1 if text[at] == "]" else at

    def _break(self, at: int) -> int:
        """It is no call, or no whole one."""
        if self._held is not None:
            return self._fail(at)
        self._step = self._read_text
        return at
