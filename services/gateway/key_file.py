"""The file of API keys and their limits (``BLITZ_GATEWAY_KEYS_FILE``): TOML, or JSON if its name ends in ``.json``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from services.gateway.core.key_limits import UNLIMITED, Limits
from shared.settings import SettingsError

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_KEYS = 10_000
MAX_RATE = 10**12

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Rate = Annotated[int, Meta(ge=1, le=MAX_RATE)]
ModelName = Annotated[str, Meta(min_length=1, max_length=200)]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key."""

    name: Name
    """Shown in metrics, logs and errors, instead of the key."""
    key: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    """Of the key, in its place."""
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    max_concurrent_requests: Rate | None = None
    models: Annotated[tuple[ModelName, ...], Meta(max_length=1000)] | None = None
    """Models that the key may use; None means all."""
    shares_prefixes: bool = False
    """Whether its requests and those of all other such keys may use each other's KV."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[tuple[KeyEntry, ...], Meta(max_length=MAX_KEYS)]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that is accepted."""

    name: str
    limits: Limits = UNLIMITED
    models: frozenset[str] | None = None
    shares_prefixes: bool = False


def digest(key: bytes) -> bytes:
    """The digest by which a key is found."""
    return hashlib.sha256(key).digest()


def read_keys(path: str) -> dict[bytes, ApiKey]:
    """The keys by digest. Raises ``SettingsError`` saying what is wrong, without any key."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise _wrong(path, f"has more than {MAX_FILE_BYTES} bytes")
    try:
        decode = msgspec.json.decode if path.endswith(".json") else msgspec.toml.decode
        entries = decode(data, type=_File).keys
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # A ValidationError names the place, not the value.
        raise _wrong(path, str(error)) from None
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for entry in entries:
        if (entry.key is None) == (entry.sha256 is None):
            raise _wrong(path, f"key {entry.name!r} needs one of key and sha256")
        found = bytes.fromhex(entry.sha256) if entry.sha256 is not None else digest((entry.key or "").encode())
        if entry.name in names:
            raise _wrong(path, f"two keys are called {entry.name!r}")
        if found in keys:
            raise _wrong(path, f"{keys[found].name!r} and {entry.name!r} are the same key")
        names.add(entry.name)
        limits = Limits(entry.requests_per_minute, entry.tokens_per_minute, entry.max_concurrent_requests)
        models = frozenset(entry.models) if entry.models is not None else None
        keys[found] = ApiKey(entry.name, limits, models, entry.shares_prefixes)
    return keys


def _wrong(path: str, problem: str) -> SettingsError:
    return SettingsError(f"BLITZ_GATEWAY_KEYS_FILE={path!r}: {problem}", param="BLITZ_GATEWAY_KEYS_FILE")
