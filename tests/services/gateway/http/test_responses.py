"""``POST /v1/responses``: items in, items out, whole and as OpenAI's events, also through the unmodified client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.gateway.http.error_forms import OpenAIErrors
from services.gateway.http.formats import ChoiceEnd, Reply, TokenUsage
from services.gateway.http.response_format import ResponsesFormat, ResponseStreamErrors
from services.gateway.memory import ResponseMemory
from shared.errors import Internal, Overloaded, Unavailable
from tests.services.gateway.checkpoint import EOS
from tests.services.gateway.cluster import say
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.core.tools import templates
from tests.services.gateway.http.test_refusals import check
from tests.services.gateway.http.test_tools import CALL, stack_of

PATH = "/v1/responses"
NAMES = ["weather", "now"]
TOOLS: list[dict[str, Any]] = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES]
THOUGHT_PART = {"type": "reasoning_text", "text": "a"}
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture
async def hermes(make_stack: StackFactory, tmp_path: Path) -> Stack:
    return await stack_of(make_stack, tmp_path / "hermes", templates.HERMES)


async def ask(stack: Stack, **extra: Any) -> httpx.Response:
    return await stack.http.post(PATH, json={"model": "tiny", "input": "hi", **extra})


async def whole(stack: Stack, **extra: Any) -> dict[str, Any]:
    response = await ask(stack, **extra)
    assert response.status_code == 200, response.text
    # Strictly, field by field: the client itself takes whatever comes.
    Response.model_validate_json(response.content, strict=False)
    answer: dict[str, Any] = response.json()
    return answer


def read(text: str) -> list[dict[str, Any]]:
    """A stream's events, each of which is one of OpenAI's; they are numbered from 0."""
    found = []
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        TypeAdapter[Any](ResponseStreamEvent).validate_python(event)
        found.append(event)
    return found


async def events(stack: Stack, **extra: Any) -> list[dict[str, Any]]:
    response = await ask(stack, stream=True, **extra)
    assert response.status_code == 200, response.text
    return read(response.text)


def types(found: list[dict[str, Any]]) -> list[str]:
    """Their names without ``response.``, a run of deltas as one."""
    names = [event["type"].removeprefix("response.") for event in found]
    return [name for at, name in enumerate(names) if not at or name != names[at - 1]]


async def prompt_of(stack: Stack, **extra: Any) -> str:
    stack.workers[0].submits.clear()
    await whole(stack, **extra)
    return bytes(i for i in stack.workers[0].submits[0].prompt_token_ids if i < 256).decode()


TEXT_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
TEXT_EVENTS += ["content_part.done", "output_item.done"]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


async def test_an_answer_has_what_was_asked_for_and_what_came_of_it(stack: Stack) -> None:
    answer = await whole(
        stack, instructions="be kind", max_output_tokens=9, temperature=0.5, metadata={"a": "b"}, store=True, user="u",
        reasoning={"effort": "high"}, text={"format": {"type": "text"}, "verbosity": "low"}, truncation="disabled",
    )  # fmt: skip
    [item] = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
    assert answer["id"].startswith("resp_")
    assert item["id"].startswith("msg_")
    expected = {
        "status": "completed", "incomplete_details": None, "error": None, "instructions": "be kind", "store": False,
        "max_output_tokens": 9, "temperature": 0.5, "metadata": {"a": "b"}, "tools": [], "tool_choice": "auto",
        "previous_response_id": None, "model": "tiny", "object": "response",
    }  # fmt: skip
    assert {name: answer[name] for name in expected} == expected
    [submit] = stack.workers[0].submits
    assert bytes(submit.prompt_token_ids[1:]) == b"<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"
    assert (submit.sampling.max_tokens, submit.sampling.temperature) == (9, 0.5)
    assert answer["usage"] == {
        "input_tokens": len(submit.prompt_token_ids),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(submit.prompt_token_ids) + 5,
    }


async def test_a_stream_of_text_has_openais_events_and_ends_with_the_answer(stack: Stack) -> None:
    found = await events(stack, instructions="be kind")
    assert types(found) == ["created", "in_progress", *TEXT_EVENTS, "completed"]
    deltas = [event["delta"] for event in found if event["type"].endswith(".delta")]
    assert deltas == list("hello")
    [added, done] = [event for event in found if event["type"].startswith("response.output_item")]
    assert added["item"]["content"] == []
    last = found[-1]["response"]
    assert last["output"] == [done["item"]]
    assert {event["item_id"] for event in found if "item_id" in event} == {added["item"]["id"]}
    assert {event["response"]["id"] for event in found if "response" in event} == {last["id"]}
    assert [event["response"]["status"] for event in found[:2]] == ["in_progress"] * 2
    again = await whole(stack, instructions="be kind")
    assert last["usage"] == again["usage"]
    changing = ("id", "output", "created_at", "completed_at")
    assert {k: v for k, v in last.items() if k not in changing} == {k: v for k, v in again.items() if k not in changing}
    assert last["output"][0]["content"] == again["output"][0]["content"]


async def test_an_answer_that_is_cut_off_is_incomplete(stack: Stack) -> None:
    answer = await whole(stack, max_output_tokens=3)
    found = await events(stack, max_output_tokens=3)
    assert types(found)[-1] == "incomplete"
    for shown in (answer, found[-1]["response"]):
        assert (shown["status"], shown["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (shown["output"][0]["status"], shown["output"][0]["content"][0]["text"]) == ("incomplete", "hel")


async def test_an_answer_without_text_is_an_empty_message(stack: Stack) -> None:
    stack.workers[0].script = lambda submit: [EOS]
    assert (await whole(stack))["output"][0]["content"][0]["text"] == ""
    found = await events(stack)
    assert types(found) == ["created", "in_progress", *(e for e in TEXT_EVENTS if "delta" not in e), "completed"]
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_calls_are_items_between_those_of_text(hermes: Stack) -> None:
    hermes.workers[0].script = say(f"I look.\n{CALL}And{NOW}\nDone.")
    expected: list[Any] = ["I look.\n", ("weather", '{"city": "Oslo"}'), "And", ("now", "{}"), "\nDone."]

    def shown(items: list[dict[str, Any]]) -> list[Any]:
        return [i["content"][0]["text"] if i["type"] == "message" else (i["name"], i["arguments"]) for i in items]

    answer = await whole(hermes, tools=TOOLS)
    assert shown(answer["output"]) == expected
    assert answer["tools"] == TOOLS
    found = await events(hermes, tools=TOOLS)
    call, text = CALL_EVENTS, TEXT_EVENTS
    assert types(found) == ["created", "in_progress", *text, *call, *text, *call, *text, "completed"]
    items = found[-1]["response"]["output"]
    assert shown(items) == expected
    assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == items
    assert len({item["id"] for item in items}) == len(items)
    for index, item in enumerate(items):
        assert item["status"] == "completed"
        own = [e for e in found if e.get("output_index") == index and e["type"].endswith(".delta")]
        assert {event["item_id"] for event in own} == {item["id"]}
        assert "".join(e["delta"] for e in own) == (item["arguments"] if "name" in item else item["content"][0]["text"])
        assert item["id"].startswith("fc_" if "name" in item else "msg_")
    assert (await whole(hermes, tools=TOOLS, tool_choice="none"))["output"][0]["content"][0]["text"].count("tool_call")
    one = await whole(hermes, tools=TOOLS, parallel_tool_calls=False)
    assert [item["type"] for item in one["output"]].count("function_call") == 1


async def test_a_call_that_is_cut_off_is_incomplete(hermes: Stack) -> None:
    hermes.workers[0].script = say(CALL)
    limit = CALL.index("lo") + 2
    for answer in (
        await whole(hermes, tools=TOOLS, max_output_tokens=limit),
        (await events(hermes, tools=TOOLS, max_output_tokens=limit))[-1]["response"],
    ):
        [item] = answer["output"]
        assert (answer["status"], item["status"], item["arguments"]) == ("incomplete", "incomplete", '{"city": "Oslo')


ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "be kind"},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
    },
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "weather",
        "arguments": '{"city": "Oslo"}',
        "status": "completed",
    },
    {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "12"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
]


async def test_items_are_the_messages_that_a_chat_would_have(hermes: Stack) -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    messages = [
        {"role": "system", "content": "in short"},
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    functions = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in TOOLS]
    answer = await hermes.http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": messages, "tools": functions}
    )
    assert answer.status_code == 200
    [submit] = hermes.workers[0].submits
    expected = bytes(i for i in submit.prompt_token_ids if i < 256).decode()
    assert await prompt_of(hermes, input=ITEMS, instructions="in short", tools=TOOLS) == expected
    # A call behind no message of the assistant's has one of its own.
    assert "call_id" not in await prompt_of(hermes, input=[ITEMS[1], ITEMS[4], ITEMS[6]], tools=TOOLS)


def items(*found: Any) -> dict[str, Any]:
    return {"input": [*found]}


def said(content: Any) -> dict[str, Any]:
    return items({"role": "user", "content": content})


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("unsupported_parameter", "previous_response_id", {"previous_response_id": "resp_1"}),
    ("unsupported_parameter", "conversation", {"conversation": {"id": "x"}}),
    ("unsupported_parameter", "conversation", {"conversation": "conv_1"}),
    ("unsupported_parameter", "background", {"background": True}),
    ("unsupported_parameter", "include", {"include": ["reasoning.encrypted_content"]}),
    ("unsupported_parameter", "truncation", {"truncation": "auto"}),
    ("unsupported_parameter", "prompt", {"prompt": {"id": "x"}}),
    ("unsupported_parameter", "top_logprobs", {"top_logprobs": 2}),
    ("unsupported_parameter", "text.format", {"text": {"format": {"type": "grammar"}}}),
    ("bad_request", "text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
    ("bad_request", "tool_choice", {"tool_choice": "required"}),
    ("bad_request", "tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "another"}}),
    ("bad_request", "tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
    ("unsupported_parameter", "tool_choice", {"tools": TOOLS, "tool_choice": "some"}),
    ("unsupported_parameter", "tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("unsupported_parameter", "n", {"n": 2}),
    ("unsupported_parameter", "n", {"n": 2, "best_of": 2, "stream": True}),
    ("unsupported_parameter", "input[0].content[0].type", items({"type": "reasoning", "content": [{"type": "text"}]})),
    ("bad_request", "input[0].summary", items({"type": "reasoning", "summary": "a"})),
    ("bad_request", "input[0].content", items({"type": "reasoning", "content": [THOUGHT_PART] * 1025})),
    ("bad_request", "input[0].content[0].text", items({"type": "reasoning", "content": [{"type": "reasoning_text"}]})),
    ("bad_request", "reasoning.effort", {"reasoning": {"effort": "max"}}),
    ("bad_request", "reasoning.effort", {"reasoning": {"effort": 1}}),
    ("bad_request", "reasoning", {"reasoning": "high"}),
    ("unsupported_parameter", "input[1].type", items(ITEMS[0], {"type": "item_reference", "id": "x"})),
    ("unsupported_parameter", "input[0].type", items({"type": 5})),
    ("unsupported_parameter", "input[0].content[0].type", said([{"type": "input_image"}])),
    ("unsupported_parameter", "input[0].output[0].type", items({**ITEMS[6], "output": [{"type": "input_file"}]})),
    ("bad_request", "input", {"input": None}),
    ("bad_request", "input", {"input": []}),
    ("bad_request", "input", {"input": ""}),
    ("bad_request", "input", {"input": 5}),
    ("bad_request", "input[0]", items(5)),
    ("bad_request", "input[0].role", items({"role": "tool", "content": "a"})),
    ("bad_request", "input[0].content", items({"role": "user"})),
    ("bad_request", "input[0].content", said(5)),
    ("bad_request", "input[0].content[0]", said([5])),
    ("bad_request", "input[0].content[0].text", said([{"type": "input_text"}])),
    ("bad_request", "input[0].call_id", items({"type": "function_call", "name": "f", "arguments": "{}"})),
    ("bad_request", "input[0].name", items({**ITEMS[4], "name": "a b"})),
    ("bad_request", "input[0].arguments", items({**ITEMS[4], "arguments": "["})),
    ("bad_request", "input[0].arguments", items({**ITEMS[4], "arguments": {}})),
    ("bad_request", "input[0].output", items({"type": "function_call_output", "call_id": "c"})),
    ("bad_request", "input[128].arguments", items(*[ITEMS[4]] * 129)),
    ("bad_request", "tools[0].name", {"tools": [{"type": "function"}]}),
    ("bad_request", "tools[0].name", {"tools": [{"type": "function"}], "tool_choice": "none"}),
    ("bad_request", "max_output_tokens", {"max_output_tokens": 0}),
    ("bad_request", "metadata", {"metadata": {"a": 1}}),
    ("bad_request", "metadata", {"metadata": {str(i): "" for i in range(17)}}),
    ("bad_request", "input", items(*[{"role": "user", "content": ""}] * 4097)),
    ("bad_request", "input", items({**ITEMS[4], "arguments": json.dumps({"a": [1] * 70_000})})),
    ("context_length_exceeded", "input", {"input": "a" * 300}),
    ("context_length_exceeded", "max_output_tokens", {"max_output_tokens": 300}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "param", "extra"), REFUSED)
async def test_what_is_refused_is_named(stack: Stack, code: str, param: str, extra: dict[str, Any]) -> None:
    check(await ask(stack, **extra), 400, "invalid_request_error", code, param)
    assert not stack.workers[0].submits


async def test_harmless_values_of_what_is_not_supported_are_taken(stack: Stack) -> None:
    await whole(
        stack, previous_response_id=None, conversation=None, background=False, include=[], top_logprobs=0, store=False,
        tools=[], reasoning=None, text=None, metadata=None,
    )  # fmt: skip


async def test_an_error_in_the_middle_ends_in_one_event_of_failure(stack: Stack) -> None:
    [worker] = stack.workers
    worker.pause_after = 2
    async with stack.http.stream("POST", PATH, json={"model": "tiny", "input": "hi", "stream": True}) as response:
        lines = response.aiter_lines()
        text = ""
        async for line in lines:
            text += line + "\n"
            if '"delta":"e"' in line:
                break
        [request] = stack.gateway.dispatcher.requests.all()
        request.sink.on_error(Unavailable("broken"))
        stack.gateway.dispatcher.cancel(request.stream.request_id)
        text += "".join([line + "\n" async for line in lines])
    found = read(text.rstrip("\n") + "\n\n")
    assert types(found) == ["created", "in_progress", *TEXT_EVENTS[:3], "failed"]
    failed = found[-1]["response"]
    assert (failed["status"], failed["error"]) == ("failed", {"code": "server_error", "message": "unavailable: broken"})
    [item] = failed["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "he")


async def test_an_error_behind_a_comment_is_a_response_that_was_created_and_failed(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.http.generation.HELD_COMMENT_EVERY_S", 0.05)
    stack = await make_stack(0, no_room_timeout_s=0.1, queue_timeout_s=1.0)
    response = await ask(stack, stream=True)
    assert response.status_code == 200
    found = read(response.text[response.text.index("event: ") :])
    assert types(found) == ["created", "in_progress", "failed"]
    refused = await ask(stack)
    check(refused, 503, "server_error", "unavailable")


def test_whatever_fails_in_a_stream_has_a_code_that_openai_knows() -> None:
    for error, code in ((Overloaded("full"), "rate_limit_exceeded"), (Internal("x"), "server_error")):
        format_ = ResponsesFormat(Reply("resp_1", "tiny", 1, repeated=b'"tools":[]'))
        format_.events(0, lambda num_bytes: None)
        event = json.loads(format_.failure(error).decode().split("data: ")[-1])
        assert event["response"]["error"] == {"code": code, "message": f"{error.code}: {error.message}"}
    [name, data] = ResponseStreamErrors().events(Internal("x")).decode().strip().split("\n")
    assert (name, json.loads(data.removeprefix("data: "))["type"]) == ("event: error", "error")
    assert ResponseStreamErrors().body(Internal("x")) == OpenAIErrors().body(Internal("x"))


def test_what_the_last_event_repeats_is_counted() -> None:
    kept: list[int] = []
    format_ = ResponsesFormat(Reply("resp_1", "tiny", 1, repeated=b'"tools":[]'))
    events_ = format_.events(0, kept.append)
    events_.opening(TokenUsage(1, 0, 0))
    for _ in range(1000):
        events_.chunk("word ")
    assert sum(kept) > 5000
    events_.full_chunk("", None, ChoiceEnd("stop", None), None)
    assert sum(kept) > 10_000


async def test_a_stream_that_keeps_too_much_fails_and_is_no_slow_reader() -> None:
    memory = ResponseMemory(total_bytes=1000, slow_bytes=10, whole_bytes=100, on_cut=lambda reason: None)
    buffer = memory.open("r", 1, lambda: None)
    buffer.sending = True
    buffer.keep(90)
    buffer.write(b"12345")
    assert (buffer.disconnected, buffer.error, memory.used_bytes) == (False, None, 95)
    buffer.keep(20)
    assert buffer.error is not None
    assert buffer.error.code == "response_too_large"
    buffer.close()
    assert memory.used_bytes == 0


async def test_the_openai_client_reads_answers_and_streams(hermes: Stack) -> None:
    client = hermes.openai
    answer = await client.responses.create(model="tiny", input="hi", instructions="be kind", max_output_tokens=9)
    assert (answer.output_text, answer.status, answer.usage.output_tokens) == ("hello", "completed", 5)
    assert answer.usage.input_tokens_details.cached_tokens == 0
    text, last = "", None
    async for event in await client.responses.create(model="tiny", input="hi", stream=True):
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert (text, last.type, last.response.output_text) == ("hello", "response.completed", "hello")
    async with client.responses.stream(model="tiny", input="hi") as stream:
        names = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert (names[0], names[-1], final.output_text) == ("response.created", "response.completed", "hello")


async def test_the_openai_client_calls_functions_and_goes_on_with_the_answers_items(hermes: Stack) -> None:
    client = hermes.openai
    hermes.workers[0].script = say("I look.\n" + CALL)
    first = await client.responses.create(model="tiny", input="hi", tools=TOOLS)
    [message, call] = first.output
    assert (message.content[0].text, call.name, json.loads(call.arguments)) == (
        "I look.\n",
        "weather",
        {"city": "Oslo"},
    )
    async with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
        snapshots = [e.snapshot async for e in stream if e.type == "response.function_call_arguments.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output[1].arguments == call.arguments
    hermes.workers[0].script = say("12 degrees")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    then = await client.responses.create(
        model="tiny", input=[{"role": "user", "content": "hi"}, *first.output, output], tools=TOOLS
    )
    assert then.output_text == "12 degrees"


async def test_the_openai_client_raises_its_own_errors(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.openai.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        await stack.openai.responses.create(model="other", input="hi")
