"""Every list in a body has a limit, and what is refused is refused before anything is made of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from services.gateway.request_bodies.body import refuse_many_elements
from shared.errors import BadRequest
from tests.plain_http import http_client
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.http.test_connections import Client
from tests.services.gateway.http.test_refusals import CHAT, MESSAGES, TEXT, check

TOO_LONG: list[tuple[str, str, dict[str, Any], str]] = [
    (TEXT, "stop_token_ids", {"prompt": "a", "stop_token_ids": [1] * 1025}, "at most 1024"),
    (TEXT, "stop", {"prompt": "a", "stop": ["x"] * 65}, "at most 64"),
    (TEXT, "logit_bias", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "at most 1024"),
    (TEXT, "prompt", {"prompt": ["a"] * 257}, "at most 256"),
    (TEXT, "prompt", {"prompt": [[1]] * 257}, "at most 256"),
    (CHAT, "messages", {"messages": MESSAGES * 4097}, "at most 4096"),
    (CHAT, "messages[0].content", {"messages": [{"role": "user", "content": ["a"] * 1025}]}, "at most 1024"),
    (CHAT, "messages", {"messages": [{"role": "user", "content": ["a"] * 1024}] * 70}, "at most 65536"),
]


@pytest.mark.parametrize(("path", "param", "body", "limit"), TOO_LONG)
async def test_a_list_that_is_too_long_is_named_with_its_limit(
    stack: Stack, path: str, param: str, body: dict[str, Any], limit: str
) -> None:
    response = await stack.http.post(path, json={"model": "tiny", **body})
    assert limit in check(response, 400, "invalid_request_error", "bad_request", param)
    assert not stack.workers[0].submits


async def test_template_arguments_are_bounded_in_bytes(stack: Stack) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"a": "x" * 65_536}}
    message = check(
        await stack.http.post(CHAT, json=body),
        413,
        "invalid_request_error",
        "payload_too_large",
        "chat_template_kwargs",
    )
    assert "at most 65536" in message


async def test_a_field_of_megabytes_is_refused_before_it_is_decoded(stack: Stack) -> None:
    content = b'{"model": "tiny", "prompt": "a", "stop_token_ids": [' + b"1," * 3_999_000 + b"1]}"
    response = await stack.http.post(TEXT, content=content)
    message = check(response, 413, "invalid_request_error", "payload_too_large", "stop_token_ids")
    assert "7998003 bytes; at most 1048576" in message


async def test_lists_of_the_limits_length_are_taken(stack: Stack) -> None:
    body = {
        "model": "tiny",
        "prompt": ["a"] * 256,
        "max_tokens": 1,
        "stop": ["\u0416" * 1024] * 64,
        "stop_token_ids": [1] * 1024,
        "logit_bias": {str(i): 1 for i in range(300)},
    }
    response = await stack.http.post(TEXT, json=body)
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 256


async def test_commas_of_a_text_are_no_items(stack: Stack) -> None:
    text = ',"\\' * 50_000
    response = await stack.http.post(CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": text}]})
    check(response, 400, "invalid_request_error", "context_length_exceeded", "messages")


def test_items_are_counted_outside_of_strings() -> None:
    refuse_many_elements(b'["a,a,a,\\",a\\\\", 1, 2, 3]', 4, "p")
    for json in (b"[1,2,3,4,5]", b'["a,a","\\",",3,4,5]', b'[{},{},{},{},{"a":1}]', b'["",' + b'"",' * 20 + b'""]'):
        with pytest.raises(BadRequest, match="at most 4"):
            refuse_many_elements(json, 4, "p")


async def test_other_requests_are_answered_while_a_large_body_is_prepared(stack: Stack) -> None:
    large = b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"a, b\\n" * 170_000 + b'"}]}'
    began = time.monotonic()
    refused = asyncio.create_task(stack.http.post(CHAT, content=large))
    answered = 0
    while not refused.done():
        assert (await stack.http.get("/live")).status_code == 200
        answered += 1
    assert answered >= 3, f"{answered} in {time.monotonic() - began:.1f} s"
    check(await refused, 400, "invalid_request_error", "context_length_exceeded", "messages")


async def test_requests_that_together_hold_too_much_are_refused_and_leave_nothing(make_stack: StackFactory) -> None:
    stack = await make_stack(0, request_memory_bytes=200_000, queue_timeout_s=60.0)
    body = {"model": "tiny", "prompt": [200] * 200}
    waiting = [asyncio.create_task(stack.http.post(TEXT, json=body)) for _ in range(5)]
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 5)
    assert stack.gateway.request_memory.used_bytes == 5 * (8192 + 200 * 40)
    response = await stack.http.post(TEXT, json={"model": "tiny", "prompt": ["a", "b", "c"]})
    message = check(response, 429, "rate_limit_error", "overloaded")
    assert "requests of address 127.0.0.1 would occupy" in message
    assert response.headers["retry-after"] == "1"
    assert (await stack.http.post(TEXT, content=b" " * 50_000)).status_code == 429
    assert stack.gateway.dispatcher.num_active == 5
    stack.gateway.dispatcher.end_all()
    assert [(await task).status_code for task in waiting] == [503] * 5
    assert stack.gateway.request_memory.used_bytes == 0


async def half_sent(stack: Stack, count: int, size: int, address: str = "127.0.0.1") -> list[Client]:
    """Connections with bodies of which the last byte is missing."""
    port = int(stack.url.rpartition(":")[2])
    clients = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n".encode() + b" " * (size - 1))
        clients.append((reader, writer))
    return clients


async def test_bodies_that_are_never_finished_leave_memory_for_others(make_stack: StackFactory) -> None:
    stack = await make_stack(max_body_bytes=20_000, request_memory_bytes=640_000)
    clients = await half_sent(stack, 8, 20_000)
    memory = stack.gateway.request_memory
    await stack.until(lambda: memory.used_bytes == 8 * 19_999)
    assert (await stack.http.post(TEXT, json={"model": "tiny", "prompt": "a"})).status_code == 200
    # However many there are: this address is refused, and others are not.
    clients += await half_sent(stack, 24, 20_000)
    answers = await asyncio.gather(*(reader.readline() for reader, _ in clients[16:]))
    assert {answer.split()[1] for answer in answers} == {b"429"}
    assert memory.used_bytes == 16 * 19_999
    async with http_client(base_url=stack.url, transport=httpx.AsyncHTTPTransport(local_address="127.0.0.2")) as other:
        assert (await other.post(TEXT, json={"model": "tiny", "prompt": "a"})).status_code == 200
    for _, writer in clients:
        writer.close()
    await stack.until(lambda: not memory.used_bytes)


async def test_a_key_is_one_client_from_whatever_addresses_it_comes(make_stack: StackFactory) -> None:
    stack = await make_stack(0, request_memory_bytes=60_000, queue_timeout_s=60.0, api_keys=("one", "two"))
    body = {"model": "tiny", "prompt": [200] * 20}

    def post(key: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(stack.http.post(TEXT, json=body, headers={"authorization": f"Bearer {key}"}))

    waiting = [post("one") for _ in range(3)]
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 3)
    message = check(await post("one"), 429, "rate_limit_error", "overloaded")
    assert "of key 'env:1'" in message
    waiting.append(post("two"))
    await stack.until(lambda: stack.gateway.dispatcher.num_active == 4)
    stack.gateway.dispatcher.end_all()
    assert [(await task).status_code for task in waiting] == [503] * 4
