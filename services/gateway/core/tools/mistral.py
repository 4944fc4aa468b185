"""Mistral: ``[TOOL_CALLS]`` and a list of calls, or each call behind one of its own: ``[TOOL_CALLS]f{...}``, with
``[CALL_ID]`` and an id, and ``[ARGS]``, or without."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from services.gateway.core.tools.literals import JsonScanner
from services.gateway.core.tools.objects import ObjectParser
from services.gateway.core.tools.parser import WAIT, Step

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[a-zA-Z0-9_.-]*")
_BLANKS_OR_NAME = re.compile(r"[a-zA-Z0-9_.\s-]*")


class MistralParser(ObjectParser):
    """``ToolParser``. Ids are of nine letters and digits: the templates take no others. One that the model gives is not
    used."""

    starts = (_CALLS,)
    marks = (_CALLS, _ID, _ARGUMENTS)
    id_prefix = ""
    id_alphabet = string.ascii_letters + string.digits
    id_length = 9

    @classmethod
    def forced(cls, mark: Callable[[str], str], *, parallel: bool) -> str:
        more = ' (", " call)*' if parallel else ""
        return f'start: {mark(_CALLS)} "[" call{more} "]"'

    def __init__(self, names: AbstractSet[str], new_id: Callable[[], str], *, parallel: bool) -> None:
        super().__init__(names, new_id, parallel=parallel)
        self._name: list[str] = []
        self._scanner = JsonScanner()

    def _begin(self, start: str) -> Step:  # noqa: ARG002 - there is one
        return self._read_begin

    def _behind_object(self) -> Step:
        return self._read_behind_item

    def _expects(self, mark: str) -> bool:
        return mark != _CALLS and self._step in (self._read_name, self._read_head, self._read_id)

    def _read_begin(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] == "[":
            self._step = self._read_item
            return at + 1
        self._name, self._step = [], self._read_name
        return at

    def _read_item(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] != "{":
            return self._fail(at)
        self._step = self._begin_object()
        return at

    def _read_behind_item(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] == ",":
            self._begin_holding()
            self._step = self._read_item
            return at + 1
        self._step = self._read_text
        return at + 1 if text[at] == "]" else at

    def _read_name(self, text: str, at: int) -> int:
        match = _NAME.match(text, at)
        assert match is not None
        self._name.append(match[0])
        if match.end() < len(text):
            if "".join(self._name) not in self.names:
                return self._fail(match.end())
            self._step = self._read_head
        return match.end()

    def _read_head(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] == "{":
            self._begin_call("".join(self._name))
            self._scanner, self._step = JsonScanner(), self._read_arguments
            return at
        for literal in (_ID, _ARGUMENTS):
            end = self._literal(literal, text, at)
            if end == WAIT:
                return WAIT
            if end > at:
                self._step = self._read_id if literal == _ID else self._read_head
                return end
        return self._fail(at)

    def _read_id(self, text: str, at: int) -> int:
        match = _BLANKS_OR_NAME.match(text, at)
        assert match is not None
        if match.end() < len(text):
            self._step = self._read_head
        return match.end()

    def _read_arguments(self, text: str, at: int) -> int:
        pieces: list[str] = []
        at = self._scanner.feed(text, at, pieces)
        self._add_arguments(pieces)
        self.num_complete += self._scanner.status == "done"
        if self._scanner.status != "open":
            self._step = self._read_text
        return at
