"""OpenAI's client: chats with functions, streamed and parsed, and responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.names import SCRIPTED
from tests.clients.shapes import Drawing
from tests.clients.weather import FUNCTION, WEATHER, ask


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[OpenAI]:
    with OpenAI(max_retries=0) as client:
        yield client


def test_models_are_listed(client: OpenAI) -> None:
    assert SCRIPTED in [model.id for model in client.models.list()]


def test_a_wrong_key_is_an_authentication_error(client: OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").models.list()


def test_a_chat_calls_a_function_and_gets_its_result(client: OpenAI) -> None:
    messages: list[Any] = [ask("weather")]
    first = client.chat.completions.create(model=SCRIPTED, messages=messages, tools=[FUNCTION])
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER}]
    second = client.chat.completions.create(model=SCRIPTED, messages=messages, tools=[FUNCTION])
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is sunny, 21 degrees.", "stop")


def test_streamed_calls_are_put_together(client: OpenAI) -> None:
    with client.chat.completions.stream(model=SCRIPTED, messages=[ask("both")], tools=[FUNCTION]) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 4
    assert message.content.startswith("I look.")
    cities = [json.loads(call.function.arguments)["city"] for call in message.tool_calls]
    assert cities == ["Paris", "Oslo"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_is_forced(client: OpenAI, choice: Any) -> None:
    """The model itself would say hello."""
    answer = client.chat.completions.create(
        model=SCRIPTED, messages=[ask("hello")], tools=[FUNCTION], tool_choice=choice, parallel_tool_calls=False,
        max_tokens=200,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def test_parse_gives_a_model_with_a_union(client: OpenAI) -> None:
    answer = client.chat.completions.parse(model=SCRIPTED, messages=[ask("draw")], response_format=Drawing)
    assert isinstance(answer.choices[0].message.parsed, Drawing)


def test_functions_of_pydantic_are_parsed(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=SCRIPTED, messages=[ask("draw")], tools=[openai.pydantic_function_tool(Drawing)]
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Drawing)


FLAT = {"type": "function", **FUNCTION["function"]}


def test_a_response_calls_a_function_and_gets_its_result(client: OpenAI) -> None:
    items: list[Any] = [ask("weather")]
    first = client.responses.create(model=SCRIPTED, input=items, tools=[FLAT])
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}]
    second = client.responses.create(model=SCRIPTED, input=items, tools=[FLAT])
    assert (second.status, second.output_text) == ("completed", "It is sunny, 21 degrees.")


def test_a_streamed_response_ends_with_the_whole_one(client: OpenAI) -> None:
    with client.responses.stream(model=SCRIPTED, input="hello", instructions="Be kind.") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Hello! How can I help you?"
    assert final.usage.output_tokens > 4


def test_a_response_is_parsed(client: OpenAI) -> None:
    answer = client.responses.parse(model=SCRIPTED, input="draw", text_format=Drawing)
    assert isinstance(answer.output_parsed, Drawing)
