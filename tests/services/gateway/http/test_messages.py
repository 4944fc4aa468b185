"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: blocks in, blocks out, whole and as Anthropic's events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.http.message_format import AnthropicErrors
from shared.errors import (
    BadRequest,
    BlitzError,
    DeadlineExceeded,
    Internal,
    ModelNotFound,
    Overloaded,
    PayloadTooLarge,
    Unauthorized,
    Unavailable,
)
from tests.services.gateway.checkpoint import EOS
from tests.services.gateway.cluster import say
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.core.tools import templates
from tests.services.gateway.http.test_rate_limits import key, keys_file
from tests.services.gateway.http.test_tools import CALL, stack_of

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS: list[dict[str, Any]] = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "now")]
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture
async def hermes(make_stack: StackFactory, tmp_path: Path) -> Stack:
    return await stack_of(make_stack, tmp_path / "hermes", templates.HERMES)


async def ask(stack: Stack, path: str = PATH, **extra: Any) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 200, "messages": MESSAGES, **extra}
    return await stack.http.post(path, json={name: value for name, value in body.items() if value is not None})


async def whole(stack: Stack, **extra: Any) -> dict[str, Any]:
    response = await ask(stack, **extra)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def read(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


async def events(stack: Stack, **extra: Any) -> list[dict[str, Any]]:
    response = await ask(stack, stream=True, **extra)
    assert response.status_code == 200, response.text
    return read(response.text)


def types(found: list[dict[str, Any]]) -> list[str]:
    """Their names, a run of deltas as one."""
    names = [event["type"] for event in found]
    return [name for at, name in enumerate(names) if not at or name != names[at - 1]]


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message, as a client puts it together."""
    message: dict[str, Any] = found[0]["message"]
    inputs: dict[int, str] = {}
    for event in found[1:]:
        index = event.get("index")
        if event["type"] == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert index == len(message["content"]) - 1
            delta = event["delta"]
            if delta["type"] == "text_delta":
                message["content"][index]["text"] += delta["text"]
            else:
                inputs[index] = inputs.get(index, "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            message = {**message, **event["delta"], "usage": event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def check(response: httpx.Response, status: int, kind: str) -> str:
    """The error's message, after checking all else."""
    body = response.json()
    assert set(body) == {"type", "error"}
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert set(body["error"]) == {"type", "message"}
    return str(body["error"]["message"])


BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]


async def test_an_answer_is_a_message(stack: Stack) -> None:
    answer = await whole(
        stack, system="be kind", temperature=0.5, top_p=0.9, top_k=3, metadata={"user_id": "u"},
        thinking={"type": "disabled"},
    )  # fmt: skip
    [submit] = stack.workers[0].submits
    assert bytes(submit.prompt_token_ids[1:]) == b"<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"
    sampling = submit.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (200, 0.5, 0.9, 3)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(submit.prompt_token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
        },
    }


async def test_a_stream_has_anthropics_events_and_adds_up_to_the_answer(stack: Stack) -> None:
    found = await events(stack)
    assert types(found) == ["message_start", *BLOCK, "message_delta", "message_stop"]
    start = found[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert deltas == list("hello")
    again = await whole(stack)
    assert joined(found) == {**again, "id": start["id"]}
    assert start["usage"]["input_tokens"] == again["usage"]["input_tokens"]


async def test_what_it_ended_with_is_said(hermes: Stack) -> None:
    cases = {
        "end_turn": ("hello", {}, None),
        "max_tokens": ("hello", {"max_tokens": 3}, None),
        "stop_sequence": ("one STOP two", {"stop_sequences": ["none", "STOP"]}, "STOP"),
        "tool_use": (CALL, {"tools": TOOLS}, None),
    }
    for reason, (written, extra, stopped) in cases.items():
        hermes.workers[0].script = say(written)
        for answer in (await whole(hermes, **extra), joined(await events(hermes, **extra))):
            assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stopped)
    hermes.workers[0].script = say("one STOP two")
    assert (await whole(hermes, stop_sequences=["STOP"]))["content"] == [{"type": "text", "text": "one "}]


async def test_more_than_the_context_leaves_is_cut(hermes: Stack) -> None:
    hermes.workers[0].script = say("hello")
    await whole(hermes, max_tokens=128_000)
    (submit,) = hermes.workers[0].submits
    assert len(submit.prompt_token_ids) + submit.sampling.max_tokens == 4096


