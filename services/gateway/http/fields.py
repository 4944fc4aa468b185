"""Strict reading of JSON fields: every refusal names the parameter, its value and what is allowed."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from shared.errors import BadRequest, UnsupportedParameter

C = TypeVar("C", bound=str)

_decoder = msgspec.json.Decoder()

MAX_SHOWN_CHARACTERS = 80
"""Of a wrong value, in an error's message."""


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Raises ``BadRequest``."""
    try:
        value = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest(f"the request body must be a JSON object, not {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def is_token_id(value: object) -> bool:
    """Whether a JSON value can be a token id (its range aside)."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value as an error shows it: short scalars as they are, of all else the type."""
    if not isinstance(value, int | float | str) or (isinstance(value, str) and len(value) > MAX_SHOWN_CHARACTERS):
        return kind_of(value)
    text = repr(value)
    return text if len(text) <= 2 * MAX_SHOWN_CHARACTERS else kind_of(value)


class Fields:
    """The fields of one JSON object. ``None`` counts as absent, as OpenAI does it."""

    def __init__(self, value: dict[str, Any], prefix: str = "") -> None:
        self._value = value
        self._prefix = prefix

    def name(self, key: str) -> str:
        """The parameter's full name, for errors."""
        return f"{self._prefix}{key}"

    def raw(self, key: str) -> Any:
        """The value as it came, None when absent."""
        return self._value.get(key)

    def wrong(self, key: str, wanted: str) -> BadRequest:
        """The error for a value of another type or out of range."""
        return BadRequest(f"{self.name(key)} must be {wanted}, not {shown(self._value.get(key))}", param=self.name(key))

    def unsupported(self, key: str, what: str) -> UnsupportedParameter:
        """The error for something that OpenAI or vLLM know and this system does not do."""
        return UnsupportedParameter(f"{self.name(key)}: {what} not supported", param=self.name(key))

    def text(self, key: str) -> str:
        """A required, non-empty string."""
        value = self._value.get(key)
        if value is None:
            raise BadRequest(f"{self.name(key)} is required", param=self.name(key))
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a non-empty string")
        return value

    def choice(self, key: str, default: C, allowed: tuple[C, ...]) -> C:
        """One of the strings in ``allowed``."""
        value = self._value.get(key)
        if value is None:
            return default
        for one in allowed:
            if value == one:
                return one
        raise self.wrong(key, " or ".join(repr(one) for one in allowed))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._value.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "a boolean")
        return value

    def integer(self, key: str, default: int, *, low: int, high: int) -> int:
        """An integer in ``low..high``."""
        value = self.optional_integer(key, low=low, high=high)
        return default if value is None else value

    def optional_integer(self, key: str, *, low: int, high: int) -> int | None:
        """An integer in ``low..high``, or None when absent."""
        value = self._value.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float, *, low: float, high: float, open_low: bool = False) -> float:
        """A number in ``low..high`` (``low`` itself excluded with ``open_low``)."""
        value = self._value.get(key)
        if value is None:
            return default
        allowed = f"a number {'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, allowed)
        # The range refuses what is not finite too, and before an integer of any size becomes a float.
        if not low <= value <= high or (open_low and value == low):
            raise self.wrong(key, allowed)
        return float(value)

    def object(self, key: str) -> Fields:
        """A nested object (empty when absent)."""
        value = self._value.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.name(key)}.")

    def token_ids(self, key: str, *, vocab_size: int) -> tuple[int, ...]:
        """An array of token ids (empty when absent)."""
        value = self._value.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(is_token_id(i) and 0 <= i < vocab_size for i in value):
            raise self.wrong(key, f"an array of token ids from 0 to {vocab_size - 1}")
        return tuple(value)
