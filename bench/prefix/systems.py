"""The systems that are compared: settings of a gateway. The instances are the same."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shared.errors import BadRequest

_CACHE = "BLITZ_GATEWAY_PREFIX_CACHE"
_CHOICES = "BLITZ_GATEWAY_AFFINITY_CHOICES"
_IMBALANCE = "BLITZ_GATEWAY_AFFINITY_IMBALANCE"
BASE = "none"
"""What the others are compared with."""
SYSTEMS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # Everything is computed.
        BASE: {_CACHE: "0", _CHOICES: "0"},
        # What an instance has computed is found there, and requests go to the least loaded one.
        "cache": {_CACHE: "1", _CHOICES: "0"},
        # To the one that a hash of the prompt's beginning names, whatever it has to do.
        "hash": {_CACHE: "1", _CHOICES: "1", _IMBALANCE: "1e9"},
        # As the product does it.
        "affinity": {_CACHE: "1"},
    }
)


def chosen(names: str) -> tuple[str, ...]:
    """Of a list with commas, in the order of the table; the base is always there. Raises ``BadRequest``."""
    asked = {name.strip() for name in names.split(",") if name.strip()}
    if not asked or not asked <= set(SYSTEMS):
        raise BadRequest(f"systems must be of {', '.join(SYSTEMS)}, not {names!r}", param="system")
    return tuple(name for name in SYSTEMS if name in asked | {BASE})


def ordered(systems: tuple[str, ...], seed: int) -> tuple[str, ...]:
    """In which they are measured: there and back, so that what changes on the machine meanwhile disturbs all alike."""
    return systems[::-1] if seed % 2 else systems
