"""OpenAI's agents, over chats and over responses: a function is called, and its result is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI

from tests.clients.names import SCRIPTED
from tests.clients.shapes import Drawing
from tests.clients.weather import WEATHER

MODELS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]
SAID = "It is sunny, 21 degrees."


@function_tool
def get_weather(city: str) -> str:
    """What the weather is like in a city."""
    return f"{city}: {WEATHER}"


def agent_of(kind: Any, **settings: Any) -> Agent[None]:
    model = kind(model=SCRIPTED, openai_client=AsyncOpenAI(max_retries=0))
    return Agent(name="Guide", instructions="Answer in a sentence.", model=model, **settings)


@pytest.mark.parametrize("kind", MODELS)
def test_an_agent_calls_its_function(kind: Any) -> None:
    result = Runner.run_sync(agent_of(kind, tools=[get_weather]), "What is the weather like?")
    assert result.final_output == SAID
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == [f"Paris: {WEATHER}"]


@pytest.mark.parametrize("kind", MODELS)
def test_a_streamed_run_is_the_same(kind: Any) -> None:
    async def run() -> tuple[list[str], Any]:
        result = Runner.run_streamed(agent_of(kind, tools=[get_weather]), "What is the weather like?")
        events = [event async for event in result.stream_events()]
        names = [event.name for event in events if event.type == "run_item_stream_event"]
        return names, result.final_output

    names, said = asyncio.run(run())
    assert said == SAID
    assert names == ["tool_called", "tool_output", "message_output_created"]


@pytest.mark.parametrize("kind", MODELS)
def test_parallel_calls_are_all_made(kind: Any) -> None:
    result = Runner.run_sync(agent_of(kind, tools=[get_weather]), "The weather in both, please.")
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == [f"Paris: {WEATHER}", f"Oslo: {WEATHER}"]


@pytest.mark.parametrize("kind", MODELS)
def test_an_agents_output_has_its_type(kind: Any) -> None:
    result = Runner.run_sync(agent_of(kind, output_type=Drawing, model_settings=ModelSettings(max_tokens=400)), "draw")
    assert isinstance(result.final_output, Drawing)


@pytest.mark.parametrize("kind", MODELS)
def test_an_agent_has_functions_and_an_output_type(kind: Any) -> None:
    agent = agent_of(kind, tools=[get_weather], output_type=Drawing)
    assert isinstance(Runner.run_sync(agent, "draw").final_output, Drawing)
