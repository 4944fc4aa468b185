"""Answers of ``POST /v1/responses``: a response of items, whole and as OpenAI's events, and its errors in a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.core.tools.deltas import CallDelta
from services.gateway.http.choice import TOKEN_BYTES
from services.gateway.http.error_forms import OpenAIErrors
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
from shared.errors import BlitzError, Overloaded

_encode = msgspec.json.encode


class ResponseStreamErrors(OpenAIErrors):
    """``ErrorForm``: those of OpenAI, but that a stream ends with the event ``error``."""

    def events(self, error: BlitzError) -> bytes:
        # Where the stream was is not known here: a fault of the gateway's own.
        fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
        return _event("error", fields)


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))


def _usage_json(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _thought_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """``text``: None before there is any."""
    content = [] if text is None else [_thought_part(text)]
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


def _message_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    """``text``: None before there is any."""
    content = [] if text is None else [_text_part(text)]
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def _call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


class ResponsesFormat(AnswerFormat):
    """``AnswerFormat``: a response."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._events: ResponsesEvents | None = None
        self._digits = reply.response_id.partition("_")[2]

    def item_id(self, kind: str, index: int) -> str:
        """Of the item of that kind at that place of the output."""
        return f"{kind}_{self._digits}{index:x}"

    def response(
        self, status: str, output: Sequence[Any], *, usage: TokenUsage | None = None, error: BlitzError | None = None
    ) -> msgspec.Raw:
        """The response, as JSON."""
        reply = self.reply
        head = {
            "id": reply.response_id,
            "object": "response",
            "created_at": reply.created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None if error is None else _error_json(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": reply.model,
            "output": output,
            "usage": None if usage is None else _usage_json(usage),
        }
        return msgspec.Raw(_encode(head)[:-1] + b"," + reply.repeated + b"}")

    def whole(self, results: Sequence[ChoiceResult], usage: TokenUsage) -> bytes:
        [result] = results
        parts = result.parts() or [""]
        status = _status(result.finish)
        # Only what the model wrote last can be cut off.
        statuses = ["completed"] * (len(parts) - 1) + [status]
        output = [self._item(index, part, s) for index, (part, s) in enumerate(zip(parts, statuses, strict=True))]
        return bytes(self.response(status, output, usage=usage))

    def _item(self, index: int, part: MadeThought | str | MadeCall, status: str) -> dict[str, Any]:
        if isinstance(part, str):
            return _message_item(self.item_id("msg", index), part, status)
        if isinstance(part, MadeThought):
            return _thought_item(self.item_id("rs", index), part.text, status)
        return _call_item(self.item_id("fc", index), part.call_id, part.name, part.arguments, status)

    def events(self, index: int, keep: Keep) -> ResponsesEvents:  # noqa: ARG002 - there is one answer
        self._events = ResponsesEvents(self, keep)
        return self._events

    def closing(self, usage: TokenUsage) -> bytes:
        events = self._events
        assert events is not None
        assert events.end is not None
        status = _status(events.end)
        return events.lifecycle(f"response.{status}", self.response(status, events.items, usage=usage))

    def failure(self, error: BlitzError) -> bytes:
        events = self._events
        assert events is not None
        # Clients take no other event for the first one than that a response was created.
        opening = b"" if events.opened else events.opening(TokenUsage(0, 0, 0))
        failed = self.response("failed", events.items_so_far(), error=error)
        return opening + events.lifecycle("response.failed", failed)


def _status(end: ChoiceEnd) -> str:
    return "incomplete" if end.reason == "length" else "completed"


def _error_json(error: BlitzError) -> dict[str, Any]:
    """OpenAI's codes are few: ours is in the message."""
    code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
    return {"code": code, "message": f"{error.code}: {error.message}"}


class ResponsesEvents(PartEvents):
    """Items as they come. The last event has them all, so they are kept."""

    def __init__(self, format_: ResponsesFormat, keep: Keep) -> None:
        super().__init__()
        self.items: list[msgspec.Raw] = []
        """Those that have ended."""
        self._format = format_
        self._keep = keep
        self._number = 0
        self._item_id = ""
        self._pieces: list[str] = []
        """Of the text, or the arguments, of the item that is open."""
        self._call_begun: CallDelta | None = None
        self._is_thought = False
        self._delta_head = b""

    def lifecycle(self, name: str, response: msgspec.Raw) -> bytes:
        """An event that has the response."""
        return self._event(name, {"response": response})

    def items_so_far(self) -> list[Any]:
        """Those that have ended, and what there is of the one that has not."""
        return [*self.items, self._item("incomplete")] if self._open else [*self.items]

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return _event(name, {"sequence_number": number, **fields})

    def _begin_answer(self, usage: TokenUsage) -> bytes:  # noqa: ARG002 - it has the usage at its end
        response = self._format.response("in_progress", [])
        return self.lifecycle("response.created", response) + self.lifecycle("response.in_progress", response)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self.items)}

    def _item(self, status: str) -> dict[str, Any]:
        """The one that is open."""
        text = "".join(self._pieces)
        if self._call_begun is None:
            item = _thought_item if self._is_thought else _message_item
            return item(self._item_id, text, status)
        return _call_item(self._item_id, self._call_begun.call_id, self._call_begun.name, text, status)

    def _begin_item(self, item: dict[str, Any], delta: str, fields: dict[str, Any]) -> bytes:
        """``delta``: the event of each piece of it, which has these fields."""
        added = self._event("response.output_item.added", {"output_index": len(self.items), "item": item})
        head = _encode({"type": delta, **self._place, **fields})[:-1]
        self._delta_head = b"event: %b\ndata: %b" % (delta.encode(), head + b',"delta":')
        return added

    def _end_item(self, *, whole: bool) -> bytes:
        item = msgspec.Raw(_encode(self._item("completed" if whole else "incomplete")))
        ended = self._event("response.output_item.done", {"output_index": len(self.items), "item": item})
        self._keep(len(bytes(item)))
        self.items.append(item)
        self._pieces, self._call_begun, self._is_thought = [], None, False
        return ended

    def _delta(self, piece: str) -> bytes:
        self._pieces.append(piece)
        self._keep(TOKEN_BYTES + len(piece))
        number, self._number = self._number, self._number + 1
        return self._delta_head + _encode(piece) + b',"sequence_number":%d}\n\n' % number

    def _finished(self, end: ChoiceEnd) -> bytes:
        if self.items or self._open:
            return super()._finished(end)
        # There is an item always.
        self._open = "text"
        return self._begin_text() + super()._finished(end)

    def _begin_thought(self) -> bytes:
        self._is_thought = True
        self._item_id = self._format.item_id("rs", len(self.items))
        item = _thought_item(self._item_id, None, "in_progress")
        begun = self._begin_item(item, "response.reasoning_text.delta", {"content_index": 0})
        part = {**self._place, "content_index": 0, "part": _thought_part("")}
        return begun + self._event("response.content_part.added", part)

    def _add_thought(self, thought: str) -> bytes:
        return self._delta(thought)

    def _end_thought(self, *, whole: bool) -> bytes:
        text = "".join(self._pieces)
        place = {**self._place, "content_index": 0}
        done = self._event("response.reasoning_text.done", {**place, "text": text})
        done += self._event("response.content_part.done", {**place, "part": _thought_part(text)})
        return done + self._end_item(whole=whole)

    def _begin_text(self) -> bytes:
        self._item_id = self._format.item_id("msg", len(self.items))
        fields = {"content_index": 0, "logprobs": []}
        begun = self._begin_item(
            _message_item(self._item_id, None, "in_progress"), "response.output_text.delta", fields
        )
        part = {**self._place, "content_index": 0, "part": _text_part("")}
        return begun + self._event("response.content_part.added", part)

    def _add_text(self, text: str) -> bytes:
        return self._delta(text)

    def _end_text(self, *, whole: bool) -> bytes:
        text = "".join(self._pieces)
        place = {**self._place, "content_index": 0}
        done = self._event("response.output_text.done", {**place, "text": text, "logprobs": []})
        done += self._event("response.content_part.done", {**place, "part": _text_part(text)})
        return done + self._end_item(whole=whole)

    def _begin_call(self, delta: CallDelta) -> bytes:
        self._call_begun = delta
        self._item_id = self._format.item_id("fc", len(self.items))
        item = _call_item(self._item_id, delta.call_id, delta.name, "", "in_progress")
        return self._begin_item(item, "response.function_call_arguments.delta", {})

    def _add_arguments(self, arguments: str) -> bytes:
        return self._delta(arguments)

    def _end_call(self, *, whole: bool) -> bytes:
        assert self._call_begun is not None
        fields = {**self._place, "name": self._call_begun.name, "arguments": "".join(self._pieces)}
        return self._event("response.function_call_arguments.done", fields) + self._end_item(whole=whole)
