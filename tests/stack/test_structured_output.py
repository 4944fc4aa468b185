"""Answers that follow a schema, in a real stack with the torch engine and the unmodified client."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field

from compose.config import StackConfig
from compose.stack import Stack
from tests.checkpoints import tiny_checkpoint
from tests.services.gateway.core.tools import templates
from tests.stack.client import until
from tests.stack.conftest import FAST, MODEL, NO_DEMAND, READY_S

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

SPLIT, TOOLS = "split", "tools"
NO_BLANKS = {str(ord(blank)): -100 for blank in " \t\r\n"}
"""A bias: a random model writes whitespace without end, where a grammar lets it. Tokens are bytes."""


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: int = Field(ge=0, le=99)


class Square(BaseModel):
    kind: Literal["square"]
    side: int = Field(ge=0, le=99)


class Drawing(BaseModel):
    name: str = Field(max_length=8)
    colour: Colour
    shape: Circle | Square = Field(discriminator="kind")
    note: str | None = Field(max_length=4)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One checkpoint under two names: two colocated instances; a prefill and a decode instance."""
    config = StackConfig(
        models=(tiny_checkpoint("llama"),),
        state_dir=tmp_path_factory.mktemp("schemas"),
        workers=5,
        port=0,
        env=FAST | NO_DEMAND,
    )
    async with Stack(config) as running:
        await running.wait_ready(READY_S)
        await running.admin.scale(MODEL, 2, hold_s=3600.0)
        await running.admin.add_model(str(tiny_checkpoint("llama")), name=SPLIT, min_instances=0)
        for role in ("prefill", "decode"):
            await running.admin.scale(SPLIT, 1, hold_s=3600.0, role=role)
        await running.admin.add_model(str(_with_template(tmp_path_factory.mktemp("hermes") / "m")), name=TOOLS)
        await until(running, lambda s: sum(i.state == "serving" for i in s.instances) == 5)
        yield running


def _with_template(folder: Path) -> Path:
    """The checkpoint, whose chats may have functions."""
    shutil.copytree(tiny_checkpoint("llama"), folder)
    (folder / "chat_template.jinja").write_text(templates.HERMES)
    return folder


def client_of(stack: Stack) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


async def test_parse_gives_a_model_of_pydantic(stack: Stack) -> None:
    async with client_of(stack) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.parse(
                    model=MODEL,
                    messages=[{"role": "user", "content": "draw"}],
                    response_format=Drawing,
                    seed=seed,
                    max_tokens=900,
                    logit_bias=NO_BLANKS,
                )
                for seed in range(8)
            )
        )
    for answer in answers:
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Drawing)


async def test_it_is_the_same_streamed_whole_and_on_two_instances(stack: Stack) -> None:
    schema = Drawing.model_json_schema()
    async with client_of(stack) as client:
        for seed in range(4):
            asked = {"prompt": [5, 6, 7, 8, seed + 3], "max_tokens": 900, "seed": seed, "logit_bias": NO_BLANKS}
            texts = []
            for model in (MODEL, SPLIT):
                whole = await client.completions.create(model=model, extra_body={"guided_json": schema}, **asked)  # type: ignore[call-overload]
                texts.append((whole.choices[0].text, whole.usage.completion_tokens))
            stream = await client.completions.create(
                model=MODEL, stream=True, extra_body={"guided_json": schema}, **asked
            )  # type: ignore[call-overload]
            texts.append(("".join([c.choices[0].text async for c in stream]), texts[0][1]))
            Drawing.model_validate_json(texts[0][0])
            assert texts[1:] == [texts[0], texts[0]]


async def test_other_forms(stack: Stack) -> None:
    async with client_of(stack) as client:

        async def ask(**extra: object) -> str:
            answer = await client.completions.create(
                model=MODEL, prompt=[5, 6, 7], max_tokens=400, seed=3, extra_body=extra
            )
            assert answer.choices[0].finish_reason == "stop"
            return answer.choices[0].text

        assert re.fullmatch("[A-F]{3}-[0-9]{2}", await ask(guided_regex="[A-F]{3}-[0-9]{2}"))
        assert await ask(guided_choice=["yes", "no"]) in ("yes", "no")
        assert await ask(structured_outputs={"choice": ["left", "right"]}) in ("left", "right")
        assert await ask(guided_grammar='start: "a" | "b" "c"') in ("a", "bc")
        assert isinstance(json.loads(await ask(response_format={"type": "json_object"}, logit_bias={"125": 8})), dict)


async def test_what_is_not_enforced_is_refused_by_name(stack: Stack) -> None:
    async with client_of(stack) as client:
        with pytest.raises(BadRequestError, match="uniqueItems") as raised:
            await client.completions.create(
                model=MODEL, prompt="a", extra_body={"guided_json": {"type": "array", "uniqueItems": True}}
            )
        assert raised.value.param == "guided_json.uniqueItems"


SIZE = {
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


async def test_a_call_is_made_that_must_be(stack: Stack) -> None:
    tool = {"type": "function", "function": {"name": "draw", "parameters": SIZE}}
    other = {
        "type": "function",
        "function": {"name": "now", "strict": True, "parameters": {"additionalProperties": False}},
    }
    named = {"type": "function", "function": {"name": "draw"}}
    async with client_of(stack) as client:
        for choice in ("required", named):
            for seed in range(4):
                answer = await client.chat.completions.create(
                    model=TOOLS,
                    messages=[{"role": "user", "content": "go"}],
                    tools=[tool, other],
                    tool_choice=choice,
                    parallel_tool_calls=False,
                    seed=seed,
                    max_tokens=300,
                    logit_bias=NO_BLANKS | {"10": 0},
                )  # type: ignore[call-overload]
                assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
                (call,) = answer.choices[0].message.tool_calls
                if call.function.name == "draw":
                    assert 0 <= json.loads(call.function.arguments)["n"] <= 99
                else:
                    assert (choice, json.loads(call.function.arguments)) == ("required", {})
