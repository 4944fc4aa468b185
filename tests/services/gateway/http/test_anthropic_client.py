"""The unmodified Anthropic client against a gateway, where it is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import Unavailable
from tests.services.gateway.cluster import say
from tests.services.gateway.conftest import Stack, StackFactory
from tests.services.gateway.core.tools import templates
from tests.services.gateway.http.test_messages import MESSAGES, TOOLS
from tests.services.gateway.http.test_rate_limits import key, keys_file
from tests.services.gateway.http.test_tools import CALL, stack_of

anthropic: Any = pytest.importorskip("anthropic")


@pytest.fixture
async def stack(make_stack: StackFactory, tmp_path: Path) -> Stack:
    """Its model may call functions, and it takes one key."""
    return await stack_of(make_stack, tmp_path / "hermes", templates.HERMES, keys_file=keys_file(tmp_path, key("a")))


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="sk-a", max_retries=0) as found:
        yield found


async def test_it_reads_answers_streams_and_counts(client: Any) -> None:
    body = {"model": "tiny", "max_tokens": 9, "system": "be kind", "messages": MESSAGES}
    answer = await client.messages.create(**body)
    assert ([b.text for b in answer.content], answer.stop_reason) == (["hello"], "end_turn")
    async with client.messages.stream(**body) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert texts == list("hello")
    assert (final.content[0].text, final.usage, final.stop_reason) == ("hello", answer.usage, "end_turn")
    names = [event.type async for event in await client.messages.create(**body, stream=True)]
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    body.pop("max_tokens")
    counted = await client.messages.count_tokens(**body)
    assert counted.input_tokens == answer.usage.input_tokens


async def test_it_calls_functions_and_goes_on_with_the_answers_blocks(stack: Stack, client: Any) -> None:
    stack.workers[0].script = say("I look.\n" + CALL)
    body = {"model": "tiny", "max_tokens": 200, "tools": TOOLS}
    answer = await client.messages.create(**body, messages=MESSAGES)
    text, call = answer.content
    assert (text.text, call.name, call.input, answer.stop_reason) == (
        "I look.\n",
        "weather",
        {"city": "Oslo"},
        "tool_use",
    )
    async with client.messages.stream(**body, messages=MESSAGES) as stream:
        final = await stream.get_final_message()
    assert [b.type for b in final.content] == ["text", "tool_use"]
    assert final.content[1].input == {"city": "Oslo"}
    stack.workers[0].script = say("12 degrees")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12"}
    then = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert (await client.messages.create(**body, messages=then)).content[0].text == "12 degrees"


async def test_it_raises_its_own_errors(stack: Stack, client: Any) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": MESSAGES}
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await client.messages.create(**body, extra_body={"temperature": 3})
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**body, "model": "other"})
    async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="sk-z", max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError):
            await other.messages.create(**body)
    stack.workers[0].pause_after = 2
    stream = await client.messages.create(**body, stream=True)
    assert (await anext(stream)).type == "message_start"
    [request] = stack.gateway.dispatcher.requests.all()
    request.sink.on_error(Unavailable("broken"))
    stack.gateway.dispatcher.cancel(request.stream.request_id)
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        async for _ in stream:
            pass
