"""What stands in files that somebody replaces while this process runs, such as a mounted Secret: read at each use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from shared.settings import SettingsError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class LastGood(Generic[T]):
    """What ``read`` gives or, while it raises ``SettingsError``, what it gave before: whoever replaces the files may be
    halfway through. The log has one line for each new reason."""

    def __init__(self, read: Callable[[], T], value: T) -> None:
        """``value``: what was read at the start."""
        self._read = read
        self._value = value
        self._said = ""

    def now(self) -> T:
        """Read again."""
        try:
            self._value = self._read()
        except SettingsError as error:
            if error.message != self._said:
                _log.warning("%s; what was read before stays in use", error.message)
            self._said = error.message
        else:
            self._said = ""
        return self._value
