"""Every field takes every JSON value: an answer, or a refusal in the error shape, and never a fault of ours."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.gateway.request_bodies.schema_check import ENFORCED
from shared.engine_args import EngineArgs
from tests.services.gateway.conftest import Stack
from tests.services.gateway.http.test_admin import planner
from tests.services.gateway.http.test_refusals import CHAT, MESSAGES, TEXT

VALUES: list[Any] = [
    None, True, False, [], [[]], {}, {"a": {}}, "", "x", "x" * 500, 0, -1, 0.5, 1e308, -1e308, 10**399, -(10**399),
]  # fmt: skip

SHARED = [
    "model", "temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop",
    "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "logprobs", "stream", "stream_options", "n", "best_of", "user", "suffix",
    "tools", "tool_choice", "functions", "function_call", "response_format", "modalities", "audio", "prediction",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "prompt_logprobs", "min_p",
    "truncate_prompt_tokens", "web_search_options", "chat_template", "add_special_tokens", "reasoning_effort",
    "parallel_tool_calls", "priority", "metadata", "store", "service_tier",
]  # fmt: skip
GUIDES = ["json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern"]
CHAT_FIELDS = [
    *SHARED, "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt", "chat_template_kwargs",
]  # fmt: skip
TEXT_FIELDS = [*SHARED, "prompt", "echo"]
RESPONSES_FIELDS = [
    *SHARED, "input", "instructions", "max_output_tokens", "text", "truncation", "metadata", "store", "reasoning",
    "previous_response_id", "conversation", "background", "include", "prompt", "top_logprobs", "service_tier",
]  # fmt: skip
TURN_FIELDS = [
    *SHARED, "messages", "system", "stop_sequences", "thinking", "output_config", "metadata", "container",
    "mcp_servers", "context_management", "service_tier",
]  # fmt: skip
"""Of ``/v1/messages``."""
TOKENIZE_FIELDS = [
    "model", "prompt", "messages", "add_special_tokens", "return_token_strs", "add_generation_prompt",
    "chat_template_kwargs", "tools", "tool_choice", "chat_template", "continue_final_message",
]  # fmt: skip


def chat_bodies(value: Any) -> list[dict[str, Any]]:
    """Chat requests with ``value`` inside of their fields."""
    messages: list[Any] = [
        value,
        {"role": value, "content": "x"},
        {"role": "user", "content": value},
        {"role": "assistant", "content": value},
        {"role": "user", "content": [value]},
        {"role": "user", "content": [{"type": value, "text": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": value}]},
        {"role": "user", "content": "x", "name": value},
        {"role": "assistant", "content": "x", "tool_calls": value},
        {"role": "assistant", "content": "x", "tool_calls": [value]},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": value, "type": value, "function": value}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": value, "arguments": "{}"}}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": value}}]},
        {"role": "tool", "content": "x", "tool_call_id": value},
        {"role": "assistant", "content": "x", "reasoning_content": value},
        {"role": "assistant", "content": "x", "reasoning": value},
    ]
    tools: list[Any] = [
        value,
        {"type": value, "function": {"name": "f"}},
        {"type": "function", "function": value},
        {"type": "function", "function": {"name": value}},
        {"type": "function", "function": {"name": "f", "description": value}},
        {"type": "function", "function": {"name": "f", "parameters": value}},
        {"type": "function", "function": {"name": "f", "parameters": {"type": value}, "strict": value}},
    ]
    return [
        *({"messages": [message]} for message in messages),
        *({"messages": MESSAGES, "tools": [tool]} for tool in tools),
        {"messages": MESSAGES, "tools": tools[1:2], "tool_choice": value},
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": value},
        {"messages": MESSAGES, "chat_template_kwargs": {"documents": value, "bos_token": value, "thinking": value}},
        {"messages": MESSAGES, "reasoning_effort": value, "chat_template_kwargs": {"tools": value}},
        {"messages": MESSAGES, "response_format": {"type": value}},
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": value}},
        {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": value}}},
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": value, "schema": {}}},
        },
        {"messages": MESSAGES, "guided_choice": [value]},
        *({"messages": MESSAGES, "guided_json": {"type": "object", keyword: value}} for keyword in sorted(ENFORCED)),
        *({"messages": MESSAGES, "structured_outputs": {key: value}} for key in GUIDES),
        {"messages": MESSAGES, "modalities": [value]},
    ]


def text_bodies(value: Any) -> list[dict[str, Any]]:
    """Text completion requests with ``value`` inside of their fields."""
    return [
        {"prompt": [value]},
        {"prompt": [[value]]},
        {"prompt": [1, value]},
        {"prompt": "a", "stop": [value]},
        {"prompt": "a", "stop_token_ids": [value]},
        {"prompt": "a", "logit_bias": {"1": value}},
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": value}},
        {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": value}},
    ]


def responses_bodies(value: Any) -> list[dict[str, Any]]:
    """Bodies of ``/v1/responses`` with ``value`` inside of their fields."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items: list[Any] = [
        value,
        {"type": value},
        {"role": value, "content": "x"},
        {"role": "user", "content": value},
        {"role": "user", "content": [value]},
        {"role": "user", "content": [{"type": value, "text": "x"}]},
        {"role": "user", "content": [{"type": "input_text", "text": value}]},
        *({**call, name: value} for name in call),
        {"type": "function_call_output", "call_id": value, "output": "x"},
        {"type": "function_call_output", "call_id": "c", "output": value},
        {"type": "function_call_output", "call_id": "c", "output": [value]},
        {"type": "reasoning", "content": value},
        {"type": "reasoning", "content": [value]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": value}]},
    ]
    tools: list[Any] = [value, *({"type": "function", "name": "f", n: value} for n in ("type", "name", "parameters"))]
    return [
        *({"input": [item]} for item in items),
        *({"input": "a", "tools": [tool]} for tool in tools),
        {"input": "a", "reasoning": {"effort": value}},
        {"input": "a", "text": {"format": value}},
        {"input": "a", "text": {"format": {"type": value}}},
        {"input": "a", "metadata": {"a": value}},
    ]


