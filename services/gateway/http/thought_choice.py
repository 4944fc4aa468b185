"""Choices of an answer that the model may think about first."""

from __future__ import annotations

from typing import Any

from services.gateway.core.thinking_output import ThinkingOutput
from services.gateway.http.call_choice import CallingChoice, StreamedCallingChoice, WholeCallingChoice
from services.gateway.http.choice import TOKEN_BYTES
from services.gateway.http.formats import ChoiceEnd, TokenUsage


class ThinkingChoice(CallingChoice):
    """What both kinds share: the output, and how long the thought is."""

    _output: ThinkingOutput

    @property
    def num_thought_tokens(self) -> int:
        return self._output.num_thought_tokens


class StreamedThinkingChoice(ThinkingChoice, StreamedCallingChoice):
    """One event per token of a thought that adds something to it. Two of a token that also has what is behind it, or
    is the last."""

    def _emit(self, text: str, entry: Any) -> None:
        super()._emit(text, self._emit_thought(entry))

    def _emit_last(self, text: str, entry: Any, finish: ChoiceEnd) -> None:
        super()._emit_last(text, self._emit_thought(entry), finish)

    def _emit_thought(self, entry: Any) -> Any:
        """The log-probabilities that are left to say."""
        thought = self._output.take_thought()
        if not thought:
            return entry
        if self._unopened:
            self._write_opening()
        self._buffer.write(self._events.thought_chunk(thought, self._joined(entry), self._usage()))
        return None

    def _usage(self) -> TokenUsage | None:
        usage = super()._usage()
        return usage._replace(reasoning_tokens=self.num_thought_tokens) if usage is not None else None


class WholeThinkingChoice(ThinkingChoice, WholeCallingChoice):
    """Collects the thought, the text and the calls."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._thoughts: list[str] = []

    @property
    def thought(self) -> str:
        return "".join(self._thoughts)

    def _emit(self, text: str, entry: Any) -> None:
        thought = self._output.take_thought()
        if thought:
            self._thoughts.append(thought)
            self._buffer.collect(TOKEN_BYTES + len(thought))
        super()._emit(text, entry)
