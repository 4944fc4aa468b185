"""Answers of ``POST /v1/messages``: a message of blocks, whole and as Anthropic's events; and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.core.tools.deltas import CallDelta
from services.gateway.http.formats import (
    AnswerFormat,
    ChoiceEnd,
    ChoiceResult,
    Keep,
    MadeCall,
    MadeThought,
    Reply,
    TokenUsage,
)
from services.gateway.http.part_events import PartEvents
from shared.errors import BlitzError

_encode = msgspec.json.encode

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))


def _usage_json(usage: TokenUsage) -> dict[str, int]:
    """Anthropic's input tokens are those that were not in the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop_json(end: ChoiceEnd) -> dict[str, Any]:
    reason = _STOP_REASONS.get(end.reason)
    if reason is None:
        reason = "end_turn" if end.stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": end.stop_string}


class AnthropicErrors:
    """``ErrorForm``: ``{"type": "error", "error": {"type", "message"}}``."""

    request_id_headers: tuple[bytes, ...] = (b"request-id", b"x-request-id")

    def body(self, error: BlitzError) -> bytes:
        other = "invalid_request_error" if error.http_status < 500 else "api_error"
        kind = _ERROR_TYPES.get(error.http_status, other)
        # There is no other place for the parameter.
        named = error.param is None or error.param in error.message
        message = error.message if named else f"{error.param}: {error.message}"
        return _encode({"type": "error", "error": {"type": kind, "message": message}})

    def events(self, error: BlitzError) -> bytes:
        return b"event: error\ndata: " + self.body(error) + b"\n\n"


class MessageFormat(AnswerFormat):
    """``AnswerFormat``: a message."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._events = MessageEvents(self)

    def message_json(self, content: list[Any], stop: dict[str, Any], usage: TokenUsage) -> dict[str, Any]:
        """The message with these blocks."""
        head = {"id": self.reply.response_id, "type": "message", "role": "assistant", "model": self.reply.model}
        return {**head, "content": content, **stop, "usage": _usage_json(usage)}

    def whole(self, results: Sequence[ChoiceResult], usage: TokenUsage) -> bytes:
        [result] = results
        content = [_block(part) for part in result.parts()]
        return _encode(self.message_json(content, _stop_json(result.finish), usage))

    def events(self, index: int, keep: Keep) -> MessageEvents:  # noqa: ARG002 - one answer, which keeps nothing
        return self._events

    def closing(self, usage: TokenUsage) -> bytes:
        assert self._events.end is not None
        delta = {"delta": _stop_json(self._events.end), "usage": _usage_json(usage)}
        return _event("message_delta", delta) + _event("message_stop", {})

    def failure(self, error: BlitzError) -> bytes:
        return AnthropicErrors().events(error)


def _block(part: MadeThought | str | MadeCall) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, MadeThought):
        return _thinking_block(part.text)
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _arguments(part.arguments)}


def _thinking_block(text: str) -> dict[str, Any]:
    """Nobody checks who wrote it, so its signature is empty."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _arguments(arguments: str) -> dict[str, Any]:
    """An object, whatever the model wrote: there is no other place for what is none."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class MessageEvents(PartEvents):
    """Blocks as they come."""

    def __init__(self, format_: MessageFormat) -> None:
        super().__init__()
        self._format = format_
        self._index = -1
        self._text_head = b""

    def _begin_answer(self, usage: TokenUsage) -> bytes:
        stop = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"message": self._format.message_json([], stop, usage)})

    def _begin_block(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", {"index": self._index, "content_block": block})

    def _begin_thought(self) -> bytes:
        return self._begin_block(_thinking_block(""))

    def _add_thought(self, thought: str) -> bytes:
        delta = {"type": "thinking_delta", "thinking": thought}
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _end_thought(self, *, whole: bool) -> bytes:  # noqa: ARG002 - blocks do not say so
        return _event("content_block_stop", {"index": self._index})

    def _begin_text(self) -> bytes:
        begun = self._begin_block({"type": "text", "text": ""})
        self._text_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":' % self._index
        )
        return begun

    def _add_text(self, text: str) -> bytes:
        return self._text_head + _encode(text) + b"}}\n\n"

    def _end_text(self, *, whole: bool) -> bytes:  # noqa: ARG002 - blocks do not say so
        return _event("content_block_stop", {"index": self._index})

    def _begin_call(self, delta: CallDelta) -> bytes:
        return self._begin_block({"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}})

    def _add_arguments(self, arguments: str) -> bytes:
        delta = {"type": "input_json_delta", "partial_json": arguments}
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _end_call(self, *, whole: bool) -> bytes:  # noqa: ARG002
        return _event("content_block_stop", {"index": self._index})
