"""Hermes and Qwen: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, one behind the other."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.core.tools.objects import ObjectParser
from services.gateway.core.tools.parser import WAIT, Step

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesParser(ObjectParser):
    """``ToolParser``. A call counts without its end, too."""

    starts = (_BEGIN,)
    marks = (_BEGIN, _END)

    @classmethod
    def forced(cls, mark: Callable[[str], str], *, parallel: bool) -> str:
        more = ' ("\\n" one)*' if parallel else ""
        return f'start: one{more}\none: {mark(_BEGIN)} "\\n" call "\\n" {mark(_END)}'

    def _begin(self, start: str) -> Step:  # noqa: ARG002 - there is one
        return self._begin_object()

    def _behind_object(self) -> Step:
        return self._read_end

    def _expects(self, mark: str) -> bool:
        return mark == _END and self._step == self._read_end

    def _read_end(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        end = self._literal(_END, text, at)
        if end != WAIT:
            self._step = self._read_text
        return end
