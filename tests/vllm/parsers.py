"""Run in vLLM's environment: what its parsers of calls make of texts, whole and in pieces.

Reads an object of JSON from standard input: ``{parser: [text]}``, and writes one: ``{parser: [{"whole": [text, calls],
"streamed": [text, calls]}]}``, a call being ``[name, arguments]``; an error is a string in its place.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

NAMES = ("weather", "add", "send_mail", "now", "geo.find")
MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


class Bytes:
    """A tokenizer of characters, whose marks are tokens."""

    def get_vocab(self) -> dict[str, int]:
        return {mark: 1_200_000 + place for place, mark in enumerate(MARKS)}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int] | int, **_: Any) -> str:
        return "".join(map(chr, ids if isinstance(ids, list) else [ids]))


def request() -> ChatCompletionRequest:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "a"}], tools=tools)


def whole(kind: Any, text: str) -> Any:
    found = kind(Bytes(), request().tools).extract_tool_calls(text, request())
    return [found.content or "", [[c.function.name, c.function.arguments] for c in found.tool_calls]]


def streamed(kind: Any, text: str) -> Any:
    parser, content, calls = kind(Bytes(), request().tools), "", {}
    for end in range(1, len(text) + 1):
        before, now = text[: end - 1], text[:end]
        delta = parser.extract_tool_calls_streaming(
            before, now, now[len(before) :], [ord(c) for c in before], [ord(c) for c in now], [ord(now[-1])], request()
        )
        if delta is None:
            continue
        content += delta.content or ""
        for call in delta.tool_calls or ():
            name, arguments = calls.setdefault(call.index, ["", ""])
            function = call.function
            calls[call.index] = [name + (function.name or ""), arguments + (function.arguments or "")]
    return [content, [calls[index] for index in sorted(calls)]]


def tried(read: Any, kind: Any, text: str) -> Any:
    try:
        return read(kind, text)
    except Exception as error:  # noqa: BLE001 - what it raises is what is asked for
        return f"{type(error).__name__}: {error}"


def main() -> None:
    answer = {}
    for name, texts in json.load(sys.stdin).items():
        kind = ToolParserManager.get_tool_parser(name)
        answer[name] = [{"whole": tried(whole, kind, text), "streamed": tried(streamed, kind, text)} for text in texts]
    sys.stdout.write("ANSWER" + json.dumps(answer))


if __name__ == "__main__":
    main()
