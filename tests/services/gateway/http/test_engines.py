"""Models with an engine of others: what is added, shown, and refused of their requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shared.engine_args import EngineArgs
from shared.messages.registry import AddModel
from tests.services.gateway.checkpoint import model_record
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_refusals import CHAT, MESSAGES, TEXT, check

SCHEMA: dict[str, Any] = {"type": "object"}
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
RESPONSES, TURNS = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    TEXT: {"prompt": "a", "max_tokens": 1},
    RESPONSES: {"input": "a", "max_output_tokens": 1},
    TURNS: {"messages": MESSAGES, "max_tokens": 1},
}
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, "priority", {"priority": -1}),
    (TEXT, "priority", {"priority": 1}),
    (CHAT, "prompt_logprobs", {"prompt_logprobs": 1}),
    (TEXT, "prompt_logprobs", {"prompt_logprobs": 0}),
    (TEXT, "echo", {"echo": True, "logprobs": 0}),
]


@pytest.fixture
async def served(make_stack: StackFactory, checkpoint: Path) -> Stack:
    """A gateway whose only model has another engine."""
    return await make_stack(record=replace(model_record(checkpoint), engine="vllm"))


@pytest.mark.parametrize(("path", "param", "extra"), REFUSED)
async def test_what_the_engine_does_not_take_is_refused_by_name(
    served: Stack, path: str, param: str, extra: dict[str, Any]
) -> None:
    response = await served.http.post(path, json={"model": "tiny", **BODIES[path], **extra})
    error = response.json()["error"]
    # Anthropic's errors have no param, and name it in the message.
    assert response.status_code == 400
    assert error["message"].startswith(f"{param}:")
    assert error.get("param", param) == param
    assert not served.workers[0].submits


async def test_what_it_takes_reaches_the_worker(served: Stack) -> None:
    for path, extra in (
        (CHAT, {"response_format": {"type": "text"}, "priority": 0, "tool_choice": "none", "tools": []}),
        (TEXT, {"echo": True, "guided_json": None, "logit_bias": {"1": 1}}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
        (CHAT, {"response_format": JSON}),
        (CHAT, {"guided_regex": "a+"}),
        (TURNS, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ):
        response = await served.http.post(path, json={"model": "tiny", **BODIES[path], **extra})
        assert response.status_code == 200, response.text
    assert len(served.workers[0].submits) == 6


@pytest.mark.parametrize(("path", "extra"), [(CHAT, {"priority": 1}), (CHAT, {"guided_choice": ["a"]})])
async def test_the_same_is_taken_of_a_model_of_ours(stack: Stack, path: str, extra: dict[str, Any]) -> None:
    response = await stack.http.post(path, json={"model": "tiny", **BODIES[path], **extra})
    assert response.status_code == 200, response.text


async def test_a_models_engine_and_its_arguments_reach_the_pool(stack: Stack) -> None:
    body = {"path": "/m", "engine": "vllm", "engine_args": {"max_model_len": 4096, "dtype": "float16"}}
    assert (await stack.http.post("/admin/models", json=body)).status_code == 200
    for nothing in ({}, {"engine": None, "engine_args": None}, {"engine": "", "engine_args": {}}):
        assert (await stack.http.post("/admin/models", json={"path": "/m", **nothing})).status_code == 200
    args = EngineArgs(max_model_len=4096, dtype="float16")
    assert stack.pool.added == [AddModel(path="/m", engine="vllm", engine_args=args), *[AddModel(path="/m")] * 3]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"engine": "sglang"}, "engine"),
        ({"engine": 1}, "engine"),
        ({"engine": "x" * 1000}, "engine"),
        ({"engine_args": {"max_num_seqs": 1}}, "engine_args"),
        ({"engine": "vllm", "engine_args": []}, "engine_args"),
        ({"engine": "vllm", "engine_args": {"trust_remote_code": True}}, "engine_args.trust_remote_code"),
        ({"engine": "vllm", "engine_args": {"max_num_seqs": "4"}}, "engine_args.max_num_seqs"),
    ],
)
async def test_wrong_engines_and_arguments_do_not_reach_the_pool(
    stack: Stack, extra: dict[str, Any], param: str
) -> None:
    response = await stack.http.post("/admin/models", json={"path": "/m", **extra})
    check(response, 400, "invalid_request_error", "bad_request", param)
    assert stack.pool.added == []


async def test_an_engine_is_not_changed(stack: Stack) -> None:
    response = await stack.http.patch("/admin/models/tiny", json={"engine": "vllm", "weight": 2})
    assert (response.status_code, response.json()["engine"]) == (200, "")


async def test_it_is_shown(make_stack: StackFactory, checkpoint: Path) -> None:
    args = EngineArgs(kv_cache_gib=1.5)
    stack = await make_stack(record=replace(model_record(checkpoint), engine="vllm", engine_args=args))
    [model] = (await stack.http.get("/admin/models")).json()["models"]
    assert (model["engine"], model["engine_args"]) == ("vllm", {"kv_cache_gib": 1.5})
