"""Llama 3: ``{"name": "f", "parameters": {...}}``, behind ``<|python_tag|>`` or not, several with ``;`` between."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.core.tools.objects import ObjectParser
from services.gateway.core.tools.parser import Step

_TAG = "<|python_tag|>"


class LlamaParser(ObjectParser):
    """``ToolParser``. Without a tag any object in the text may be a call; what tells it is its first field."""

    starts = (_TAG, "{")
    marks = (_TAG,)
    separators = ";"
    arguments_field = "parameters"

    @classmethod
    def forced(cls, mark: Callable[[str], str], *, parallel: bool) -> str:  # noqa: ARG003 - without one it is the same
        return 'start: call ("; " call)*' if parallel else "start: call"

    def _begin(self, start: str) -> Step:
        if start == _TAG:
            return self._read_tagged
        step = self._begin_object()
        self._object.feed(start, 0, [])
        return step

    def _behind_object(self) -> Step:
        return self._read_text

    def _read_tagged(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] != "{":
            return self._fail(at)
        self._step = self._begin_object()
        return at
