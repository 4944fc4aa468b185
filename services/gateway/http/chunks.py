"""Answers of choices, streamed as chunks of choices: those of chats and completions. Chunks are prebuilt around the
text that changes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from services.gateway.core.tools.deltas import CallDelta
from services.gateway.http.asgi import DONE, error_events
from services.gateway.http.formats import AnswerFormat, ChoiceEnd, ChoiceEvents, ChoiceResult, Keep, TokenUsage
from shared.errors import BlitzError

_encode = msgspec.json.encode


def _usage_json(usage: TokenUsage) -> dict[str, Any]:
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return counts


def _usage_tail(usage: TokenUsage) -> bytes:
    """What ends an event that has the usage."""
    return b',"usage":' + _encode(_usage_json(usage)) + b"}\n\n"


class ChunkedFormat(AnswerFormat):
    """``AnswerFormat``: ``choices``, whole or in chunks."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    around_text: ClassVar[tuple[bytes, bytes]]
    """In a chunk's choice: what is before and behind its text, which is a JSON string."""
    opening: ClassVar[bytes] = b""
    """In the choice of a chunk that comes before those with text; empty: there is none."""

    def head(self, name: str) -> dict[str, Any]:
        reply = self.reply
        return {"id": reply.response_id, "object": name, "created": reply.created_s, "model": reply.model}

    def finish_reason(self, finish: ChoiceEnd) -> str:
        """As OpenAI and vLLM say it: a call of the function that the caller named ends with ``stop``."""
        return "stop" if self.reply.call_is_named and finish.reason == "tool_calls" else finish.reason

    def whole(self, results: Sequence[ChoiceResult], usage: TokenUsage) -> bytes:
        choices = [self.choice_json(index, result) for index, result in enumerate(results)]
        head, rest = self.head(self.whole_object), self.rest_json(results)
        return _encode({**head, "choices": choices, "usage": _usage_json(usage), **rest})

    def events(self, index: int, keep: Keep) -> ChunkFormat:  # noqa: ARG002 - chunks keep nothing
        return ChunkFormat(self, index)

    def closing(self, usage: TokenUsage) -> bytes:
        if not self.reply.include_usage:
            return DONE
        value = {**self.head(self.chunk_object), "choices": [], "usage": _usage_json(usage)}
        return b"data: " + _encode(value) + b"\n\n" + DONE

    def failure(self, error: BlitzError) -> bytes:
        return error_events(error)

    def rest_json(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:  # noqa: ARG002 - mostly nothing
        """What an answer that is not streamed has behind its usage."""
        return {}

    @abstractmethod
    def choice_json(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        """One choice of an answer that is not streamed."""


class ChunkFormat(ChoiceEvents):
    """Chunks of one choice."""

    def __init__(self, format_: ChunkedFormat, index: int) -> None:
        before, behind = format_.around_text
        head = b"data: " + _encode(format_.head(format_.chunk_object))[:-1] + b',"choices":[{"index":%d,' % index
        self._head = head
        self._prefix, self._closing = head + before, behind
        self._tail = b',"usage":null}\n\n' if format_.reply.include_usage else b"}\n\n"
        end = b',"logprobs":null,"finish_reason":null}]'
        self._plain_end = self._closing + end + self._tail
        self._opening = head + format_.opening + end if format_.opening else b""
        self._continuous_usage = format_.reply.continuous_usage
        self._finish_reason = format_.finish_reason

    def opening(self, usage: TokenUsage) -> bytes:
        if not self._opening:
            return b""
        return self._opening + (_usage_tail(usage) if self._continuous_usage else self._tail)

    def chunk(self, text: str) -> bytes:
        return self._prefix + _encode(text) + self._plain_end

    def full_chunk(
        self, text: str, logprobs: dict[str, Any] | None, finish: ChoiceEnd | None, usage: TokenUsage | None
    ) -> bytes:
        return self._event(_encode(text), logprobs, finish, usage)

    def call_chunk(
        self,
        calls: Sequence[CallDelta],
        text: str,
        logprobs: dict[str, Any] | None,
        finish: ChoiceEnd | None,
        usage: TokenUsage | None,
    ) -> bytes:
        shown = _encode([_delta_json(delta) for delta in _one_per_call(calls)])
        content = (_encode(text) if text else b"null") + b',"tool_calls":' + shown
        return self._event(content, logprobs, finish, usage)

    def thought_chunk(self, thought: str, logprobs: dict[str, Any] | None, usage: TokenUsage | None) -> bytes:
        # Clients read either: DeepSeek's and SGLang's name, vLLM's and OpenRouter's.
        shown = _encode(thought)
        delta = b'%b"delta":{"reasoning_content":%b,"reasoning":%b}' % (self._head, shown, shown)
        return delta + self._rest(logprobs, None, usage)

    def _event(
        self, content: bytes, logprobs: dict[str, Any] | None, finish: ChoiceEnd | None, usage: TokenUsage | None
    ) -> bytes:
        return self._prefix + content + self._closing + self._rest(logprobs, finish, usage)

    def _rest(self, logprobs: dict[str, Any] | None, finish: ChoiceEnd | None, usage: TokenUsage | None) -> bytes:
        """Behind a delta."""
        reason = _encode(self._finish_reason(finish)) if finish is not None else b"null"
        rest = b',"logprobs":' + _encode(logprobs) + b',"finish_reason":' + reason + b"}]"
        return rest + (_usage_tail(usage) if usage is not None else self._tail)


def _one_per_call(calls: Sequence[CallDelta]) -> list[CallDelta]:
    """The parts of a call as one. OpenAI's client loses what is in a call's second entry of its first event."""
    joined: dict[int, CallDelta] = {}
    for delta in calls:
        begun = joined.get(delta.index)
        joined[delta.index] = delta if begun is None else replace(begun, arguments=begun.arguments + delta.arguments)
    return list(joined.values())


def _delta_json(delta: CallDelta) -> dict[str, Any]:
    if not delta.name:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}
