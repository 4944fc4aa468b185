"""Answers that follow a schema, in a real stack with the torch engine and the unmodified client."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field
from tokenizers import AddedToken, Tokenizer

from compose.config import StackConfig
from compose.stack import Stack
from shared.messages.admin import SetModelBody
from tests.checkpoints import SPECIAL_TOKENS, tiny_checkpoint
from tests.services.gateway.core.tools import templates
from tests.stack.client import until
from tests.stack.conftest import FAST, MODEL, NO_DEMAND, READY_S

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

SPLIT, TOOLS = "split", "tools"
THINKERS = ("opens", "opened", "shown")
"""Models that think: one that opens its thoughts itself, two whose templates do; of one the marks are tokens that are
shown."""
BEGIN_OF_THOUGHT = 256 + len(SPECIAL_TOKENS)
END_OF_THOUGHT = BEGIN_OF_THOUGHT + 1
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
        workers=5 + len(THINKERS),
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
        for name in THINKERS:
            folder = _thinker(tmp_path_factory.mktemp(name) / "m", name)
            await running.admin.add_model(str(folder), name=name, min_instances=0)
            await running.admin.scale(name, 1, hold_s=3600.0)
        await until(running, lambda s: sum(i.state == "serving" for i in s.instances) == 5 + len(THINKERS))
        yield running


def _with_template(folder: Path) -> Path:
    """The checkpoint, whose chats may have functions."""
    shutil.copytree(tiny_checkpoint("llama"), folder)
    (folder / "chat_template.jinja").write_text(templates.HERMES)
    return folder


def _thinker(folder: Path, name: str) -> Path:
    """The checkpoint with tokens for a thought's marks, which its vocabulary had rows for."""
    shutil.copytree(tiny_checkpoint("llama"), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = [AddedToken(mark, special=name != "shown") for mark in ("<think>", "</think>")]
    (tokenizer.add_tokens if name == "shown" else tokenizer.add_special_tokens)(added)
    assert tokenizer.token_to_id("</think>") == END_OF_THOUGHT
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(templates.QWEN3 if name == "opens" else templates.DEEPSEEK_R1)
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


SIZE_FORMAT = {"type": "json_schema", "json_schema": {"name": "size", "schema": {"type": "object", **SIZE}}}


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


@pytest.mark.parametrize("model", THINKERS)
async def test_an_answer_follows_its_schema_behind_a_thought(stack: Stack, model: str) -> None:
    thoughts = set()
    # A random model would think without end: its end is more likely than any other token.
    bias = NO_BLANKS | {str(END_OF_THOUGHT): 5, str(BEGIN_OF_THOUGHT): 100}
    async with client_of(stack) as client:
        for seed in range(4):
            asked = {"messages": [{"role": "user", "content": "draw"}], "max_tokens": 900, "seed": seed}
            asked |= {"model": model, "logit_bias": bias, "response_format": SIZE_FORMAT}
            whole = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
            message, usage = whole.choices[0].message, whole.usage
            assert whole.choices[0].finish_reason == "stop"
            assert 0 <= json.loads(message.content)["n"] <= 99
            thought = getattr(message, "reasoning_content", "")
            thoughts.add(thought)
            assert usage.completion_tokens_details.reasoning_tokens >= len(thought)
            stream = await client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
            deltas = [chunk.choices[0].delta async for chunk in stream]
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == thought
            assert "".join(delta.content or "" for delta in deltas) == message.content
    assert len(thoughts) > 1


async def test_other_forms_and_calls_behind_a_thought(stack: Stack) -> None:
    tool = {"type": "function", "function": {"name": "draw", "parameters": SIZE}}
    async with client_of(stack) as client:

        async def ask(**extra: object) -> Any:
            bias = NO_BLANKS | {"10": 0, str(END_OF_THOUGHT): 5}
            answer = await client.chat.completions.create(
                model="opened", messages=[{"role": "user", "content": "go"}], max_tokens=900, seed=3, logit_bias=bias,
                extra_body=extra,
            )  # fmt: skip
            assert answer.choices[0].finish_reason in ("stop", "tool_calls")
            assert answer.choices[0].message.reasoning_content
            return answer.choices[0].message

        assert re.fullmatch("[A-F]{3}-[0-9]{2}", (await ask(guided_regex="[A-F]{3}-[0-9]{2}")).content)
        assert (await ask(guided_choice=["yes", "no"])).content in ("yes", "no")
        assert (await ask(guided_grammar='start: "a" | "b" "c"')).content in ("a", "bc")
        await stack.admin.set_model("opened", SetModelBody(tool_parser="hermes"))
        message = await ask(tools=[tool], tool_choice="required", parallel_tool_calls=False)
        assert message.content is None
        [call] = message.tool_calls
        assert 0 <= json.loads(call.function.arguments)["n"] <= 99


async def test_without_a_thought_the_answer_follows_at_once(stack: Stack) -> None:
    async with client_of(stack) as client:
        answer = await client.chat.completions.create(
            model="opens", messages=[{"role": "user", "content": "go"}], max_tokens=900, seed=1,
            logit_bias=NO_BLANKS, reasoning_effort="none", response_format=SIZE_FORMAT,
        )  # type: ignore[call-overload]  # fmt: skip
    assert 0 <= json.loads(answer.choices[0].message.content)["n"] <= 99
    assert not hasattr(answer.choices[0].message, "reasoning_content")
