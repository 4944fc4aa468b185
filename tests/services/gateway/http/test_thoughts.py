"""Thoughts of models that think: told apart on each route, whole and streamed, and given back to the template."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from shared.messages.generation import Grammar, TokenLogprobs
from tests.services.gateway.cluster import say
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.core.tools import templates
from tests.services.gateway.http.test_refusals import CHAT, MESSAGES
from tests.services.gateway.http.test_tools import CALL, TOOLS, stack_of

THOUGHT, ANSWER = "Well,\n\nthey greet.", "Hi!"
WRITTEN = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
BEGIN, END = 258, 259
MARKS = ("<think>", "</think>")


@pytest.fixture
async def qwen(make_stack: StackFactory, tmp_path: Path) -> Stack:
    stack = await stack_of(make_stack, tmp_path / "qwen", templates.QWEN3)
    stack.workers[0].script = say(WRITTEN)
    return stack


@pytest.fixture(params=["qwen", "deepseek"])
async def thinker(make_stack: StackFactory, tmp_path: Path, request: pytest.FixtureRequest) -> Stack:
    """A model that opens its thought itself, or one whose template does."""
    is_qwen = request.param == "qwen"
    template = templates.QWEN3 if is_qwen else templates.DEEPSEEK_R1
    stack = await stack_of(make_stack, tmp_path / "thinker", template)
    stack.workers[0].script = say(WRITTEN if is_qwen else WRITTEN.removeprefix("<think>\n"))
    return stack


@pytest.fixture
async def deepseek(make_stack: StackFactory, tmp_path: Path) -> Stack:
    stack = await stack_of(make_stack, tmp_path / "deepseek", templates.DEEPSEEK_R1)
    stack.workers[0].script = say(WRITTEN.removeprefix("<think>\n"))
    return stack


async def ask(stack: Stack, path: str = CHAT, **extra: Any) -> Any:
    body = {"model": "tiny", "messages": MESSAGES, **extra}
    response = await stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


async def whole(stack: Stack, **extra: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (await ask(stack, **extra)).json()
    return answer


async def chunks(stack: Stack, **extra: Any) -> list[dict[str, Any]]:
    lines = (await ask(stack, stream=True, **extra)).text.removesuffix("\n\n").split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(found: list[dict[str, Any]]) -> tuple[str, str, int, str]:
    """Thought, text, how many calls began, and the reason of the end."""
    thought, text, num_calls, reason = "", "", 0, ""
    for chunk in found:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            piece = delta.get("reasoning_content", "")
            assert piece == delta.get("reasoning", "")
            assert not (piece and (text or num_calls))
            thought, text = thought + piece, text + (delta.get("content") or "")
            num_calls += sum("id" in call for call in delta.get("tool_calls", []))
            reason = choice["finish_reason"] or ""
    return thought, text, num_calls, reason


async def prompt_of(stack: Stack, path: str = CHAT, **extra: Any) -> str:
    stack.workers[0].submits.clear()
    await ask(stack, path, **extra)
    return bytes(i for i in stack.workers[0].submits[0].prompt_token_ids if i < 256).decode()


async def test_a_chat_has_the_thought_beside_the_answer(thinker: Stack) -> None:
    stack = thinker
    answer = await whole(stack)
    message = answer["choices"][0]["message"]
    assert message == {
        "role": "assistant", "content": ANSWER, "refusal": None, "reasoning_content": THOUGHT, "reasoning": THOUGHT,
    }  # fmt: skip
    num_thought = len(THOUGHT) + 2
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] >= num_thought
    found = await chunks(stack, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert found[-1]["usage"] == answer["usage"]
    assert joined(found) == (THOUGHT, ANSWER, 0, "stop")
    usages = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in found[1:]]
    assert usages == sorted(usages)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(await chunks(stack)) == (THOUGHT, ANSWER, 0, "stop")


async def test_each_token_of_a_thought_that_adds_to_it_has_an_event(deepseek: Stack) -> None:
    deepseek.workers[0].script = say("ab</think>cd")
    deltas = [chunk["choices"][0]["delta"] for chunk in (await chunks(deepseek))[1:]]
    assert deltas == [
        {"reasoning_content": "a", "reasoning": "a"}, {"reasoning_content": "b", "reasoning": "b"},
        {"content": "c"}, {"content": "d"},
    ]  # fmt: skip


async def test_what_is_not_thought_is_an_answer_as_ever(qwen: Stack) -> None:
    qwen.workers[0].script = say("Hi!")
    answer = await whole(qwen)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hi!", "refusal": None}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert joined(await chunks(qwen)) == ("", "Hi!", 0, "stop")


async def test_a_thought_that_is_cut_off_is_all_there_is(qwen: Stack) -> None:
    size = len("<think>\nWell")
    answer = (await whole(qwen, max_tokens=size))["choices"][0]
    assert (answer["message"]["content"], answer["message"]["reasoning_content"]) == (None, "Well")
    assert answer["finish_reason"] == "length"
    assert joined(await chunks(qwen, max_tokens=size)) == ("Well", "", 0, "length")


@pytest.mark.parametrize("extra", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
async def test_with_thinking_off_nothing_is_a_thought(qwen: Stack, extra: dict[str, Any]) -> None:
    assert (await prompt_of(qwen, **extra)).endswith("<think>\n\n</think>\n\n")
    answer = await whole(qwen, **extra)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": WRITTEN, "refusal": None}
    assert "completion_tokens_details" not in answer["usage"]
    assert joined(await chunks(qwen, **extra)) == ("", WRITTEN, 0, "stop")


async def test_a_models_setting_names_the_parser(qwen: Stack) -> None:
    async def found(name: str, written: str) -> tuple[str | None, str | None]:
        answer = await qwen.http.patch("/admin/models/tiny", json={"reasoning_parser": name})
        assert answer.json()["reasoning_parser"] == name
        qwen.workers[0].script = say(written)
        message = (await whole(qwen))["choices"][0]["message"]
        return message.get("reasoning_content"), message["content"]

    assert await found("none", WRITTEN) == (None, WRITTEN)
    assert await found("deepseek_r1", "hm</think>hi") == ("hm", "hi")
    assert await found("qwen3", "hm</think>hi") == (None, "hm</think>hi")
    assert await found("auto", WRITTEN) == (THOUGHT, ANSWER)


async def test_a_parser_may_be_set_where_a_template_knows_of_no_thoughts(stack: Stack) -> None:
    stack.workers[0].script = say(WRITTEN)
    assert (await whole(stack))["choices"][0]["message"]["content"] == WRITTEN
    await stack.http.patch("/admin/models/tiny", json={"reasoning_parser": "qwen3"})
    assert (await whole(stack))["choices"][0]["message"]["content"] == ANSWER
    text = (await stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})).json()
    assert text["choices"][0]["text"] == WRITTEN[:16]


async def test_calls_are_looked_for_behind_the_thought(qwen: Stack) -> None:
    qwen.workers[0].script = say(f"<think>\nI may call {CALL}.\n</think>\n\n{CALL}")
    choice = (await whole(qwen, tools=TOOLS))["choices"][0]
    assert choice["message"]["reasoning_content"] == f"I may call {CALL}."
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert joined(await chunks(qwen, tools=TOOLS)) == (f"I may call {CALL}.", "", 1, "tool_calls")
    qwen.workers[0].script = say(f"<think>\nI may call {CALL}.")
    assert joined(await chunks(qwen, tools=TOOLS)) == (f"I may call {CALL}.", "", 0, "stop")


@pytest.mark.parametrize("skip", [True, False])
async def test_marks_that_are_special_tokens_are_read(make_stack: StackFactory, tmp_path: Path, skip: bool) -> None:
    stack = await stack_of(make_stack, tmp_path / "special", templates.QWEN3, *MARKS)
    stack.workers[0].script = lambda submit: [BEGIN, *THOUGHT.encode(), END, *b"\n\nHi!"]
    answer = await whole(stack, skip_special_tokens=skip)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, ANSWER)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT)
    assert joined(await chunks(stack, skip_special_tokens=skip)) == (THOUGHT, ANSWER, 0, "stop")
    # With thinking off a special token is hidden, and all is the answer.
    off = await whole(stack, reasoning_effort="none")
    assert off["choices"][0]["message"]["content"] == f"{THOUGHT}\n\nHi!"


async def test_logprobs_are_of_every_token_once(deepseek: Stack) -> None:
    deepseek.workers[0].logprobs = TokenLogprobs(logprob=-0.5, top=())
    written = "ab\n</think>\ncd"
    deepseek.workers[0].script = say(written)
    choice = (await whole(deepseek, logprobs=True))["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list(written)
    found = await chunks(deepseek, logprobs=True)
    entries = [e for c in found for choice in c["choices"] for e in (choice["logprobs"] or {}).get("content", [])]
    assert [entry["token"] for entry in entries] == list(written)
    assert joined(found)[:2] == ("ab", "cd")


async def test_choices_think_each_for_itself(qwen: Stack) -> None:
    answer = await whole(qwen, n=2)
    assert [c["message"]["reasoning_content"] for c in answer["choices"]] == [THOUGHT, THOUGHT]
    one = (await whole(qwen))["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * one


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_thoughts_of_a_conversation_reach_the_template(qwen: Stack, name: str) -> None:
    said = [*MESSAGES, {"role": "assistant", "content": "Hi!", name: "hm"}, {"role": "user", "content": "so"}]
    assert "<|im_start|>assistant\n<think>\nhm\n</think>\n\nHi!<|im_end|>" in await prompt_of(qwen, messages=said)
    said[-2] |= {name: None}
    assert "<think>" not in await prompt_of(qwen, messages=said)
    said = [{"role": "user", "content": "so", name: "hm"}]
    assert "hm" not in await prompt_of(qwen, messages=said)


async def test_efforts_reach_the_template_and_switches_say_more(qwen: Stack) -> None:
    for effort in ("minimal", "low", "medium", "high", "xhigh"):
        prompt = await prompt_of(qwen, reasoning_effort=effort)
        assert f"effort {effort}\n" in prompt
        assert prompt.endswith("assistant\n")
    assert (await prompt_of(qwen, reasoning_effort="none")).endswith("</think>\n\n")
    on = {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "x"}}
    prompt = await prompt_of(qwen, reasoning_effort="none", **on)
    assert prompt.endswith("effort none\n<|im_start|>assistant\n")
    assert "effort" not in await prompt_of(qwen, reasoning_effort=None)


async def test_tokenize_counts_the_prompt_that_a_chat_has(qwen: Stack) -> None:
    prompt = await prompt_of(qwen, reasoning_effort="none")
    body = {"model": "tiny", "messages": MESSAGES, "reasoning_effort": "none"}
    assert (await qwen.http.post("/tokenize", json=body)).json()["count"] == len(prompt)


async def grammar_of(stack: Stack, **extra: Any) -> Grammar:
    stack.workers[0].submits.clear()
    await ask(stack, **extra)
    grammar = stack.workers[0].submits[0].sampling.grammar
    assert grammar is not None
    return grammar


async def test_what_an_answer_must_be_begins_behind_the_thought(
    make_stack: StackFactory, tmp_path: Path, deepseek: Stack, qwen: Stack
) -> None:
    choice = {"guided_choice": ["Hi!", "no"]}
    open_ = await grammar_of(deepseek, **choice)
    assert (open_.kind, open_.text) == ("choice", '["Hi!","no"]')
    assert open_.before.startswith("start: thought gap? @answer\n")
    may = await grammar_of(qwen, **choice)
    assert may.before.startswith("start: (open thought gap?)? @answer\n")
    assert not (await grammar_of(qwen, **choice, reasoning_effort="none")).before
    forced = await grammar_of(qwen, tools=TOOLS, tool_choice="required")
    assert (forced.kind, forced.before) == ("calls", may.before)
    special = await stack_of(make_stack, tmp_path / "special", templates.QWEN3, *MARKS, "<tool_call>")
    found = await grammar_of(special, response_format={"type": "json_object"})
    assert f"(open | <[{BEGIN}]>) (thought | TEXT? <[{END}]>)" in found.before
    assert f"<[{END + 1}]>" in (await grammar_of(special, tools=TOOLS, tool_choice="required")).text


async def test_a_grammar_of_a_model_that_does_not_think_has_nothing_before_it(stack: Stack) -> None:
    assert (await grammar_of(stack, guided_choice=["a"])).before == ""


# Responses


async def response_events(stack: Stack, **extra: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "input": "hi", "stream": True, **extra}
    text = (await stack.http.post("/v1/responses", json=body)).text
    found = [json.loads(block.split("\ndata: ")[1]) for block in text.removesuffix("\n\n").split("\n\n")]
    for event in found:
        TypeAdapter[Any](ResponseStreamEvent).validate_python(event)
    return found


async def test_a_response_has_an_item_of_reasoning(qwen: Stack) -> None:
    body = {"model": "tiny", "input": "hi", "reasoning": {"effort": "high", "summary": "auto"}}
    raw = await qwen.http.post("/v1/responses", json=body)
    Response.model_validate_json(raw.content)
    answer = raw.json()
    thought, said = answer["output"]
    assert thought["id"].startswith("rs_")
    assert {name: thought[name] for name in ("type", "status", "summary", "content")} == {
        "type": "reasoning", "status": "completed", "summary": [],
        "content": [{"type": "reasoning_text", "text": THOUGHT}],
    }  # fmt: skip
    assert said["content"][0]["text"] == ANSWER
    assert answer["reasoning"] == {"effort": "high", "summary": None}
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > len(THOUGHT)
    found = await response_events(qwen, reasoning={"effort": "high"})
    names = [event["type"].removeprefix("response.") for event in found]
    assert [name for at, name in enumerate(names) if not at or name != names[at - 1]] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(e["delta"] for e in found if e["type"] == "response.reasoning_text.delta") == THOUGHT
    last = found[-1]["response"]

    def shown(response: dict[str, Any]) -> list[Any]:
        return [{k: v for k, v in item.items() if k != "id"} for item in response["output"]]

    assert (shown(last), last["usage"]) == (shown(answer), answer["usage"])


async def test_a_response_that_is_cut_in_its_thought_has_nothing_else(qwen: Stack) -> None:
    size = len("<think>\nWell")
    answer = (
        await qwen.http.post("/v1/responses", json={"model": "tiny", "input": "a", "max_output_tokens": size})
    ).json()
    [item] = answer["output"]
    assert (answer["status"], item["type"], item["status"]) == ("incomplete", "reasoning", "incomplete")
    last = (await response_events(qwen, max_output_tokens=size))[-1]
    assert (last["type"], [i["type"] for i in last["response"]["output"]]) == ("response.incomplete", ["reasoning"])


async def test_items_of_reasoning_begin_the_next_message_of_the_assistant(qwen: Stack) -> None:
    answer = (await qwen.http.post("/v1/responses", json={"model": "tiny", "input": "hi"})).json()
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    items = [
        {"role": "user", "content": "hi"},
        *answer["output"],
        {"role": "user", "content": "and?"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "short"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "long"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "12"},
    ]
    assert await prompt_of(qwen, "/v1/responses", messages=None, input=items) == (
        f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n<think>\nshort\nlong\n</think>\n\n[weather]<|im_end|>\n"
        "<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"
    )
    none = await prompt_of(qwen, "/v1/responses", messages=None, input="hi", reasoning={"effort": "none"})
    assert none.endswith("</think>\n\n")


# Messages

MESSAGES_PATH = "/v1/messages"


async def test_a_message_has_a_block_of_thinking(qwen: Stack) -> None:
    answer = (await ask(qwen, MESSAGES_PATH, max_tokens=99, thinking={"type": "enabled", "budget_tokens": 50})).json()
    assert answer["content"] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": ""}, {"type": "text", "text": ANSWER},
    ]  # fmt: skip
    text = (await ask(qwen, MESSAGES_PATH, max_tokens=99, stream=True)).text
    found = [json.loads(block.split("\ndata: ")[1]) for block in text.removesuffix("\n\n").split("\n\n")]
    starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert starts == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""}]
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(d["thinking"] for d in deltas if d["type"] == "thinking_delta") == THOUGHT
    assert "".join(d["text"] for d in deltas if d["type"] == "text_delta") == ANSWER
    assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1]


async def test_thinking_is_switched_and_blocks_go_back_to_the_template(qwen: Stack) -> None:
    for kind, off in (("enabled", False), ("adaptive", False), ("disabled", True)):
        prompt = await prompt_of(qwen, MESSAGES_PATH, max_tokens=99, thinking={"type": kind})
        assert prompt.endswith("</think>\n\n") == off
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "y"},
        {"type": "text", "text": "Hi!"},
        {"type": "tool_use", "id": "c", "name": "weather", "input": {}},
    ]
    said = [*MESSAGES, {"role": "assistant", "content": blocks}, {"role": "user", "content": "so"}]
    prompt = await prompt_of(qwen, MESSAGES_PATH, max_tokens=99, messages=said)
    assert "<|im_start|>assistant\n<think>\nhm\n</think>\n\nHi![weather]<|im_end|>\n" in prompt
    counted = await qwen.http.post(f"{MESSAGES_PATH}/count_tokens", json={"model": "tiny", "messages": said})
    assert counted.json() == {"input_tokens": len(prompt)}


@pytest.mark.skipif(importlib.util.find_spec("anthropic") is None, reason="the client is not installed")
async def test_anthropics_client_reads_the_thought(qwen: Stack) -> None:
    import anthropic

    async with (
        anthropic.AsyncAnthropic(base_url=qwen.url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="tiny", max_tokens=99, messages=MESSAGES) as stream,  # type: ignore[arg-type]
    ):
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert getattr(final.content[0], "thinking", None) == THOUGHT


async def test_openais_client_reads_the_thought(qwen: Stack) -> None:
    answer = await qwen.openai.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.reasoning_content == THOUGHT
    assert answer.usage.completion_tokens_details.reasoning_tokens > len(THOUGHT)
    stream = await qwen.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    pieces = [getattr(chunk.choices[0].delta, "reasoning_content", "") async for chunk in stream]
    assert "".join(pieces) == THOUGHT
    async with qwen.openai.responses.stream(model="tiny", input="hi") as events:
        async for _ in events:
            pass
        final = await events.get_final_response()
    assert (final.output_text, final.output[0].content[0].text) == (ANSWER, THOUGHT)
