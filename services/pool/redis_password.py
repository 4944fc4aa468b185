"""The password of a Redis, from a file that may be replaced while the pool runs."""

from __future__ import annotations

from pathlib import Path

from redis.credentials import CredentialProvider

from shared.last_good import LastGood
from shared.settings import read_secret


class FilePassword(CredentialProvider):
    """redis-py asks for it at every new connection; those that are open stay."""

    def __init__(self, path: Path, password: str, user: str = "") -> None:
        """``password``: what the file held at the start. ``user``: empty for Redis's own."""
        self._user = user
        self._password = LastGood(lambda: read_secret("BLITZ_REDIS_PASSWORD_FILE", path), password)

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password.now()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()
