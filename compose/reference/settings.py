"""What ``read`` of each service's settings asks for, out of an empty environment."""

from __future__ import annotations

from collections.abc import Iterable

from compose.reference.table import table
from compose.settings_check import readers_by_service
from compose.variables import OF_COMMANDS, OF_CONTAINERS
from shared.settings import Setting, Settings

_HEAD = ("variable", "default", "values", "meaning")
_UNITS = {
    "_TOKENS_PER_S": "tokens/s", "_S": "s", "_MS": "ms", "_US": "µs", "_GBPS": "Gbit/s", "_MIB": "MiB",
    "_KIB": "KiB", "_BYTES": "bytes",
}  # fmt: skip
"""By the end of a variable's name; the first that fits."""


def settings_of_services() -> dict[str, dict[str, Setting]]:
    """What each service reads, by key."""
    asked = {}
    for service, read in readers_by_service().items():
        settings = Settings({})
        read(settings)
        asked[service] = settings.asked
    return asked


def settings_page() -> str:
    """``docs/reference/settings.md``."""
    services = settings_of_services()
    shared = [key for key in dict.fromkeys(k for asked in services.values() for k in asked) if _readers(services, key)]
    common = [
        (*row, _readers(services, key))
        for key, row in zip(shared, _rows(_any(services, key) for key in shared), strict=True)
    ]
    parts = ["# Settings\n\n## Several services\n\n", table((*_HEAD, "read by"), common)]
    for service, asked in services.items():
        own = [setting for key, setting in asked.items() if key not in shared]
        parts += [f"## {service.capitalize()}\n\n", table(_HEAD, _rows(own))]
    parts += ["## Commands\n\n", table(_HEAD, _rows(OF_COMMANDS))]
    parts += ["## docker-compose\n\n", table(_HEAD, _rows(OF_CONTAINERS))]
    return "".join(parts).rstrip() + "\n"


def _readers(services: dict[str, dict[str, Setting]], key: str) -> str:
    """Who reads a setting that several services read; empty for others."""
    reading = [service for service, asked in services.items() if key in asked]
    if len(reading) == 1:
        return ""
    missing = [service for service in services if service not in reading]
    if not missing:
        return "all"
    return f"all but {missing[0]}" if len(missing) == 1 else ", ".join(reading)


def _any(services: dict[str, dict[str, Setting]], key: str) -> Setting:
    return next(asked[key] for asked in services.values() if key in asked)


def _rows(settings: Iterable[Setting]) -> list[tuple[str, ...]]:
    return [(f"`{s.key}`", s.default or "none", _values(s), s.meaning) for s in settings]


def _values(setting: Setting) -> str:
    unit = next((unit for end, unit in _UNITS.items() if setting.key.endswith(end)), "")
    return ", ".join(part for part in (unit, setting.values) if part)
