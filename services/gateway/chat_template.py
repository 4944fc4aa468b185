"""Chat templates: a checkpoint's Jinja template over messages, in a sandbox.

The environment matches what templates are written against (Hugging Face ``apply_chat_template``):
immutable sandbox, trimmed blocks, loop controls, ``raise_exception``, ``strftime_now``, plain ``tojson``
and the ``{% generation %}`` block, which only marks text.
"""

from __future__ import annotations

import contextvars
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser

from services.gateway.core.thoughts import format_in
from services.gateway.core.tools.families import family_of
from services.gateway.template_sandbox import MeteredSandbox, RenderBudget, RenderingTooLarge, budget_of_rendering
from shared.errors import BadRequest

MAX_OPERATIONS = 2_000_000
MAX_RENDER_S = 2.0
"""A rendering that takes longer ends with an error."""


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> MeteredSandbox:
    environment = MeteredSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.meter_filters()
    return environment


class ChatTemplate:
    """A compiled template with the tokenizer's special tokens (``bos_token`` ...). Thread-safe.

    Raises ``BadRequest`` when ``source`` is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise BadRequest(f"the model's chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.tool_parser = family_of(source)
        """For the calls of a model that is asked so; None: for tools it is of no use."""
        self.thoughts = format_in(source)
        """Those of a model that is asked so; None: it has none."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        max_operations: int = MAX_OPERATIONS,
        max_time_s: float = MAX_RENDER_S,
    ) -> str:
        """The prompt text. ``tools`` are as ``apply_chat_template`` takes them.

        Raises ``RenderingTooLarge`` when it takes more operations, time or text than it may.
        Raises ``BadRequest`` with the template's own words when it refuses the messages, fails
        on them, or tries to leave the sandbox.
        """
        context: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **(arguments or {})}
        context["messages"] = messages
        if tools:
            context["tools"] = tools
        context["add_generation_prompt"] = add_generation_prompt
        # In a copy of the context variables of this thread or task, so that nothing is left behind.
        budget = RenderBudget(operations=max_operations, time_s=max_time_s)
        try:
            return contextvars.copy_context().run(self._render, context, budget)
        except RenderingTooLarge:
            raise
        except SecurityError as error:
            raise BadRequest(
                f"the model's chat template was stopped by the sandbox: {error}", param="messages"
            ) from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            raise BadRequest(f"the model's chat template refused the messages: {error}", param="messages") from error
        except (RecursionError, OverflowError, MemoryError) as error:
            raise BadRequest("rendering the model's chat template exceeded its limits", param="messages") from error

    def _render(self, context: dict[str, Any], budget: RenderBudget) -> str:
        budget_of_rendering.set(budget)
        return self._template.render(context)
