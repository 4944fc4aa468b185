"""Events of an answer that is made of parts, one behind the other: a thought, texts and calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from services.gateway.core.tools.deltas import CallDelta
from services.gateway.http.formats import ChoiceEnd, ChoiceEvents, TokenUsage, in_order


class PartEvents(ChoiceEvents):
    """Which part is open. A part begins with the first thing there is of it, so tokens without text have no event."""

    def __init__(self) -> None:
        self.opened = False
        """The opening has been written."""
        self.end: ChoiceEnd | None = None
        """None: it goes on."""
        self._open: Literal["thought", "text", "call"] | None = None

    def opening(self, usage: TokenUsage) -> bytes:
        self.opened = True
        return self._begin_answer(usage)

    def chunk(self, text: str) -> bytes:
        if self._open == "text":
            return self._add_text(text) if text else b""
        if not text:
            return b""
        closed = self._close(whole=True)
        self._open = "text"
        return closed + self._begin_text() + self._add_text(text)

    def full_chunk(
        self,
        text: str,
        logprobs: dict[str, Any] | None,  # noqa: ARG002 - answers of parts have none
        finish: ChoiceEnd | None,
        usage: TokenUsage | None,  # noqa: ARG002 - they have it at their ends
    ) -> bytes:
        events = self.chunk(text)
        return events if finish is None else events + self._finished(finish)

    def call_chunk(
        self,
        calls: Sequence[CallDelta],
        text: str,
        logprobs: dict[str, Any] | None,  # noqa: ARG002
        finish: ChoiceEnd | None,
        usage: TokenUsage | None,  # noqa: ARG002
    ) -> bytes:
        events = b"".join(
            self.chunk(piece) if isinstance(piece, str) else self._call(piece) for piece in in_order(calls, text)
        )
        return events if finish is None else events + self._finished(finish)

    def thought_chunk(
        self,
        thought: str,
        logprobs: dict[str, Any] | None,  # noqa: ARG002
        usage: TokenUsage | None,  # noqa: ARG002
    ) -> bytes:
        if self._open == "thought":
            return self._add_thought(thought)
        self._open = "thought"
        return self._begin_thought() + self._add_thought(thought)

    def _call(self, delta: CallDelta) -> bytes:
        if not delta.name:
            return self._add_arguments(delta.arguments)
        closed = self._close(whole=True)
        self._open = "call"
        return closed + self._begin_call(delta)

    def _finished(self, end: ChoiceEnd) -> bytes:
        self.end = end
        # What the model was writing when it had to end is not whole.
        return self._close(whole=end.reason != "length")

    def _close(self, *, whole: bool) -> bytes:
        open_, self._open = self._open, None
        match open_:
            case "thought":
                return self._end_thought(whole=whole)
            case "text":
                return self._end_text(whole=whole)
            case "call":
                return self._end_call(whole=whole)
        return b""

    @abstractmethod
    def _begin_answer(self, usage: TokenUsage) -> bytes:
        """Before all parts."""

    @abstractmethod
    def _begin_thought(self) -> bytes:
        """The thought, which is the first part."""

    @abstractmethod
    def _add_thought(self, thought: str) -> bytes:
        """To the thought that is open."""

    @abstractmethod
    def _end_thought(self, *, whole: bool) -> bytes:
        """``whole``: it was not cut off."""

    @abstractmethod
    def _begin_text(self) -> bytes:
        """A part of text."""

    @abstractmethod
    def _add_text(self, text: str) -> bytes:
        """To the part of text that is open: the hot path."""

    @abstractmethod
    def _end_text(self, *, whole: bool) -> bytes:
        """``whole``: it was not cut off."""

    @abstractmethod
    def _begin_call(self, delta: CallDelta) -> bytes:
        """A call, of which that is the first part."""

    @abstractmethod
    def _add_arguments(self, arguments: str) -> bytes:
        """To the call that began last."""

    @abstractmethod
    def _end_call(self, *, whole: bool) -> bytes:
        """``whole``: it was not cut off."""