async def test_an_answer_without_text_has_no_blocks(stack: Stack) -> None:
    stack.workers[0].script = lambda submit: [EOS]
    assert (await whole(stack))["content"] == []
    assert types(await events(stack)) == ["message_start", "message_delta", "message_stop"]


async def test_calls_are_blocks_between_those_of_text(hermes: Stack) -> None:
    hermes.workers[0].script = say(f"I look.\n{CALL}And{NOW}\nDone.")

    def shown(message: dict[str, Any]) -> list[Any]:
        return [b["text"] if b["type"] == "text" else (b["name"], b["input"]) for b in message["content"]]

    expected = ["I look.\n", ("weather", {"city": "Oslo"}), "And", ("now", {}), "\nDone."]
    assert shown(await whole(hermes, tools=TOOLS)) == expected
    found = await events(hermes, tools=TOOLS)
    assert types(found) == ["message_start", *BLOCK * 5, "message_delta", "message_stop"]
    assert shown(joined(found)) == expected
    one = await whole(hermes, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [b["type"] for b in one["content"]].count("tool_use") == 1
    none = await whole(hermes, tools=TOOLS, tool_choice={"type": "none"})
    assert [b["type"] for b in none["content"]] == ["text"]


async def test_arguments_that_are_no_object_are_an_empty_one(hermes: Stack) -> None:
    hermes.workers[0].script = say(CALL)
    answer = await whole(hermes, tools=TOOLS, max_tokens=CALL.index("lo"))
    assert (answer["stop_reason"], answer["content"][0]["input"]) == ("max_tokens", {})


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "12"},
            {
                "type": "tool_result",
                "tool_use_id": "c2",
                "content": [{"type": "text", "text": "noon"}],
                "is_error": True,
            },
            {"type": "text", "text": "so?"},
        ],
    },
]


async def test_blocks_are_the_messages_that_a_chat_would_have(hermes: Stack) -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    messages = [
        {"role": "system", "content": "x\ny"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "user", "content": "so?"},
    ]
    functions = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}} for tool in TOOLS
    ]
    body = {"model": "tiny", "messages": messages, "tools": functions}
    assert (await hermes.http.post("/v1/chat/completions", json=body)).status_code == 200
    system = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    await whole(hermes, system=system, messages=TURNS, tools=TOOLS)
    chat, own = hermes.workers[0].submits
    assert own.prompt_token_ids == chat.prompt_token_ids
    count = await ask(hermes, COUNT, system=system, messages=TURNS, tools=TOOLS, max_tokens=None)
    assert count.json() == {"input_tokens": len(own.prompt_token_ids)}
    assert len(hermes.workers[0].submits) == 2


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*blocks]}]}


