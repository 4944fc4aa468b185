"""Instructor: a Pydantic union, by functions and by schemas, of OpenAI's client and of Anthropic's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import instructor
import pytest
from anthropic import Anthropic
from instructor import Mode
from openai import OpenAI

from tests.clients.names import SCRIPTED
from tests.clients.shapes import Circle, Drawing, Square
from tests.clients.weather import ask


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_SCHEMA])
def test_a_model_with_a_union(mode: Mode) -> None:
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    drawing = client.create(model=SCRIPTED, response_model=Drawing, messages=[ask("draw")], max_retries=0)
    assert isinstance(drawing, Drawing)


def test_calls_of_a_union() -> None:
    client = instructor.from_openai(OpenAI(max_retries=0), mode=Mode.PARALLEL_TOOLS)
    found: Any = client.create(
        model=SCRIPTED, response_model=Iterable[Circle | Square], messages=[ask("shapes")], max_retries=0
    )
    assert list(found) == [Circle(kind="circle", radius=7), Square(kind="square", side=3)]


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_a_model_that_comes_in_parts(mode: Mode) -> None:
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    *_, last = client.create_partial(model=SCRIPTED, response_model=Drawing, messages=[ask("draw")], max_retries=0)
    Drawing.model_validate(last.model_dump())


def test_of_anthropics_client() -> None:
    client = instructor.from_anthropic(Anthropic(max_retries=0))
    drawing = client.create(
        model=SCRIPTED, response_model=Drawing, messages=[ask("draw")], max_tokens=400, max_retries=0
    )
    assert isinstance(drawing, Drawing)
