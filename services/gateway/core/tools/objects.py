"""Families whose calls are objects of JSON."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from services.gateway.core.tools.call_object import CallObject
from services.gateway.core.tools.parser import Step, ToolParser


class ObjectParser(ToolParser):
    """Reads ``{"name": ..., "arguments": {...}}`` where the family says that one begins."""

    def __init__(self, names: AbstractSet[str], new_id: Callable[[], str], *, parallel: bool) -> None:
        super().__init__(names, new_id, parallel=parallel)
        self._object = CallObject(names)

    @abstractmethod
    def _behind_object(self) -> Step:
        """A call was read: what reads on."""

    def _begin_object(self) -> Step:
        self._object = CallObject(self.names)
        return self._read_object

    def _read_object(self, text: str, at: int) -> int:
        call, pieces = self._object, list[str]()
        was_complete = call.complete and call.is_call
        at = call.feed(text, at, pieces)
        if call.is_call:
            if self._held is not None:
                self._begin_call(call.name)
            self._add_arguments(pieces)
            self.num_complete += call.complete and not was_complete
        if call.status == "broken" and self._held is not None:
            return self._fail(at)
        if call.status != "open":
            # What is broken behind the arguments changes nothing of them.
            self._step = self._behind_object() if call.complete else self._read_text
        return at
