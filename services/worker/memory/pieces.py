"""How a model's bytes are cut into messages. Both ends derive the same pieces from the layout.

The pieces of a copy are, for each unit in order, its chunks and then one piece with the unit's checksums. A *feed*
brings some of them to one receiver, in order; the receiver asks for them by number. Piece *i* travels under
``tag_of(epoch, feed_index(attempt, i))``: the epoch is the receiver's lease, the attempt counts its feeds, so no tag
is ever used twice, also when a feed broke and the rest comes from elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import overload

import numpy as np
import numpy.typing as npt

from shared.errors import BadRequest
from shared.layout import CHECK_BYTES, ArenaLayout

Indices = npt.NDArray[np.int64]

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


class _Cuts:
    """Where the pieces of a copy begin."""

    def __init__(self, units: Sequence[tuple[int, int]], chunk_bytes: int) -> None:
        """``units``: offset and bytes of each."""
        self.units = units
        self.chunk_bytes = chunk_bytes
        self.first = [0, *accumulate(-(-num_bytes // chunk_bytes) + 1 for _, num_bytes in units)]
        """The number of each unit's first piece, and of all pieces."""
        self.tables = [0, *accumulate(8 * check_blocks(num_bytes) for _, num_bytes in units)]
        """Where each unit's checksums begin, in bytes."""

    def piece(self, index: int) -> Piece:
        unit = bisect_right(self.first, index) - 1
        offset, unit_bytes = self.units[unit]
        begin = (index - self.first[unit]) * self.chunk_bytes
        if begin < unit_bytes:
            return Piece(index, unit, offset + begin, min(self.chunk_bytes, unit_bytes - begin), False)
        return Piece(index, unit, self.tables[unit], self.tables[unit + 1] - self.tables[unit], True)


class Pieces(Sequence[Piece]):
    """Some pieces of one copy, or all, in order. A large model has many thousand, and the event loop handles them: they
    are kept as numbers, and made into a ``Piece`` one by one, when it is sent or received."""

    __slots__ = ("_cuts", "indices")

    def __init__(self, cuts: _Cuts, indices: Indices) -> None:
        """``indices``: ascending."""
        self._cuts = cuts
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, at: int) -> Piece: ...

    @overload
    def __getitem__(self, at: slice) -> Pieces: ...

    def __getitem__(self, at: int | slice) -> Piece | Pieces:
        return self.only(self.indices[at]) if isinstance(at, slice) else self._cuts.piece(int(self.indices[at]))

    def only(self, indices: Indices) -> Pieces:
        """These pieces of the same copy, in ascending order."""
        return Pieces(self._cuts, indices)

    @property
    def chunk_bytes(self) -> int:
        """Of each data piece but a unit's last."""
        return self._cuts.chunk_bytes

    @property
    def num_all(self) -> int:
        """Pieces of the whole copy."""
        return self._cuts.first[-1]

    @property
    def most_bytes(self) -> int:
        """No piece is larger."""
        unit_bytes = max(num_bytes for _, num_bytes in self._cuts.units)
        return max(min(self.chunk_bytes, unit_bytes), 8 * check_blocks(unit_bytes))

    @property
    def places(self) -> tuple[Indices, Indices]:
        """The unit of each piece, and its number there: the data pieces from 0 on, then the checksums."""
        first = np.array(self._cuts.first)
        units = np.searchsorted(first, self.indices, side="right") - 1
        return units, self.indices - first[units]

    def by_unit(self) -> Iterator[tuple[int, Pieces, bool]]:
        """Each unit that has pieces here, these, and whether they are all that it has."""
        bounds = np.searchsorted(self.indices, self._cuts.first).tolist()
        for unit, ((begin, end), (first, last)) in enumerate(
            zip(pairwise(bounds), pairwise(self._cuts.first), strict=True)
        ):
            if begin < end:
                yield unit, self[begin:end], end - begin == last - first


