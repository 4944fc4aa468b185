"""LangChain: an agent with a function, and answers with a structure in each of its ways."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.names import SCRIPTED
from tests.clients.shapes import Drawing
from tests.clients.weather import WEATHER, ask

SAID = "It is sunny, 21 degrees."


@tool
def get_weather(city: str) -> str:
    """What the weather is like in a city."""
    return f"{city}: {WEATHER}"


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def model(request: pytest.FixtureRequest) -> ChatOpenAI:
    return ChatOpenAI(model=SCRIPTED, max_retries=0, use_responses_api=request.param, stream_usage=True)


def test_an_agent_calls_its_function(model: ChatOpenAI) -> None:
    state = create_agent(model, [get_weather]).invoke({"messages": [ask("weather")]})
    assert [m.content for m in state["messages"] if isinstance(m, ToolMessage)] == [f"Paris: {WEATHER}"]
    assert state["messages"][-1].text == SAID


def test_an_agent_streams_what_it_says(model: ChatOpenAI) -> None:
    agent = create_agent(model, [get_weather])
    texts = [
        message.text
        for message, _ in agent.stream({"messages": [ask("weather")]}, stream_mode="messages")
        if isinstance(message, AIMessage)
    ]
    assert "".join(texts) == SAID
    assert len([text for text in texts if text]) > 4


def test_streamed_calls_are_put_together(model: ChatOpenAI) -> None:
    whole: Any = None
    for chunk in model.bind_tools([get_weather]).stream([ask("both")]):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Paris"}, {"city": "Oslo"}]
    assert whole.usage_metadata["output_tokens"] > 10


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_has_the_structure(model: ChatOpenAI, method: Any) -> None:
    assert isinstance(model.with_structured_output(Drawing, method=method).invoke([ask("draw")]), Drawing)


def test_an_answer_is_json(model: ChatOpenAI) -> None:
    assert isinstance(model.with_structured_output(Drawing, method="json_mode").invoke([ask("draw")]), Drawing)
