"""A function, and how it is asked for."""

from __future__ import annotations

from typing import Any

WEATHER = "sunny, 21 degrees"
"""What it finds."""
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What the weather is like in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def ask(content: str) -> Any:
    """The user's message."""
    return {"role": "user", "content": content}