def cut(layout: ArenaLayout, chunk_bytes: int) -> Pieces:
    """All pieces of a copy, in order; ``pieces[i].index`` is i.

    Raises ``BadRequest`` unless ``chunk_bytes`` is a positive multiple of ``CHECK_BYTES`` that gives few enough pieces.
    """
    if chunk_bytes <= 0 or chunk_bytes % CHECK_BYTES:
        raise BadRequest(f"chunk_bytes {chunk_bytes} is not a positive multiple of {CHECK_BYTES}", param="chunk_bytes")
    cuts = _Cuts([(unit.offset, unit.num_bytes) for unit in layout.units], chunk_bytes)
    num_pieces = cuts.first[-1]
    if num_pieces > MAX_PIECES:
        raise BadRequest(f"{num_pieces} pieces of {chunk_bytes} bytes are too many for one copy", param="chunk_bytes")
    return Pieces(cuts, np.arange(num_pieces))


def deal(pieces: Pieces, shares: Sequence[float]) -> tuple[Pieces, ...]:
    """Of all pieces of a copy, those of each stripe, in order: by bytes in proportion to ``shares``, and interleaved.

    So every layer is spread over all stripes, and layers become ready in order. Each piece goes to the stripe that is
    furthest behind its share. Raises ``BadRequest`` for shares that are not positive.
    """
    if not shares or min(shares) <= 0:
        raise BadRequest(f"shares {tuple(shares)} are not all positive", param="shares")
    if len(shares) == 1:
        return (pieces,)
    share, given = np.array(shares), np.zeros(len(shares))
    stripe_of = np.zeros(len(pieces), dtype=np.int64)
    at = 0
    for _, of_unit, _ in pieces.by_unit():
        # All but the last two are chunks of one size.
        equal = max(0, len(of_unit) - 2)
        stripe_of[at : at + equal] = _deal_equal(equal, pieces.chunk_bytes, share, given)
        for place in range(equal, len(of_unit)):
            num_bytes = of_unit[place].num_bytes
            behind = int(np.argmin((given + num_bytes) / share))
            stripe_of[at + place] = behind
            given[behind] += num_bytes
        at += len(of_unit)
    return tuple(pieces.only(pieces.indices[stripe_of == stripe]) for stripe in range(len(shares)))


def _deal_equal(
    count: int, num_bytes: int, share: npt.NDArray[np.float64], given: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """The stripe of each of so many pieces of one size, one after another to who is furthest behind; adds them to
    ``given``. Each stripe's pieces have the places in line that its share gives them, and the first ``count`` count."""
    even = (given.sum() + count * num_bytes) / share.sum()
    most = np.maximum((even * share - given) // num_bytes, 0).astype(np.int64) + len(share)
    stripes = np.repeat(np.arange(len(share)), most)
    places = np.concatenate([(given[s] + num_bytes * np.arange(1, n + 1)) / share[s] for s, n in enumerate(most)])
    dealt: npt.NDArray[np.int64] = stripes[np.argsort(places, kind="stable")[:count]]
    given += num_bytes * np.bincount(dealt, minlength=len(share))
    return dealt


def wanted_bits(pieces: Pieces) -> bytes:
    """One bit per piece of the whole copy, least significant first; set for ``pieces``."""
    flags = np.zeros(pieces.num_all, dtype=np.uint8)
    flags[pieces.indices] = 1
    return np.packbits(flags, bitorder="little").tobytes()


def wanted_pieces(pieces: Pieces, bits: bytes) -> Pieces:
    """Of all pieces, those whose bit is set. Raises ``BadRequest`` for bits of another number of pieces."""
    if len(bits) != -(-len(pieces) // 8):
        raise BadRequest(f"{len(bits)} bytes of wanted pieces, for {len(pieces)} pieces", param="pieces")
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    if flags[len(pieces) :].any():
        raise BadRequest(f"a piece beyond the {len(pieces)} of this copy is wanted", param="pieces")
    return pieces.only(np.flatnonzero(flags))


def feed_index(attempt: int, piece: int) -> int:
    """The index part of a piece's tag. Raises ``BadRequest`` out of range."""
    if not (0 <= attempt < MAX_ATTEMPTS and 0 <= piece < MAX_PIECES):
        raise BadRequest(f"attempt {attempt} or piece {piece} is out of range", param="attempt")
    return attempt << _PIECE_BITS | piece
