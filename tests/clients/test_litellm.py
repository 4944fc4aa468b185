"""LiteLLM, for which a server like this is a model ``openai/...``."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tests.clients.names import KEY, SCRIPTED
from tests.clients.shapes import Drawing
from tests.clients.weather import FUNCTION, ask

HELLO = "Hello! How can I help you?"


@pytest.fixture
def asked(served: Any) -> dict[str, Any]:
    """Who is asked."""
    return {"model": f"openai/{SCRIPTED}", "api_base": served.openai_url, "api_key": KEY, "num_retries": 0}


def test_a_completion_whole_and_streamed(asked: dict[str, Any]) -> None:
    whole = litellm.completion(**asked, messages=[ask("hello")])
    assert whole.choices[0].message.content == HELLO
    chunks = list(
        litellm.completion(**asked, messages=[ask("hello")], stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_calls_whole_and_streamed(asked: dict[str, Any]) -> None:
    asked |= {"messages": [ask("both")], "tools": [FUNCTION]}
    whole = litellm.completion(**asked)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    for answer in (whole, streamed):
        calls = answer.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Paris", "Oslo"]
        assert answer.choices[0].finish_reason == "tool_calls"


def test_a_schema_holds(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, messages=[ask("draw")], response_format=Drawing)
    Drawing.model_validate_json(answer.choices[0].message.content)


def test_responses(asked: dict[str, Any]) -> None:
    answer = litellm.responses(**asked, input="hello")
    assert answer.output[0].content[0].text == HELLO


def test_errors_are_of_their_classes(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked | {"api_key": "sk-wrong"}, messages=[ask("hello")])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked | {"model": "openai/nobody"}, messages=[ask("hello")])
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked, messages=[ask("long " * 4000)])


def test_anthropics_messages_through_litellm(served: Any) -> None:
    # Without max_tokens it asks for those of a model of Anthropic's.
    answer = litellm.completion(
        model=f"anthropic/{SCRIPTED}", api_base=served.url, api_key=KEY, max_tokens=200, messages=[ask("weather")],
        tools=[FUNCTION],
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
