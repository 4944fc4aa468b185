"""Typed reading of settings from an environment; every error names the key and the value."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from shared.errors import BlitzError

T = TypeVar("T", int, float)
D = TypeVar("D")
Choice = TypeVar("Choice", bound=str)

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_DURATION = re.compile(r"(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>ms|s|m|h|)")
_SECONDS_PER_UNIT = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class SettingsError(BlitzError):
    """A setting is missing, cannot be read, or is out of range. ``param`` is its key."""

    code = "bad_settings"


class Settings:
    """Getters over ``environ``. A default of None makes a setting required; empty values count as unset.

    Every getter raises ``SettingsError``.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, key: str, *, default: str | None = None) -> str:
        """The value without surrounding blanks."""
        return self._read(key, default, str)

    def integer(
        self, key: str, *, default: int | None = None, minimum: int | None = None, maximum: int | None = None
    ) -> int:
        """A whole number within the bounds, which are inclusive."""
        return self._read(key, default, lambda value: _number(key, value, int, "a whole number", minimum, maximum))

    def number(
        self, key: str, *, default: float | None = None, minimum: float | None = None, maximum: float | None = None
    ) -> float:
        """A finite number within the bounds, which are inclusive."""
        return self._read(key, default, lambda value: _number(key, value, float, "a number", minimum, maximum))

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        """1, true, yes, on; 0, false, no, off; in any case."""

        def convert(value: str) -> bool:
            if value.lower() not in _TRUE | _FALSE:
                raise _error(key, value, "must be true or false")
            return value.lower() in _TRUE

        return self._read(key, default, convert)

    def choice(self, key: str, choices: tuple[Choice, ...], *, default: Choice | None = None) -> Choice:
        """One of ``choices``."""

        def convert(value: str) -> Choice:
            for choice in choices:
                if value == choice:
                    return choice
            raise _error(key, value, f"must be one of {', '.join(choices)}")

        return self._read(key, default, convert)

    def listing(self, key: str, *, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Values separated by commas; blanks around them and empty ones are left out."""
        return self._read(key, default, lambda value: tuple(i.strip() for i in value.split(",") if i.strip()))

    def duration_s(self, key: str, *, default: float | None = None, minimum: float = 0.0) -> float:
        """Seconds; takes a unit of ms, s, m or h, and none means seconds."""

        def convert(value: str) -> float:
            match = _DURATION.fullmatch(value)
            if match is None:
                raise _error(key, value, "must be a duration such as 250ms, 2s or 5m")
            seconds = float(match["number"]) * _SECONDS_PER_UNIT[match["unit"]]
            if seconds < minimum:
                raise _error(key, value, f"must be at least {minimum:g} s")
            return seconds

        return self._read(key, default, convert)

    def log_level(self, key: str, *, default: str = "info") -> str:
        """The name of a level of ``logging``, in any case."""
        value = self._value(key)
        if value is None:
            return default
        if value.upper() not in logging.getLevelNamesMapping():
            raise _error(key, value, "must be debug, info, warning, error or critical")
        return value

    def secret(self, key: str) -> str | None:
        """The value of ``key``, or what stands in the file that ``KEY_FILE`` names (a mounted secret). None: neither.

        Its errors never show the secret.
        """
        value, path = self._value(key), self._value(f"{key}_FILE")
        if path is None:
            return value
        if value is not None:
            raise SettingsError(f"{key} and {key}_FILE are both set: unset one", param=key)
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            problem = error.strerror if isinstance(error, OSError) else "it is not text"
            raise _error(f"{key}_FILE", path, f"cannot be read: {problem}") from error
        if not text:
            raise _error(f"{key}_FILE", path, "the file is empty")
        return text

    def file(self, key: str) -> Path | None:
        """A file that exists. None: unset."""
        value = self._value(key)
        if value is None:
            return None
        if not Path(value).is_file():
            raise _error(key, value, "there is no such file")
        return Path(value)

    def _value(self, key: str) -> str | None:
        return self._environ.get(key, "").strip() or None

    def _read(self, key: str, default: D | None, convert: Callable[[str], D]) -> D:
        value = self._value(key)
        if value is not None:
            return convert(value)
        if default is None:
            raise SettingsError(f"{key} is not set and has no default", param=key)
        return default


def _number(key: str, value: str, convert: Callable[[str], T], what: str, minimum: T | None, maximum: T | None) -> T:
    try:
        number = convert(value)
    except ValueError as error:
        raise _error(key, value, f"must be {what}") from error
    if not math.isfinite(number):
        raise _error(key, value, f"must be {what}")
    if minimum is not None and number < minimum:
        raise _error(key, value, f"must be at least {minimum}")
    if maximum is not None and number > maximum:
        raise _error(key, value, f"must be at most {maximum}")
    return number


def _error(key: str, value: str, problem: str) -> SettingsError:
    return SettingsError(f"{key}={value!r}: {problem}", param=key)
