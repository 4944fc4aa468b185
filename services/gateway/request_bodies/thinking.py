"""Whether, and how much, a model is to think: what chat templates are told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh"],
    Meta(description="one of none, minimal, low, medium, high, xhigh"),
]
_SWITCHES = ("enable_thinking", "thinking")
"""As Qwen's and most others' templates call it; DeepSeek's and Granite's."""


def switched(on: bool) -> dict[str, Any]:
    """Arguments of a template that turn thinking on or off, where it can be."""
    return dict.fromkeys(_SWITCHES, on)


def told_of_effort(effort: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments ``given`` by the caller, and those of an effort, which says less than a switch among them."""
    if effort is None:
        return dict(given)
    switches = {} if any(name in given for name in _SWITCHES) else switched(effort != "none")
    return {**given, **switches, "reasoning_effort": effort}
