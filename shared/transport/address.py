"""Addresses that workers tell each other over the bus: sealed, so that what is none is known before UCX sees it.

UCX ends the process that it is given a broken address in (``Assertion ... failed``, tried with 1.21). The seal is a
checksum behind the address, where UCX does not look: workers of 0.1, which know no seals, connect to sealed addresses
as ever. It tells what was broken on its way from what was not; who means harm can make one.
"""

from __future__ import annotations

import xxhash

from shared.errors import BadAddress

_MAGIC = b"blz1"
_SEAL_BYTES = len(_MAGIC) + 8


def seal(address: bytes) -> bytes:
    """A UCX worker address as it is told to others."""
    return address + _MAGIC + xxhash.xxh3_64_digest(address)


def check(address: bytes) -> None:
    """Raises ``BadAddress`` unless ``address`` is sealed, and as it was."""
    if len(address) <= _SEAL_BYTES or seal(address[:-_SEAL_BYTES]) != address:
        raise BadAddress(f"{len(address)} bytes that are no worker's address", param="transport_address")
