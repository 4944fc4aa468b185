"""Prompts that are too large for the bus: refused by their length, or by the message that they make."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.tokenizer import ModelTokenizer
from tests.services.gateway.conftest import StackFactory
from tests.services.gateway.http.test_refusals import CHAT, TEXT, check
from tests.shared.bus.memory import MemoryBroker


async def test_a_prompt_over_the_buss_payload_is_413(make_stack: StackFactory) -> None:
    stack = await make_stack(broker=MemoryBroker(max_payload_bytes=1900))
    fits = await stack.http.post(TEXT, json={"model": "tiny", "prompt": [1] * 10})
    assert fits.status_code == 200
    # 230 ids of two bytes each, and as many again under a logit bias, exceed the small limit set here.
    bias = {str(i): 1.5 for i in range(200)}
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": [200] * 200, "logit_bias": bias})
    check(response, 413, "invalid_request_error", "payload_too_large")


OVERSIZED: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": "x" * 2001}, "prompt"),
    (TEXT, {"prompt": "\u00e9" * 1001}, "prompt"),
    (TEXT, {"prompt": ["a", "x" * 2001]}, "prompt"),
    (TEXT, {"prompt": [1] * 2001}, "prompt"),
    (TEXT, {"prompt": [[1], [-1] * 2001]}, "prompt"),
    (TEXT, {"prompt": [1] * 2001, "echo": True}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 1990}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 200}] * 10}, "messages"),
]


@pytest.mark.parametrize(("path", "body", "param"), OVERSIZED)
async def test_an_oversized_prompt_is_413_before_anything_is_tokenized(
    make_stack: StackFactory, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    stack = await make_stack(broker=MemoryBroker(max_payload_bytes=2000))

    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("the prompt reached the tokenizer")

    for name in ("encode_all", "decode"):
        monkeypatch.setattr(ModelTokenizer, name, touched)
    response = await stack.http.post(path, json={"model": "tiny", "max_tokens": 1, **body})
    message = check(response, 413, "invalid_request_error", "payload_too_large", param)
    assert "at most 2000" in message
    assert not stack.workers[0].submits


async def test_prompts_that_are_oversized_only_together_are_taken(make_stack: StackFactory) -> None:
    stack = await make_stack(broker=MemoryBroker(max_payload_bytes=2000))
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": ["x" * 200] * 12, "max_tokens": 1})
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 12


async def test_a_text_of_just_the_limit_is_judged_by_its_tokens(make_stack: StackFactory) -> None:
    stack = await make_stack(broker=MemoryBroker(max_payload_bytes=2000))
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": "x" * 2000, "max_tokens": 1})
    check(response, 400, "invalid_request_error", "context_length_exceeded", "prompt")
