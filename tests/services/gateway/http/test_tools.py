"""Functions that a chat may call: what the template gets, and what becomes of what the model writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tokenizers import AddedToken

from services.gateway.chat_template import ChatTemplate
from shared.messages.generation import TokenLogprobs
from tests.services.gateway.checkpoint import byte_tokenizer, model_record, write_checkpoint
from tests.services.gateway.cluster import say
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.core.tools import templates
from tests.services.gateway.core.tools.transcripts import HERMES, LLAMA, MISTRAL, PYTHONIC, Transcript
from tests.services.gateway.http.test_refusals import CHAT, MESSAGES, check

NAMES = ["weather", "add", "send_mail", "now", "geo.find"]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in NAMES]
TEMPLATES = {
    "hermes": templates.HERMES,
    "llama": templates.LLAMA,
    "mistral": templates.MISTRAL,
    "pythonic": templates.PYTHONIC,
}
TRANSCRIPTS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "pythonic": PYTHONIC}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CONTEXT_TOKENS = 4096


async def stack_of(make_stack: StackFactory, folder: Path, template: str, *special: str, **settings: Any) -> Stack:
    """A gateway whose model has that template, and these special tokens from id 258 on."""
    write_checkpoint(folder, chat_template=template)
    if special:
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
        tokenizer.save(str(folder / "tokenizer.json"))
    record = model_record(folder)
    record = structs.replace(record, spec=structs.replace(record.spec, max_position=CONTEXT_TOKENS))
    return await make_stack(record=record, **settings)


@pytest.fixture
async def hermes(make_stack: StackFactory, tmp_path: Path) -> Stack:
    return await stack_of(make_stack, tmp_path / "hermes", templates.HERMES)


async def ask(stack: Stack, **extra: Any) -> Any:
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, **extra}
    response = await stack.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response


async def whole(stack: Stack, **extra: Any) -> dict[str, Any]:
    choice: dict[str, Any] = (await ask(stack, **extra)).json()["choices"][0]
    return choice


async def events(stack: Stack, **extra: Any) -> list[dict[str, Any]]:
    lines = (await ask(stack, stream=True, **extra)).text.removesuffix("\n\n").split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(chunks: list[dict[str, Any]]) -> tuple[str, list[list[str]], str]:
    """Text, calls and the reason of the end, as a client puts them together."""
    text, calls, reason = "", list[list[str]](), ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert not reason
            reason = choice["finish_reason"] or ""
            text += choice["delta"].get("content") or ""
            for delta in choice["delta"].get("tool_calls", []):
                if "id" in delta:
                    assert (delta["index"], delta["type"]) == (len(calls), "function")
                    calls.append([delta["function"]["name"], ""])
                assert delta["index"] == len(calls) - 1
                calls[-1][1] += delta["function"]["arguments"]
    return text, calls, reason


async def prompt_of(stack: Stack, **extra: Any) -> str:
    stack.workers[0].submits.clear()
    await ask(stack, **extra)
    return bytes(i for i in stack.workers[0].submits[0].prompt_token_ids if i < 256).decode()


FULL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "é <b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "\\u00c5s"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "12"},
]


@pytest.mark.parametrize("family", ["hermes", "llama", "mistral"])
async def test_templates_get_tools_calls_and_results_as_transformers_gives_them(
    make_stack: StackFactory, tmp_path: Path, family: str
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    stack = await stack_of(make_stack, tmp_path / family, TEMPLATES[family])
    as_objects = json.loads(json.dumps(CALLED))
    as_objects[1]["content"] = ""
    as_objects[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Ås"}
    rendered: Any = render_jinja_template(
        conversations=[as_objects], tools=[FULL], chat_template=TEMPLATES[family], add_generation_prompt=True,
        bos_token="", eos_token="",
    )  # fmt: skip
    prompt = await prompt_of(stack, tools=[FULL], messages=CALLED)
    assert prompt == rendered[0][0]
    assert '"city": "Ås"' in prompt


async def test_tools_are_kept_from_the_template_when_none_may_be_called(hermes: Stack) -> None:
    hermes.workers[0].script = say(CALL)
    assert "# Tools" in await prompt_of(hermes)
    assert "# Tools" not in await prompt_of(hermes, tool_choice="none")
    choice = await whole(hermes, tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "tool_calls" not in choice["message"]


async def test_a_template_for_tools_is_taken_where_a_checkpoint_has_one(
    make_stack: StackFactory, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "two", chat_template=None)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": templates.HERMES}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": named}))
    stack = await make_stack(record=model_record(folder))
    assert await prompt_of(stack, tools=None) == "plain"
    assert "# Tools" in await prompt_of(stack, tools=TOOLS[:1])


async def test_a_models_setting_names_the_parser_whatever_its_template_says(hermes: Stack) -> None:
    [worker] = hermes.workers
    worker.script = say("[now(), add(a=1)]")
    assert (await whole(hermes))["message"]["content"] == "[now(), add(a=1)]"
    answer = await hermes.http.patch("/admin/models/tiny", json={"tool_parser": "pythonic"})
    assert answer.json()["tool_parser"] == "pythonic"
    assert [c["function"]["name"] for c in (await whole(hermes))["message"]["tool_calls"]] == ["now", "add"]
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
    refused = await hermes.http.post(CHAT, json=body | {"tool_choice": "required"})
    check(refused, 400, "invalid_request_error", "unsupported_parameter", "tool_choice")
    await hermes.http.patch("/admin/models/tiny", json={"tool_parser": "none"})
    refused = await hermes.http.post(CHAT, json=body)
    assert "none" in check(refused, 400, "invalid_request_error", "unsupported_parameter", "tools")
    refused = await hermes.http.post("/tokenize", json=body)
    check(refused, 400, "invalid_request_error", "unsupported_parameter", "tools")
    await hermes.http.patch("/admin/models/tiny", json={"tool_parser": "auto"})
    worker.script = say(CALL)
    assert len((await whole(hermes))["message"]["tool_calls"]) == 1


async def test_a_parser_may_be_set_where_a_template_has_no_tools(stack: Stack) -> None:
    stack.workers[0].script = say(CALL)
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
    refused = await stack.http.post(CHAT, json=body)
    check(refused, 400, "invalid_request_error", "unsupported_parameter", "tools")
    assert (await stack.http.patch("/admin/models/tiny", json={"tool_parser": "hermes"})).status_code == 200
    assert len((await whole(stack))["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("family", TRANSCRIPTS)
async def test_transcripts_come_whole_as_they_come_streamed(
    make_stack: StackFactory, tmp_path: Path, family: str
) -> None:
    stack = await stack_of(make_stack, tmp_path / family, TEMPLATES[family])
    cases: list[Transcript] = [case for case in TRANSCRIPTS[family] if case[0]]
    for written, text, calls in cases:
        stack.workers[0].script = say(written)
        choice = await whole(stack)
        message = choice["message"]
        found = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])]
        assert (message["content"] or "", found) == (text, [list(call) for call in calls])
        if not text and calls:
            assert message["content"] is None
        assert joined(await events(stack)) == (text, found, choice["finish_reason"])


@pytest.mark.parametrize(("family", "pattern"), [("hermes", r"call_[\w-]{24}"), ("mistral", r"[a-zA-Z0-9]{9}")])
async def test_ids_are_such_as_templates_take(
    make_stack: StackFactory, tmp_path: Path, family: str, pattern: str
) -> None:
    stack = await stack_of(make_stack, tmp_path / family, TEMPLATES[family])
    written, _, calls = next(case for case in TRANSCRIPTS[family] if len(case[2]) == 2)
    stack.workers[0].script = say(written)
    ids = [call["id"] for _ in range(3) for call in (await whole(stack))["message"]["tool_calls"]]
    assert len(set(ids)) == 3 * len(calls)
    assert all(re.fullmatch(pattern, found, re.ASCII) for found in ids)


NAMED = {"type": "function", "function": {"name": "weather"}}


async def test_the_reason_is_tool_calls_if_one_was_made_and_the_model_ended(hermes: Stack) -> None:
    [worker] = hermes.workers
    reasons = {}
    cut = CALL.index("Oslo")
    for name, written, extra in (
        ("made", CALL, {}),
        ("none", "hello", {}),
        ("cut", CALL[:cut], {}),
        ("long", CALL, {"max_tokens": cut}),
        ("full", CALL + "x", {"max_tokens": len(CALL)}),
        ("stop", CALL + " STOP", {"stop": "STOP"}),
        ("stop inside", CALL, {"stop": "Os"}),
        ("required", CALL, {"tool_choice": "required"}),
        ("named", CALL, {"tool_choice": NAMED}),
        ("named, long", CALL, {"tool_choice": NAMED, "max_tokens": cut}),
    ):
        worker.script = say(written)
        reasons[name] = (await whole(hermes, **extra))["finish_reason"]
        assert joined(await events(hermes, **extra))[2] == reasons[name]
    assert reasons == {
        "made": "tool_calls", "none": "stop", "cut": "stop", "long": "length", "full": "length", "stop": "tool_calls",
        "stop inside": "stop", "required": "tool_calls", "named": "stop", "named, long": "length",
    }  # fmt: skip


async def test_without_parallel_calls_there_is_one(hermes: Stack) -> None:
    hermes.workers[0].script = say(CALL + "\n" + CALL)
    assert len((await whole(hermes))["message"]["tool_calls"]) == 2
    assert len((await whole(hermes, parallel_tool_calls=False))["message"]["tool_calls"]) == 1
    assert len(joined(await events(hermes, parallel_tool_calls=False))[1]) == 1


async def test_stop_strings_are_found_before_in_and_behind_calls(hermes: Stack) -> None:
    for stop, text, calls in (
        ("Oslo", "a ", [["weather", '{"city": "']]),
        ("</tool_call>", "a ", [["weather", '{"city": "Oslo"}']]),
        ("<tool_call>", "a ", []),
        ("behind", "a ", [["weather", '{"city": "Oslo"}']]),
        ("<tool", "a ", []),
        # What is held back as the beginning of a call is text then.
        ('"name"', "a <tool_call>\n{", []),
        ("d<x", "a  behind", [["weather", '{"city": "Oslo"}']]),
    ):
        hermes.workers[0].script = say(f"a {CALL} behind")
        assert joined(await events(hermes, stop=[stop]))[:2] == (text, calls), stop


async def test_a_token_of_text_has_an_event_and_one_of_a_call_if_there_is_something_to_say(hermes: Stack) -> None:
    written = "ab <t " + CALL
    hermes.workers[0].script = say(written)
    chunks = await events(hermes, stream_options={"include_usage": True})
    usage = chunks.pop()["usage"]
    assert usage["completion_tokens"] == len(written)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["usage"] is None for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:]]
    first = next(index for index, delta in enumerate(deltas) if "tool_calls" in delta)
    assert "".join(delta["content"] for delta in deltas[:first]) == "ab <t "
    # The characters of the call's mark could have been text; those of its name and its end are events of nothing.
    assert first == len("ab <t ") + len("<tool_call>") - 1
    called = [delta for delta in deltas[first:-1] if "tool_calls" in delta]
    assert all(delta["content"] is None for delta in called)
    # The first one has the opening brace, too.
    assert len(called) == len('{"city": "Oslo"}')
    # Of one call one entry: openai 3.3 puts a first event's two together as two calls.
    assert [len(delta["tool_calls"]) for delta in called] == [1] * len(called)
    assert called[0]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{"}


async def test_a_call_at_once_has_its_role_with_the_first_token(hermes: Stack) -> None:
    [worker] = hermes.workers
    worker.script, worker.pause_after = say(CALL), len("<tool_call>") + 3
    async with hermes.http.stream(
        "POST", CHAT, json={"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "stream": True}
    ) as response:
        lines = response.aiter_lines()
        assert '"role":"assistant"' in await anext(lines)
        worker.resume.set()
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"


async def test_logprobs_and_usage_are_of_every_token(hermes: Stack) -> None:
    hermes.workers[0].logprobs = TokenLogprobs(logprob=-0.5, top=())
    hermes.workers[0].script = say(CALL)
    choice = await whole(hermes, logprobs=True)
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list(CALL)
    chunks = await events(hermes, logprobs=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    entries = [e for chunk in chunks for c in chunk["choices"] for e in (c["logprobs"] or {}).get("content", [])]
    assert [entry["token"] for entry in entries] == list(CALL)
    assert joined(chunks)[1] == [["weather", '{"city": "Oslo"}']]
    assert chunks[-1]["usage"]["completion_tokens"] == len(CALL)


SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|other|>")
BEGIN, ARGS, CALL_ID, OTHER = range(258, 262)


@pytest.mark.parametrize(
    ("script", "text", "calls"),
    [
        ([BEGIN, *b"now", ARGS, *b"{}", BEGIN, *b"add{}"], "", [["now", "{}"], ["add", "{}"]]),
        ([*b"a ", OTHER, BEGIN, *b'[{"name": "now", "arguments": {}}]', OTHER, *b" b"], "a  b", [["now", "{}"]]),
        ([BEGIN, *b"rm", ARGS, *b"{}"], "rm{}", []),
        ([BEGIN, *b"now", CALL_ID, *b"123456789", ARGS, *b"{}", 257], "", [["now", "{}"]]),
        ([*"é".encode()[:1], BEGIN, *b"now{}"], "\ufffd", [["now", "{}"]]),
    ],
)
async def test_special_tokens_are_read_and_not_shown(
    make_stack: StackFactory, tmp_path: Path, script: list[int], text: str, calls: list[list[str]]
) -> None:
    stack = await stack_of(make_stack, tmp_path / "mistral", templates.MISTRAL, *SPECIAL)
    stack.workers[0].script = lambda submit: script
    assert joined(await events(stack))[:2] == (text, calls)
    shown, found, _ = joined(await events(stack, skip_special_tokens=False))
    assert found == calls
    if not calls:
        assert shown == "[TOOL_CALLS]rm[ARGS]{}"
    # Without tools nothing is read as a call.
    plain, none, _ = joined(await events(stack, tools=None))
    assert none == []
    assert "[" not in plain.replace("[{", "").replace("}]", "")


async def test_text_held_for_a_stop_string_comes_before_the_call(make_stack: StackFactory, tmp_path: Path) -> None:
    stack = await stack_of(make_stack, tmp_path / "mistral", templates.MISTRAL, *SPECIAL)
    stack.workers[0].script = lambda submit: [*b"a ST", BEGIN, *b'add{"a":"OP"}']
    assert joined(await events(stack, stop="STOP")) == ("a ST", [["add", '{"a":"OP"}']], "tool_calls")


async def test_the_openai_client_reads_calls_whole_and_streamed(hermes: Stack) -> None:
    hermes.workers[0].script = say("I look.\n" + CALL + '<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    answer = await hermes.openai.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
    [first, second] = answer.choices[0].message.tool_calls
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", "I look.\n")
    assert (first.type, first.function.name, json.loads(first.function.arguments)) == (
        "function", "weather", {"city": "Oslo"},
    )  # fmt: skip
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    stream = await hermes.openai.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, stream=True)
    arguments: dict[int, str] = {}
    names: dict[int, str] = {}
    async for chunk in stream:
        for delta in chunk.choices[0].delta.tool_calls or ():
            arguments[delta.index] = arguments.get(delta.index, "") + (delta.function.arguments or "")
            if delta.function.name:
                names[delta.index] = delta.function.name
    assert (names, arguments) == ({0: "weather", 1: "now"}, {0: '{"city": "Oslo"}', 1: "{}"})
    # The client's own accumulation of a stream, and its answer as the next message.
    async with hermes.openai.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as events_:
        final = await events_.get_final_completion()
    message = final.choices[0].message
    assert [call.function.arguments for call in message.tool_calls] == ['{"city": "Oslo"}', "{}"]
    follow_up = [*MESSAGES, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12"}]
    await hermes.openai.chat.completions.create(model="tiny", messages=follow_up, tools=TOOLS)
    prompt = bytes(i for i in hermes.workers[0].submits[-1].prompt_token_ids if i < 256).decode()
    assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in prompt
    assert "<tool_response>\n12" in prompt


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def said(call: Any, role: str = "assistant") -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": role, "content": "x", "tool_calls": [call]}]}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": {}}),
    ("tools", {"tools": "f"}),
    ("tools[0]", {"tools": [1]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("tools[0].function.name", tool(name="a b")),
    ("tools[0].function.name", tool(name="")),
    ("tools[0].function.name", tool(name="a\n")),
    ("tools[0].function.name", tool(name="x" * 65)),
    ("tools[0].function.description", tool(description=1)),
    ("tools[0].function.parameters", tool(parameters=[])),
    ("tools[0].function.strict", tool(strict="yes")),
    ("tools", {"tools": TOOLS * 26}),
    ("tools", tool(parameters={"a": [1] * 20_000})),
    ("parallel_tool_calls", {"parallel_tool_calls": "no"}),
    ("messages[1].tool_calls[0]", said(3)),
    ("messages[1].tool_calls[0].function", said({"id": "a"})),
    ("messages[1].tool_calls[0].function.name", said({"function": {"arguments": "{}"}})),
    ("messages[1].tool_calls[0].function.arguments", said({"function": {"name": "f", "arguments": "{"}})),
    ("messages[1].tool_calls[0].function.arguments", said({"function": {"name": "f", "arguments": "[]"}})),
    ("messages[1].tool_calls[0].function.arguments", said({"function": {"name": "f", "arguments": "null"}})),
    ("messages[1].tool_calls[0].function.arguments", said({"function": {"name": "f", "arguments": 1}})),
    ("messages[1].tool_calls[0].function.arguments", said({"function": {"name": "f", "arguments": '"\\ud800"'}})),
    ("messages[1].tool_calls", said({"function": {"name": "f"}}, role="user")),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}),
    ("messages", said({"function": {"name": "f", "arguments": "[" + "1," * 70_000 + "1]"}})),
    ("tool_choice", {"tool_choice": "\ud800"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "another"}}}),
    ("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
    ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "custom"}}),
    ("tools[0].parameters.not", {**tool(parameters={"not": {}}), "tool_choice": "required"}),
]
UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("tool_choice", {"tools": TOOLS, "tool_choice": "some"}),
    ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
    ("tools[0].type", {"tools": [{}]}),
    ("messages[1].tool_calls[0].type", said({"type": "custom", "custom": {"name": "f", "input": "x"}})),
]


@pytest.mark.parametrize(
    ("code", "param", "body"),
    [*(("bad_request", *case) for case in WRONG), *(("unsupported_parameter", *case) for case in UNSUPPORTED)],
)
async def test_what_is_wrong_with_tools_is_named(hermes: Stack, code: str, param: str, body: dict[str, Any]) -> None:
    response = await hermes.http.post(CHAT, content=json.dumps({"model": "tiny", "messages": MESSAGES, **body}))
    check(response, 400, "invalid_request_error", code, param)
    assert not hermes.workers[0].submits


async def test_tools_have_a_bounded_size(hermes: Stack) -> None:
    body = {"model": "tiny", "messages": MESSAGES, **tool(description="x" * 300_000)}
    response = await hermes.http.post(CHAT, json=body)
    check(response, 413, "invalid_request_error", "payload_too_large", "tools")


HARMLESS: list[dict[str, Any]] = [
    {"tools": None},
    {"tools": []},
    {"tools": TOOLS, "tool_choice": None},
    tool(strict=True, parameters={"not": {}}),
    {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": None},
    {"tools": [{"type": "nonsense"}], "tool_choice": "none"},
    tool(strict=False, description=None, parameters=None),
    said({"function": {"name": "f"}}),
    said({"function": {"name": "f", "arguments": ""}}),
    said({"function": {"name": "f", "arguments": {"a": 1}}}),
    {"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
    {"messages": [{"role": "tool", "content": "x"}]},
]


@pytest.mark.parametrize("body", HARMLESS)
async def test_what_is_harmless_is_taken(hermes: Stack, body: dict[str, Any]) -> None:
    response = await hermes.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, **body})
    assert response.status_code == 200, response.text


async def test_without_a_format_known_here_tools_are_refused(stack: Stack) -> None:
    response = await stack.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, "tools": TOOLS})
    message = check(response, 400, "invalid_request_error", "unsupported_parameter", "tools")
    assert "chat template of model 'tiny'" in message


def test_arguments_of_a_template_cannot_replace_its_tools() -> None:
    template = ChatTemplate("{{ tools | tojson }}", {})
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert template.render([], tools=tools, arguments={"tools": 1}) == json.dumps(tools)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_call_that_must_be_made_is_a_grammar(hermes: Stack, choice: Any) -> None:
    called = await whole(hermes, tools=[FULL, *TOOLS[:2]], tool_choice=choice)
    grammar = hermes.workers[0].submits[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "calls"
    assert "<tool_call>" in grammar.text
    assert (grammar.text.count('"const"') > 1) == (choice == "required")
    assert called["finish_reason"] in ("tool_calls", "stop")


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["answered"]}}}


async def test_beside_functions_that_may_be_called_an_answer_has_its_schema(hermes: Stack) -> None:
    def grammar() -> str:
        (asked,) = [s.sampling.grammar for s in hermes.workers[0].submits[-1:]]
        assert asked is not None
        assert asked.kind == "calls"
        return asked.text

    hermes.workers[0].script = say(CALL)
    called = await whole(hermes, response_format=FORMAT)
    assert called["finish_reason"] == "tool_calls"
    assert "<tool_call>" in grammar()
    assert '"answered"' in grammar()
    hermes.workers[0].script = say('{"answered": 1}')
    assert (await whole(hermes, response_format=FORMAT))["message"]["content"] == '{"answered": 1}'
    await whole(hermes, response_format=FORMAT, tool_choice="required")
    assert '"answered"' not in grammar(), "an answer is nothing but calls"
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "guided_regex": "a"}
    check(
        await hermes.http.post(CHAT, json=body), 400, "invalid_request_error", "unsupported_parameter", "guided_regex"
    )


async def test_calls_of_python_cannot_be_asked_for(make_stack: StackFactory, tmp_path: Path) -> None:
    stack = await stack_of(make_stack, tmp_path, templates.PYTHONIC)
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    check(await stack.http.post(CHAT, json=body), 400, "invalid_request_error", "unsupported_parameter", "tool_choice")
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "response_format": FORMAT}
    answer = await stack.http.post(CHAT, json=body)
    check(answer, 400, "invalid_request_error", "unsupported_parameter", "response_format.json_schema.schema")