RESULT = {"type": "tool_result", "tool_use_id": "c"}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": MESSAGES * 4097}),
    ("messages[0].role", {"messages": [{"role": "system", "content": "a"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", turn(*[{"type": "text", "text": "a"}] * 1025)),
    ("messages[1]", {"messages": [*MESSAGES, {"role": "assistant", "content": "I"}]}),
    ("messages[0].content[0].type", turn({"type": "image", "source": {}})),
    ("messages[0].content[0].type", turn({"type": "tool_use", "id": "c", "name": "f", "input": {}})),
    ("messages[0].content[0].type", turn({"type": "thinking", "thinking": "a"})),
    ("messages[0].content[0].thinking", turn({"type": "thinking", "thinking": 5}, role="assistant")),
    ("messages[0].content[0].thinking", turn({"type": "thinking", "text": "a"}, role="assistant")),
    ("messages[0].content[0].type", turn(RESULT, role="assistant")),
    ("messages[0].content[0].content[0].type", turn({**RESULT, "content": [{"type": "image"}]})),
    ("messages[0].content[0].text", turn({"type": "text"})),
    ("messages[0].content[0].tool_use_id", turn({"type": "tool_result"})),
    ("messages[0].content[0].input", turn({"type": "tool_use", "id": "c", "name": "f", "input": 5}, role="assistant")),
    (
        "messages[0].content[0].name",
        turn({"type": "tool_use", "id": "c", "name": "a b", "input": {}}, role="assistant"),
    ),
    ("system[0].type", {"system": [{"type": "image"}]}),
    ("system", {"system": 5}),
    ("stop_sequences", {"stop_sequences": "x"}),
    ("stop_sequences[1]", {"stop_sequences": ["x", ""]}),
    ("tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
    ("tools[0].name", {"tools": [{"input_schema": {}}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "another"}}),
    ("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "tool"}}),
    ("best_of", {"best_of": 2}),
    ("thinking.type", {"thinking": {"type": "always"}}),
    ("thinking.type", {"thinking": {}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": "many"}}),
    ("thinking", {"thinking": "enabled"}),
    ("output_config.format", {"output_config": {"format": {"type": "grammar", "schema": {}}}}),
    ("n", {"n": 2}),
    ("mcp_servers", {"mcp_servers": [{"name": "x"}]}),
    ("container", {"container": "x"}),
]


@pytest.mark.parametrize(("param", "extra"), REFUSED)
async def test_what_is_refused_is_named(stack: Stack, param: str, extra: dict[str, Any]) -> None:
    response = await ask(stack, **extra)
    assert param in check(response, 400, "invalid_request_error")
    assert not stack.workers[0].submits
    if param != "max_tokens":
        assert param in check(await ask(stack, COUNT, **extra), 400, "invalid_request_error")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("x"), "invalid_request_error"),
        (Unauthorized("x"), "authentication_error"),
        (ModelNotFound("x"), "not_found_error"),
        (PayloadTooLarge("x"), "request_too_large"),
        (Overloaded("x"), "rate_limit_error"),
        (Internal("x"), "api_error"),
        (Unavailable("x"), "overloaded_error"),
        (DeadlineExceeded("x"), "timeout_error"),
    ],
)
def test_errors_are_of_anthropics_types(error: BlitzError, kind: str) -> None:
    body = {"type": "error", "error": {"type": kind, "message": "x"}}
    assert json.loads(AnthropicErrors().body(error)) == body
    error.param = "field"
    [name, data] = AnthropicErrors().events(error).decode().strip().split("\n")
    assert (name, json.loads(data.removeprefix("data: "))["error"]["message"]) == ("event: error", "field: x")


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_keys_models_and_limits_are_checked_as_elsewhere(
    make_stack: StackFactory, tmp_path: Path, path: str
) -> None:
    keys = keys_file(tmp_path, key("a"), key("b", models=["other"]), key("c", requests_per_minute=1))
    stack = await make_stack(keys_file=keys)

    async def answer(**headers: str) -> httpx.Response:
        body = {"model": "tiny", "max_tokens": 5, "messages": MESSAGES}
        return await stack.http.post(path, json=body, headers=headers)

    for headers in ({"x-api-key": "sk-a"}, {"authorization": "Bearer sk-a"}):
        assert (await answer(**headers)).status_code == 200
    assert (await answer(**{"x-api-key": "sk-a", "authorization": "Basic eDp5"})).status_code == 200
    for wrong in ({}, {"x-api-key": "sk-z"}, {"x-api-key": "sk-a", "authorization": "Bearer sk-z"}):
        refused = await answer(**wrong)
        check(refused, 401, "authentication_error")
    check(await answer(**{"x-api-key": "sk-b"}), 403, "permission_error")
    if path == PATH:
        first = await answer(**{"x-api-key": "sk-c"})
        assert (first.status_code, first.headers["x-ratelimit-limit-requests"]) == (200, "1")
        limited = await answer(**{"x-api-key": "sk-c"})
        check(limited, 429, "rate_limit_error")
        assert int(limited.headers["retry-after"]) > 0


async def test_other_errors_of_these_routes_have_the_same_form(stack: Stack) -> None:
    for path in (PATH, COUNT):
        check(await stack.http.get(path), 405, "invalid_request_error")
        check(await stack.http.post(path, content=b"{"), 400, "invalid_request_error")
        unknown = await stack.http.post(path, json={"model": "other", "max_tokens": 1, "messages": MESSAGES})
        check(unknown, 404, "not_found_error")
        assert unknown.headers["request-id"] == unknown.headers["x-request-id"]


async def test_an_error_in_the_middle_is_the_last_event(stack: Stack) -> None:
    stack.workers[0].pause_after = 2
    body = {"model": "tiny", "max_tokens": 9, "messages": MESSAGES, "stream": True}
    async with stack.http.stream("POST", PATH, json=body) as response:
        lines = response.aiter_lines()
        text = ""
        async for line in lines:
            text += line + "\n"
            if '"text":"e"' in line:
                break
        [request] = stack.gateway.dispatcher.requests.all()
        request.sink.on_error(Unavailable("broken"))
        stack.gateway.dispatcher.cancel(request.stream.request_id)
        text += "".join([line + "\n" async for line in lines])
    found = read(text.rstrip("\n"))
    assert types(found) == ["message_start", *BLOCK[:2], "error"]
    assert found[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "broken"}}
