"""How a model's bytes are cut into messages. Both ends derive the same pieces from the layout.

The pieces of a copy are, for each unit in order, its chunks and then one piece with the unit's checksums. A *feed*
brings some of them to one receiver, in order; the receiver asks for them by number. Piece *i* travels under
``tag_of(epoch, feed_index(attempt, i))``: the epoch is the receiver's lease, the attempt counts its feeds, so no tag
is ever used twice, also when a feed broke and the rest comes from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shared.errors import BadRequest
from shared.layout import CHECK_BYTES, ArenaLayout

_PIECE_BITS = 18
MAX_PIECES = 1 << _PIECE_BITS
MAX_ATTEMPTS = 32
REFETCH_INDEX = 1 << 23
"""Blocks fetched again count from here, above all pieces of all attempts."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of a transfer. Data pieces are arena ranges, checksum pieces are 8 bytes per block."""

    index: int
    unit: int
    offset: int
    """Byte in the arena (data), or in the copy's checksum table (checksums)."""
    num_bytes: int
    is_checksums: bool


def check_blocks(num_bytes: int) -> int:
    """Checksum blocks of a unit."""
    return -(-num_bytes // CHECK_BYTES)


def cut(layout: ArenaLayout, chunk_bytes: int) -> tuple[Piece, ...]:
    """All pieces of a copy, in order; ``pieces[i].index`` is i.

    Raises ``BadRequest`` unless ``chunk_bytes`` is a positive multiple of ``CHECK_BYTES`` that gives few enough pieces.
    """
    if chunk_bytes <= 0 or chunk_bytes % CHECK_BYTES:
        raise BadRequest(f"chunk_bytes {chunk_bytes} is not a positive multiple of {CHECK_BYTES}", param="chunk_bytes")
    return _cut(tuple((unit.offset, unit.num_bytes) for unit in layout.units), chunk_bytes)


@lru_cache(maxsize=16)
def _cut(units: tuple[tuple[int, int], ...], chunk_bytes: int) -> tuple[Piece, ...]:
    """Kept: a large model has many thousand pieces, and every feed of it needs them."""
    pieces: list[Piece] = []
    checksum_offset = 0
    for number, (offset, num_bytes) in enumerate(units):
        for begin in range(0, num_bytes, chunk_bytes):
            size = min(chunk_bytes, num_bytes - begin)
            pieces.append(Piece(len(pieces), number, offset + begin, size, False))
        size = 8 * check_blocks(num_bytes)
        pieces.append(Piece(len(pieces), number, checksum_offset, size, True))
        checksum_offset += size
    if len(pieces) > MAX_PIECES:
        raise BadRequest(f"{len(pieces)} pieces of {chunk_bytes} bytes are too many for one copy", param="chunk_bytes")
    return tuple(pieces)


def deal(pieces: Sequence[Piece], shares: Sequence[float]) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each stripe, in order: by bytes in proportion to ``shares``, and interleaved.

    So every layer is spread over all stripes, and layers become ready in order. Each piece goes to the stripe that is
    furthest behind its share. Raises ``BadRequest`` for shares that are not positive.
    """
    if not shares or min(shares) <= 0:
        raise BadRequest(f"shares {tuple(shares)} are not all positive", param="shares")
    dealt: list[list[Piece]] = [[] for _ in shares]
    given = [0.0] * len(shares)
    for piece in pieces:
        behind = min(range(len(shares)), key=lambda s: (given[s] + piece.num_bytes) / shares[s])
        dealt[behind].append(piece)
        given[behind] += piece.num_bytes
    return tuple(tuple(stripe) for stripe in dealt)


def wanted_bits(pieces: Iterable[Piece], total: int) -> bytes:
    """One bit per piece of the copy (``total`` of them), least significant first; set for ``pieces``."""
    flags = np.zeros(total, dtype=np.uint8)
    flags[[piece.index for piece in pieces]] = 1
    return np.packbits(flags, bitorder="little").tobytes()


def wanted_pieces(pieces: Sequence[Piece], bits: bytes) -> tuple[Piece, ...]:
    """The pieces whose bit is set. Raises ``BadRequest`` for bits of another number of pieces."""
    if len(bits) != -(-len(pieces) // 8):
        raise BadRequest(f"{len(bits)} bytes of wanted pieces, for {len(pieces)} pieces", param="pieces")
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    if flags[len(pieces) :].any():
        raise BadRequest(f"a piece beyond the {len(pieces)} of this copy is wanted", param="pieces")
    return tuple(pieces[i] for i in np.flatnonzero(flags[: len(pieces)]).tolist())


def feed_index(attempt: int, piece: int) -> int:
    """The index part of a piece's tag. Raises ``BadRequest`` out of range."""
    if not (0 <= attempt < MAX_ATTEMPTS and 0 <= piece < MAX_PIECES):
        raise BadRequest(f"attempt {attempt} or piece {piece} is out of range", param="attempt")
    return attempt << _PIECE_BITS | piece
