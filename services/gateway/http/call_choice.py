"""Choices of an answer in which the model may call functions."""

from __future__ import annotations

from typing import Any

from services.gateway.core.call_output import CallOutput
from services.gateway.core.tools.deltas import CallDelta
from services.gateway.http.choice import TOKEN_BYTES, Choice, StreamedChoice, WholeChoice
from services.gateway.http.formats import AnswerFormat


class CallingChoice(Choice):
    """What both kinds share: the output, and what it ends with."""

    _output: CallOutput

    def _reason(self, finish_reason: str) -> str:
        return "tool_calls" if finish_reason == "stop" and self._output.called else finish_reason


class StreamedCallingChoice(CallingChoice, StreamedChoice):
    """One event per token of text; of a token inside of a call if there is something to say."""

    def _emit(self, text: str, entry: Any) -> None:
        calls = self._output.take_calls()
        if calls:
            self._write_calls(calls, text, entry, None)
        elif text or entry is not None or self._output.in_text:
            super()._emit(text, entry)
        elif self._opening:
            self._buffer.write(self._opened(b""))

    def _emit_last(self, text: str, entry: Any, finish_reason: str) -> None:
        calls = self._output.take_calls()
        if calls:
            self._write_calls(calls, text, entry, finish_reason)
        else:
            super()._emit_last(text, entry, finish_reason)

    def _write_calls(self, calls: list[CallDelta], text: str, entry: Any, finish_reason: str | None) -> None:
        shown = [_delta_json(delta) for delta in calls]
        chunk = self._format.call_chunk(shown, text, self._joined(entry), finish_reason, self._usage())
        self._buffer.write(self._opened(chunk))


class WholeCallingChoice(CallingChoice, WholeChoice):
    """Collects the text and the calls."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._calls: list[tuple[CallDelta, list[str]]] = []
        """The first part of each, and the pieces of its arguments."""

    def choice_json(self, format_: AnswerFormat, index: int) -> dict[str, Any]:
        choice = super().choice_json(format_, index)
        if self._calls:
            message = choice["message"]
            message["content"] = self.text or None
            message["tool_calls"] = [
                {
                    "id": first.call_id,
                    "type": "function",
                    "function": {"name": first.name, "arguments": "".join(pieces)},
                }
                for first, pieces in self._calls
            ]
        return choice

    def _emit(self, text: str, entry: Any) -> None:
        for delta in self._output.take_calls():
            self._buffer.collect(TOKEN_BYTES + len(delta.arguments))
            if delta.name:
                self._calls.append((delta, []))
            else:
                self._calls[-1][1].append(delta.arguments)
        super()._emit(text, entry)


def _delta_json(delta: CallDelta) -> dict[str, Any]:
    if not delta.name:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}
