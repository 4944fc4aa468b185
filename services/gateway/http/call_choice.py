"""Choices of an answer in which the model may call functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.core.call_output import CallOutput
from services.gateway.core.tools.deltas import CallDelta
from services.gateway.http.choice import TOKEN_BYTES, Choice, StreamedChoice, WholeChoice
from services.gateway.http.formats import ChoiceEnd, MadeCall, in_order


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
        elif self._unopened:
            self._write_opening()

    def _emit_last(self, text: str, entry: Any, finish: ChoiceEnd) -> None:
        calls = self._output.take_calls()
        if calls:
            self._write_calls(calls, text, entry, finish)
        else:
            super()._emit_last(text, entry, finish)

    def _write_calls(self, calls: Sequence[CallDelta], text: str, entry: Any, finish: ChoiceEnd | None) -> None:
        if self._unopened:
            self._write_opening()
        chunk = self._events.call_chunk(calls, text, self._joined(entry), finish, self._usage())
        self._buffer.write(chunk)


@dataclass(slots=True)
class _Call:
    first: CallDelta
    arguments: list[str]
    text_before: int


class WholeCallingChoice(CallingChoice, WholeChoice):
    """Collects the text and the calls."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._calls: list[_Call] = []
        self._num_characters = 0

    @property
    def calls(self) -> tuple[MadeCall, ...]:
        return tuple(
            MadeCall(call.first.call_id, call.first.name, "".join(call.arguments), call.text_before)
            for call in self._calls
        )

    def _emit(self, text: str, entry: Any) -> None:
        for piece in in_order(self._output.take_calls(), text):
            if isinstance(piece, str):
                self._num_characters += len(piece)
                continue
            self._buffer.collect(TOKEN_BYTES + len(piece.arguments))
            if piece.name:
                self._calls.append(_Call(piece, [], self._num_characters))
            else:
                self._calls[-1].arguments.append(piece.arguments)
        super()._emit(text, entry)
