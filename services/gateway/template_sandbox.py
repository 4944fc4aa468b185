"""The sandbox in which chat templates run: what they cannot reach, and how much they may do.

A template comes with a checkpoint, its input from clients. Each rendering has a budget of operations (turns of loops,
calls, filters), of output characters, and of time; and no single value may grow beyond a limit. The template's own
code checks the budget: loops, outputs and concatenations are rewritten when it is compiled; calls, filters and
operators are intercepted. So a rendering that is ended always ends between two operations.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_VALUE_CHARACTERS = 4 * 1024 * 1024
MAX_VALUE_ITEMS = 1024 * 1024
MAX_NUMBER = 65_536
"""Limit of an argument of a filter or method: widths, counts, lengths."""
MAX_NUMBER_BITS = 4096
MAX_WIDTH = 256
"""Limit of an argument of a filter that puts this many blanks in front of each line."""
_WIDTH_FILTERS = frozenset({"indent", "tojson", "wordwrap", "pprint"})
_WIDE_FORMAT = re.compile(r"[0-9]{5,}|\*")
_CHARACTERS_PER_OPERATION = 256

_LOOP, _OUTPUT, _CONCAT = "blitz_loop", "blitz_output", "blitz_concat"


class RenderingTooLarge(SecurityError):
    """A rendering's budget is used up, or a value is too large."""


class RenderBudget:
    """What one rendering may still do. ``deadline_s`` is monotonic."""

    __slots__ = ("_characters", "_deadline_s", "_operations")

    def __init__(self, *, operations: int, time_s: float) -> None:
        self._operations = operations
        self._characters = MAX_VALUE_CHARACTERS
        self._deadline_s = time.monotonic() + time_s

    def operation(self, count: int = 1) -> None:
        """Raises ``RenderingTooLarge``."""
        self._operations -= count
        if self._operations < 0:
            raise RenderingTooLarge("too many operations")
        if time.monotonic() > self._deadline_s:
            raise RenderingTooLarge("it took too long")

    def output(self, text: str) -> None:
        """Raises ``RenderingTooLarge``."""
        self._characters -= len(text)
        if self._characters < 0:
            raise RenderingTooLarge(f"more than {MAX_VALUE_CHARACTERS} characters")
        self.operation()


budget_of_rendering: ContextVar[RenderBudget] = ContextVar("budget_of_rendering")


class MeteredSandbox(ImmutableSandboxedEnvironment):
    """An immutable sandbox whose templates run under ``budget_of_rendering``."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        # It would produce endless text.
        self.globals.pop("lipsum", None)

    def meter_filters(self) -> None:
        """Put all existing filters under the budget. Call it once, after the last one has been added.

        The compiler, which has no budget, computes none of them by itself.
        """
        self.filters["join"] = _join
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.filters[_LOOP] = _loop
        self.filters[_OUTPUT] = _output
        self.filters[_CONCAT] = _concat

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in the base class
        budget_of_rendering.get().operation()
        if isinstance(__obj, LoopContext) and args:
            args = (_loop(args[0]), *args[1:])
        else:
            args = _checked_arguments(__obj, args, kwargs)
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget_of_rendering.get().operation()
        if operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                _refuse_long_number(left, right)
            for value, factor in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(factor, int):
                    _refuse_size(value, len(value) * max(factor, 0))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _refuse_size(left, len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _refuse_wide_format(left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and abs(right) > MAX_WIDTH:
            raise RenderingTooLarge(f"to the power of {right}")
        return _checked(super().call_binop(context, operator, left, right))


class _Metering(NodeTransformer):
    """Puts the budget into a template's loops, outputs and concatenations."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - the base class finds it by this name
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _LOOP)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [
            _filtered(
                nodes.Const(child.data, lineno=child.lineno) if isinstance(child, nodes.TemplateData) else child,
                _OUTPUT,
            )
            for child in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)


def _filtered(value: Any, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _Turns:
    """An iterable whose turns are counted."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # loops ask, and take a TypeError for an answer

    def __iter__(self) -> Iterator[Any]:
        budget = budget_of_rendering.get()
        for value in self._values:
            budget.operation()
            yield value


def _loop(values: Any) -> Any:
    return _Turns(values)


def _output(value: Any) -> Any:
    text = str(value)
    budget_of_rendering.get().output(text)
    return text


def _concat(values: list[Any]) -> str:
    budget_of_rendering.get().operation(len(values))
    texts = [str(value) for value in values]
    _refuse_size("", sum(map(len, texts)))
    return "".join(texts)


def _join(value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        # Its plain form: a key or attribute by name.
        value = (item[attribute] if isinstance(item, dict) else getattr(item, str(attribute)) for item in value)
    return _joined(str(d), value)


def _joined(between: str, values: Iterable[Any]) -> str:
    texts, size = [], 0
    for value in _Turns(values):
        text = str(value)
        size += len(text) + len(between)
        _refuse_size("", size)
        texts.append(text)
    return between.join(texts)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    widest = MAX_WIDTH if name in _WIDTH_FILTERS else MAX_NUMBER

    @functools.wraps(function)
    def metered(*arguments: Any, **keywords: Any) -> Any:
        for argument in arguments:
            budget_of_rendering.get().operation(_weight(argument))
        _refuse_numbers(arguments[1:], keywords, widest)
        if name == "replace":
            _refuse_replacement(*[argument for argument in arguments if isinstance(argument, str)])
        if name == "format":
            _refuse_wide_format(str(arguments[0]))
        return _checked(function(*arguments, **keywords))

    return metered


def _weight(value: Any) -> int:
    if isinstance(value, str):
        return 1 + len(value) // _CHARACTERS_PER_OPERATION
    return 1 + len(value) if isinstance(value, list | tuple | dict | range) else 1


def _checked_arguments(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Methods of text that can turn little into much."""
    # The sandbox wraps str.format.
    method = getattr(function, "__wrapped__", function)
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(owner, str):
        return arguments
    budget_of_rendering.get().operation(_weight(owner))
    _refuse_numbers(arguments, keywords, MAX_NUMBER)
    if name == "join" and arguments:
        return ([_joined(owner, arguments[0])],)
    if name == "replace":
        _refuse_replacement(owner, *arguments[:2])
    if name in {"format", "format_map"}:
        _refuse_wide_format(owner)
    return arguments


def _refuse_numbers(arguments: tuple[Any, ...], keywords: dict[str, Any], limit: int) -> None:
    for value in (*arguments, *keywords.values()):
        if isinstance(value, int) and abs(value) > limit:
            raise RenderingTooLarge(f"the number {value} is above {limit}")


def _refuse_replacement(text: str, old: Any = "", new: Any = "", *_: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        _refuse_size("", len(text) + text.count(old) * (len(new) - len(old)))


def _refuse_long_number(left: int, right: int) -> None:
    if left.bit_length() + right.bit_length() > MAX_NUMBER_BITS:
        raise RenderingTooLarge("a number is too large")


def _refuse_wide_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise RenderingTooLarge(f"the format {text[:80]!r} is too wide")


def _refuse_size(value: Any, size: int) -> None:
    if size > (MAX_VALUE_CHARACTERS if isinstance(value, str) else MAX_VALUE_ITEMS):
        raise RenderingTooLarge(f"a value of {size} is too large")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict):
        _refuse_size(value, len(value))
    return value
