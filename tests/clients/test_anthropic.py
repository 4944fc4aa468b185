"""Anthropic's client: messages whole and streamed, functions, counting, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.clients.names import SCRIPTED
from tests.clients.weather import FUNCTION, WEATHER, ask

TOOL: Any = {"name": "get_weather", "input_schema": FUNCTION["function"]["parameters"]}
ASKED: Any = {"model": SCRIPTED, "max_tokens": 200, "tools": [TOOL]}


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[Anthropic]:
    with Anthropic(max_retries=0) as client:
        yield client


def test_messages_whole_and_streamed_are_the_same(client: Anthropic) -> None:
    asked: Any = {"model": SCRIPTED, "max_tokens": 100, "system": "Be kind.", "messages": [ask("hello")]}
    whole = client.messages.create(**asked)
    assert [block.text for block in whole.content] == ["Hello! How can I help you?"]
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_function_is_called_and_gives_its_result(client: Anthropic) -> None:
    first = client.messages.create(**ASKED, messages=[ask("weather")])
    (call,) = first.content
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER}
    said: list[Any] = [
        ask("weather"),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**ASKED, messages=said)
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is sunny, 21 degrees.")


def test_streamed_calls_are_put_together(client: Anthropic) -> None:
    with client.messages.stream(**ASKED, messages=[ask("both")]) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 4
    assert final.content[0].type == "text"
    assert [block.input["city"] for block in final.content if block.type == "tool_use"] == ["Paris", "Oslo"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_is_forced(client: Anthropic, choice: Any) -> None:
    """The model itself would say hello."""
    answer = client.messages.create(**ASKED, messages=[ask("hello")], tool_choice=choice)
    assert {block.name for block in answer.content} == {"get_weather"}


def test_the_tool_runner_goes_on_until_there_is_an_answer(client: Anthropic) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """What the weather is like in a city."""
        asked.append(city)
        return WEATHER

    runner = client.beta.messages.tool_runner(
        model=SCRIPTED, max_tokens=200, tools=[get_weather], messages=[ask("weather")]
    )
    final = runner.until_done()
    assert (asked, final.content[0].text) == (["Paris"], "It is sunny, 21 degrees.")


def test_tokens_are_counted_as_they_are_used(client: Anthropic) -> None:
    asked: Any = {"model": SCRIPTED, "messages": [ask("weather")], "tools": [TOOL]}
    counted = client.messages.count_tokens(**asked)
    usage = client.messages.create(**asked, max_tokens=100).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_are_of_their_classes(client: Anthropic) -> None:
    asked: Any = {"model": SCRIPTED, "max_tokens": 9, "messages": [ask("hello")]}
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="sk-wrong").messages.create(**asked)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked | {"model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**asked, extra_body={"temperature": 9.0})
