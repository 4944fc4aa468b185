"""How a model's bytes are cut into messages. Both ends derive the same pieces from the layout.

A transfer to one target is, in this order: the header (index 0), then for each unit its data
pieces and one piece with the unit's checksums. Piece *i* travels under ``tag_of(epoch, i)``, where
``epoch`` is the target's lease epoch, so tags are never reused.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.errors import TransportError
from shared.layout import CHECK_BYTES, ArenaLayout

HEADER_BYTES = 1024
HEADER_INDEX = 0
REFETCH_INDEX = 1 << 23
"""Pieces fetched again count from here, far above any transfer's."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of a transfer. Data pieces are arena ranges, checksum pieces are 8 bytes per block."""

    index: int
    unit: int
    offset: int
    """Byte in the arena (data), or in the copy's checksum table (checksums)."""
    num_bytes: int
    is_checksums: bool
    last_of_unit: bool


def check_blocks(num_bytes: int) -> int:
    """Checksum blocks of a unit."""
    return -(-num_bytes // CHECK_BYTES)


def cut(layout: ArenaLayout, chunk_bytes: int) -> tuple[Piece, ...]:
    """All pieces in transfer order.

    Raises ``ValueError`` unless ``chunk_bytes`` is a positive multiple of ``CHECK_BYTES``.
    """
    if chunk_bytes <= 0 or chunk_bytes % CHECK_BYTES:
        raise ValueError(f"chunk_bytes {chunk_bytes} is not a positive multiple of {CHECK_BYTES}")
    pieces: list[Piece] = []
    checksum_offset = 0
    for number, unit in enumerate(layout.units):
        for begin in range(0, unit.num_bytes, chunk_bytes):
            size = min(chunk_bytes, unit.num_bytes - begin)
            pieces.append(Piece(len(pieces) + 1, number, unit.offset + begin, size, False, False))
        size = 8 * check_blocks(unit.num_bytes)
        pieces.append(Piece(len(pieces) + 1, number, checksum_offset, size, True, True))
        checksum_offset += size
    if len(pieces) >= REFETCH_INDEX:
        raise ValueError(f"{len(pieces)} pieces of {chunk_bytes} bytes are too many for one transfer")
    return tuple(pieces)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a transfer: what comes, and the trace it belongs to."""

    plan_id: str
    model_hash: str
    layout_hash: str
    chunk_bytes: int
    traceparent: str = ""

    def pack(self) -> bytearray:
        """Exactly ``HEADER_BYTES``: length, msgpack, zeros."""
        body = msgspec.msgpack.encode(self)
        packed = len(body).to_bytes(2, "little") + body
        if len(packed) > HEADER_BYTES:
            raise ValueError(f"transfer header of {len(packed)} bytes exceeds {HEADER_BYTES}")
        return bytearray(packed.ljust(HEADER_BYTES, b"\0"))

    @classmethod
    def unpack(cls, packed: bytearray) -> Header:
        """Raises ``TransportError`` for anything but a packed header."""
        size = int.from_bytes(packed[:2], "little")
        try:
            return msgspec.msgpack.decode(packed[2 : 2 + size], type=cls)
        except msgspec.MsgspecError as error:
            raise TransportError(f"malformed transfer header: {error}") from error