def turn_bodies(value: Any) -> list[dict[str, Any]]:
    """Bodies of ``/v1/messages`` with ``value`` inside of their fields."""
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    user: list[Any] = [value, {"type": "text", "text": value}, *({**result, name: value} for name in result)]
    turns: list[Any] = [
        value,
        {"role": value, "content": "x"},
        {"role": "user", "content": value},
        *({"role": "user", "content": [block]} for block in (*user, {**result, "content": [value]})),
        *({"role": "assistant", "content": [{**use, name: value}]} for name in use),
    ]
    tools: list[Any] = [value, *({"name": "f", "input_schema": {}, n: value} for n in ("type", "name", "input_schema"))]
    return [
        *({"messages": [turn, *MESSAGES]} for turn in turns),
        *({"messages": MESSAGES, "tools": [tool]} for tool in tools),
        {"messages": MESSAGES, "system": [value]},
        {"messages": MESSAGES, "stop_sequences": [value]},
        {"messages": MESSAGES, "tool_choice": {"type": value}},
        {"messages": MESSAGES, "thinking": {"type": value}},
        {"messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": value}},
        {"messages": MESSAGES, "output_config": {"format": value}},
    ]


def fault(response: httpx.Response) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if response.status_code in (200, 201):
        return ""
    if not 400 <= response.status_code < 500:
        return f"{response.status_code} {response.text}"
    body = response.json()
    error = body.get("error", {})
    if body.get("type") == "error" and set(error) == {"type", "message"} and len(error["message"]) <= 1000:
        # Anthropic's form.
        return ""
    if set(error) != {"message", "type", "param", "code"} or len(error["message"]) > 1000:
        return response.text
    return ""


