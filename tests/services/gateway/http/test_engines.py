"""Models with an engine of others: what is added and shown, and that it is asked for all that ours are."""

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


@pytest.fixture
async def served(make_stack: StackFactory, checkpoint: Path) -> Stack:
    """A gateway whose only model has another engine."""
    return await make_stack(record=replace(model_record(checkpoint), engine="vllm"))


async def test_what_ours_are_asked_for_reaches_its_worker(served: Stack) -> None:
    for path, extra in (
        (CHAT, {"response_format": {"type": "text"}, "priority": -1, "tool_choice": "none", "tools": []}),
        (TEXT, {"echo": True, "guided_json": None, "logit_bias": {"1": 1}}),
        (TEXT, {"echo": True, "logprobs": 0, "max_tokens": 0}),
        (CHAT, {"prompt_logprobs": 1}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
        (CHAT, {"response_format": JSON}),
        (CHAT, {"guided_regex": "a+"}),
        (TURNS, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ):
        response = await served.http.post(path, json={"model": "tiny", **BODIES[path], **extra})
        assert response.status_code == 200, response.text
    scored = [submit.sampling.prompt_logprobs for submit in served.workers[0].submits]
    assert scored == [None, None, 0, 1, None, None, None, None]


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
