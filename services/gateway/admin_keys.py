"""The keys that this gateway accepts for administration."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from services.gateway.watched_file import WatchedFile
from shared.settings import SettingsError, read_secret

_KEY = "BLITZ_ADMIN_KEYS_FILE"


class AdminKeys:
    """For the event loop only."""

    def __init__(self, plain: Sequence[str], path: str) -> None:
        """``plain`` keys, or those in the file at ``path``, which is read again when it changes; empty: no file. Raises
        ``SettingsError``."""
        self._keys = tuple(key.encode() for key in plain)
        self._file = WatchedFile(path, read_admin_keys, self._apply, "admin keys") if path else None

    @property
    def required(self) -> bool:
        """Whether a key must be shown: where there is a file always, whatever becomes of it."""
        return self._file is not None or bool(self._keys)

    def accept(self, shown: bytes) -> bool:
        """Whether this is one of the keys. The time that it takes reveals nothing about them."""
        return any(hmac.compare_digest(shown, key) for key in self._keys)

    async def look(self) -> None:
        """Read the file if it has changed. A bad one, or one without keys, changes nothing, and is logged."""
        if self._file is not None:
            await self._file.look()

    async def run(self) -> None:
        """Look regularly, until cancelled."""
        if self._file is not None:
            await self._file.watch()

    def _apply(self, keys: tuple[str, ...]) -> None:
        self._keys = tuple(key.encode() for key in keys)


def read_admin_keys(path: str) -> tuple[str, ...]:
    """One key per line; blank lines and those that begin with ``#`` say nothing. Raises ``SettingsError``, without any
    key."""
    lines = [line.strip() for line in read_secret(_KEY, Path(path)).splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise SettingsError(f"{_KEY}={path!r}: the file holds no key", param=_KEY)
    return keys