async def faults(stack: Stack, path: str, bodies: list[dict[str, Any]]) -> list[str]:
    found = []
    for body in bodies:
        wrong = fault(await stack.http.post(path, json={"model": "tiny", **body}))
        if wrong:
            found.append(f"{str(body)[:120]}: {wrong[:300]}")
    return found


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:12])
async def test_no_json_value_in_any_chat_field_is_a_fault(stack: Stack, value: Any) -> None:
    bodies = [{"messages": MESSAGES, field: value} for field in CHAT_FIELDS] + chat_bodies(value)
    assert await faults(stack, CHAT, bodies) == []


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:12])
async def test_no_json_value_in_any_completion_field_is_a_fault(stack: Stack, value: Any) -> None:
    bodies = [{"prompt": "a", field: value} for field in TEXT_FIELDS] + text_bodies(value)
    assert await faults(stack, TEXT, bodies) == []


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:12])
async def test_no_json_value_in_any_field_of_a_response_is_a_fault(stack: Stack, value: Any) -> None:
    bodies = [{"input": "a", field: value} for field in RESPONSES_FIELDS] + responses_bodies(value)
    assert await faults(stack, "/v1/responses", bodies) == []


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:12])
async def test_no_json_value_in_any_field_of_messages_is_a_fault(stack: Stack, value: Any) -> None:
    bodies = [{"messages": MESSAGES, "max_tokens": 5, field: value} for field in TURN_FIELDS]
    bodies += [{"max_tokens": 5, **body} for body in turn_bodies(value)]
    assert await faults(stack, "/v1/messages", bodies) == []
    assert await faults(stack, "/v1/messages/count_tokens", bodies) == []


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:12])
async def test_no_json_value_in_any_admin_field_is_a_fault(stack: Stack, value: Any) -> None:
    await planner(stack)
    scale = [{"instances": 1, field: value} for field in ("instances", "hold_s")]
    add = [{"path": "/m", field: value} for field in ("path", "name", "min_instances", "max_instances", "keep_alive_s")]
    add += [{"path": "/m", "engine": "vllm", field: value} for field in ("engine", "engine_args")]
    add += [{"path": "/m", "engine": "vllm", "engine_args": {name: value}} for name in EngineArgs.__struct_fields__]
    settings = (
        "min_instances",
        "max_instances",
        "slo_ttft_s",
        "slo_tbt_s",
        "keep_alive_s",
        "served_as",
        "weight",
        "advise",
    )
    for field in settings:
        assert fault(await stack.http.patch("/admin/models/tiny", json={field: value})) == "", field
    assert await faults(stack, "/admin/models/tiny/scale", scale) == []
    assert await faults(stack, "/admin/models", add) == []


@pytest.mark.parametrize("role", [[], {}, [[]], 10**399])
async def test_a_role_that_is_no_string_is_named(stack: Stack, role: Any) -> None:
    response = await stack.http.post(CHAT, json={"model": "tiny", "messages": [{"role": role, "content": "x"}]})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "bad_request", "messages[0].role")


@pytest.mark.parametrize("field", ["temperature", "top_p", "frequency_penalty", "presence_penalty"])
async def test_a_number_beyond_floats_is_named(stack: Stack, field: str) -> None:
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": "a", field: 10**399})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "bad_request", field)
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": [0]}}),
        ("guided_json", {"guided_json": {"const": 0}}),
        ("tools[0].function.parameters", {"tools": [{"function": {"parameters": {"a": 0}}}]}),
    ],
)
async def test_a_number_that_is_too_large_is_said_to_be_one(stack: Stack, param: str, body: dict[str, Any]) -> None:
    written = json.dumps({"model": "tiny", "messages": MESSAGES, **body}).replace("0", "9" * 5000)
    response = await stack.http.post(CHAT, content=written)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"] == f"{param} has a number that is too large for 64 bits"
