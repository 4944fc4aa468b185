"""Typed reading of settings from an environment; every error names the key and the value."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shared.errors import BlitzError

T = TypeVar("T", int, float)
D = TypeVar("D")
Choice = TypeVar("Choice", bound=str)

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_DURATION = re.compile(r"(?P<number>[0-9]*\.?[0-9]+)\s*(?P<unit>ms|s|m|h|)")
_MAX_SECRET_BYTES = 64 * 1024
_MAX_SHOWN = 200
"""Characters of a value, in an error."""
_SECONDS_PER_UNIT = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class SettingsError(BlitzError):
    """A setting is missing, cannot be read, or is out of range. ``param`` is its key."""

    code = "bad_settings"


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable as its reader asks for it: a row of ``docs/reference/settings.md``."""

    key: str
    meaning: str
    default: str = ""
    """As one would write it into the environment, or in words. Empty: none."""
    values: str = ""
    """Which values it takes. Empty: any text."""


class Settings:
    """Getters over ``environ``. A default of None makes a setting required; empty values count as unset.

    ``meaning`` is for the reference, and so is ``shown``: the default in words, where it depends on the machine. Every
    getter raises ``SettingsError``.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.asked: dict[str, Setting] = {}
        """What was asked for, by key."""

    def text(self, key: str, meaning: str, *, default: str | None = None, shown: str | None = None) -> str:
        """The value without surrounding blanks."""
        self._ask(key, meaning, default, shown)
        return self._read(key, default, str)

    def integer(
        self,
        key: str,
        meaning: str,
        *,
        default: int | None = None,
        minimum: int | None = None,
        maximum: int | None = None,
        shown: str | None = None,
    ) -> int:
        """A whole number within the bounds, which are inclusive."""
        self._ask(key, meaning, default, shown, _range(minimum, maximum))
        return self._read(key, default, lambda value: _number(key, value, int, "a whole number", minimum, maximum))

    def number(
        self,
        key: str,
        meaning: str,
        *,
        default: float | None = None,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> float:
        """A finite number within the bounds, which are inclusive."""
        self._ask(key, meaning, default, None, _range(minimum, maximum))
        return self._read(key, default, lambda value: _number(key, value, float, "a number", minimum, maximum))

    def integer_or_none(self, key: str, meaning: str, *, minimum: int | None = None) -> int | None:
        """As ``integer``. None: unset."""
        if self._value(key) is None:
            self._ask(key, meaning, None, None, _range(minimum, None))
            return None
        return self.integer(key, meaning, minimum=minimum)

    def number_or_none(
        self, key: str, meaning: str, *, minimum: float | None = None, shown: str | None = None
    ) -> float | None:
        """As ``number``. None: unset; ``shown`` says what happens then."""
        if self._value(key) is None:
            self._ask(key, meaning, None, shown, _range(minimum, None))
            return None
        return self.number(key, meaning, minimum=minimum)

    def boolean(self, key: str, meaning: str, *, default: bool | None = None) -> bool:
        """1, true, yes, on; 0, false, no, off; in any case."""

        def convert(value: str) -> bool:
            if value.lower() not in _TRUE | _FALSE:
                raise _error(key, value, "must be true or false")
            return value.lower() in _TRUE

        self._ask(key, meaning, default, None, "`true`, `false`")
        return self._read(key, default, convert)

    def choice(self, key: str, meaning: str, choices: tuple[Choice, ...], *, default: Choice | None = None) -> Choice:
        """One of ``choices``."""

        def convert(value: str) -> Choice:
            for choice in choices:
                if value == choice:
                    return choice
            raise _error(key, value, f"must be one of {', '.join(choices)}")

        self._ask(key, meaning, default, None, ", ".join(f"`{choice}`" for choice in choices))
        return self._read(key, default, convert)

    def listing(self, key: str, meaning: str, *, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Values separated by commas; blanks around them and empty ones are left out."""
        self._ask(key, meaning, ",".join(default or ()), None, "separated by commas")
        return self._read(key, default, lambda value: tuple(i.strip() for i in value.split(",") if i.strip()))

    def duration_s(self, key: str, meaning: str, *, default: float | None = None, minimum: float = 0.0) -> float:
        """Seconds; takes a unit of ms, s, m or h, and none means seconds."""

        def convert(value: str) -> float:
            match = _DURATION.fullmatch(value)
            if match is None:
                raise _error(key, value, "must be a duration such as 250ms, 2s or 5m")
            seconds = float(match["number"]) * _SECONDS_PER_UNIT[match["unit"]]
            if seconds < minimum:
                raise _error(key, value, f"must be at least {minimum:g} s")
            return seconds

        self._ask(key, meaning, default, None, _range(minimum, None))
        return self._read(key, default, convert)

    def log_level(self, key: str, meaning: str, *, default: str = "info") -> str:
        """The name of a level of ``logging``, in any case."""
        self._ask(key, meaning, default, None, "`debug`, `info`, `warning`, `error`, `critical`")
        value = self._value(key)
        if value is None:
            return default
        if value.upper() not in logging.getLevelNamesMapping():
            raise _error(key, value, "must be debug, info, warning, error or critical")
        return value

    def secret(self, key: str, meaning: str) -> str | None:
        """The value of ``key``, or what stands in the file that ``KEY_FILE`` names (a mounted secret). None: neither.

        Its errors never show the secret.
        """
        self._ask(key, meaning, None, None)
        self._ask(f"{key}_FILE", f"File that holds `{key}` (a mounted secret).", None, None, "file")
        value, path = self._value(key), self._value(f"{key}_FILE")
        if path is None:
            return value
        if value is not None:
            raise SettingsError(f"{key} and {key}_FILE are both set: unset one", param=key)
        return read_secret(f"{key}_FILE", Path(path))

    def secret_file(self, key: str) -> Path | None:
        """Where ``secret`` finds ``key``, for whoever reads it again later. None: not in a file."""
        path = self._value(f"{key}_FILE")
        return Path(path) if path is not None else None

    def file(self, key: str, meaning: str, *, shown: str | None = None) -> Path | None:
        """A file that exists. None: unset; ``shown`` says what happens then."""
        self._ask(key, meaning, None, shown, "file")
        value = self._value(key)
        if value is None:
            return None
        if not Path(value).is_file():
            raise _error(key, value, "there is no such file")
        return Path(value)

    def _ask(self, key: str, meaning: str, default: object, shown: str | None, values: str = "") -> None:
        self.asked[key] = Setting(key, meaning, _written(default) if shown is None else shown, values)

    def _value(self, key: str) -> str | None:
        return self.environ.get(key, "").strip() or None

    def _read(self, key: str, default: D | None, convert: Callable[[str], D]) -> D:
        value = self._value(key)
        if value is not None:
            return convert(value)
        if default is None:
            raise SettingsError(f"{key} is not set and has no default", param=key)
        return default


def read_secret(key: str, path: Path) -> str:
    """What stands in the file that the setting ``key`` names. Raises ``SettingsError``, which never shows it."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_SECRET_BYTES + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _error(key, str(path), f"cannot be read: {problem}") from error
    if not text:
        raise _error(key, str(path), "the file is empty")
    if len(text) > _MAX_SECRET_BYTES:
        raise _error(key, str(path), f"the file is larger than {_MAX_SECRET_BYTES} bytes")
    return text


def _written(value: object) -> str:
    match value:
        case None | "":
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case float():
            return f"`{value:.12g}`"
    return f"`{value}`"


def _range(minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f"{minimum:.12g} to {maximum:.12g}"
    if minimum is not None:
        return f"≥ {minimum:.12g}"
    return "" if maximum is None else f"≤ {maximum:.12g}"


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
    return SettingsError(f"{key}={value!r:.{_MAX_SHOWN}}: {problem}", param=key)
