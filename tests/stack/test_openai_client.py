"""The unmodified ``openai`` client against a real stack."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from compose.stack import Stack
from shared.load_feed import subscribe_load
from shared.messages.load import LoadReport
from tests.checkpoints import tiny_checkpoint
from tests.plain_http import http_client
from tests.stack.client import PATIENCE_S, PROMPT, bus, complete, openai_client
from tests.stack.conftest import MODEL
from tests.wait_until import WAIT_S, eventually

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

MESSAGES = [{"role": "user", "content": "Hello there"}]


@pytest_asyncio.fixture(loop_scope="module")
async def client(torch_stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(torch_stack) as connected:
        yield connected


async def test_greedy_tokens_are_those_of_transformers(client: AsyncOpenAI) -> None:
    path = tiny_checkpoint("llama")
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        output = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0
        )
    expected = Tokenizer.from_file(str(path / "tokenizer.json")).decode(output[0, len(PROMPT) :].tolist())
    assert await complete(client, MODEL) == expected


async def test_a_streamed_chat_is_the_whole_chat_in_pieces(client: AsyncOpenAI) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 5}
    whole = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
    events = [
        event
        async for event in await client.chat.completions.create(  # type: ignore[call-overload]
            **asked, stream=True, stream_options={"include_usage": True}
        )
    ]
    *pieces, last = events
    assert pieces[0].choices[0].delta.role == "assistant"
    assert all(piece.choices[0].delta.role is None for piece in pieces[1:])
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage == whole.usage


async def test_a_seed_repeats_and_another_differs(client: AsyncOpenAI) -> None:
    async def text(seed: int) -> str:
        answer = await client.completions.create(model=MODEL, prompt="abc", max_tokens=20, seed=seed)
        return answer.choices[0].text

    assert await text(1) == await text(1)
    assert await text(1) != await text(2)


async def test_a_stop_string_ends_the_text_before_it(client: AsyncOpenAI) -> None:
    whole = await complete(client, MODEL)
    stop = whole[6:8]
    answer = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0.0, stop=[stop])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"prompt": [5] * 100_000}, 400, "context_length_exceeded"),
        ({"max_tokens": 100_000}, 400, "context_length_exceeded"),
        ({"best_of": 3}, 400, "unsupported_parameter"),
        ({"temperature": -1}, 400, "bad_request"),
    ],
)
async def test_refusals_are_typed(client: AsyncOpenAI, changes: dict[str, object], status: int, code: str) -> None:
    asked = {"model": MODEL, "prompt": "abc", "max_tokens": 4} | changes
    with pytest.raises(openai.APIStatusError) as refused:
        await client.completions.create(**asked)  # type: ignore[call-overload]
    assert refused.value.status_code == status
    assert refused.value.code == code


async def test_a_malformed_body_is_a_400(torch_stack: Stack) -> None:
    async with http_client(timeout=PATIENCE_S) as http:
        answer = await http.post(f"{torch_stack.url}/v1/completions", content=b'{"model": ')
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_prompt_over_the_bus_payload_is_a_413(torch_stack: Stack) -> None:
    async with http_client(timeout=PATIENCE_S) as http:
        answer = await http.post(
            f"{torch_stack.url}/v1/completions", json={"model": MODEL, "prompt": "x" * 5_000_000, "max_tokens": 1}
        )
    assert answer.status_code == 413, answer.text
    assert answer.json()["error"]["code"] == "payload_too_large"


async def test_a_cancelled_stream_frees_its_blocks(torch_stack: Stack, client: AsyncOpenAI) -> None:
    reports: list[LoadReport] = []
    async with bus(torch_stack) as listening:
        await subscribe_load(listening, reports.append)
        events = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in events:
            break
        await eventually(lambda: any(r.kv_blocks_used for r in reports))
        await events.close()
        async with asyncio.timeout(WAIT_S):
            while not (fresh := await _fresh(reports)) or any(r.kv_blocks_used for r in fresh):
                pass


async def _fresh(reports: list[LoadReport]) -> list[LoadReport]:
    """Reports of the next 150 ms."""
    reports.clear()
    await asyncio.sleep(0.15)
    return list(reports)
