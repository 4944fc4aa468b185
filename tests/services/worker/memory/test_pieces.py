from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.memory.pieces import (
    MAX_ATTEMPTS,
    MAX_PIECES,
    REFETCH_INDEX,
    cut,
    deal,
    feed_index,
    wanted_bits,
    wanted_pieces,
)
from shared.errors import BadRequest
from shared.layout import CHECK_BYTES, layout_of
from tests.records import spec

LAYOUT = layout_of(spec(hidden_size=512, intermediate_size=1024))
PIECES = cut(LAYOUT, CHECK_BYTES)


@given(layers=st.integers(1, 4), hidden=st.sampled_from([16, 128, 512]), blocks=st.integers(1, 5))
def test_pieces_cover_every_byte_of_every_unit_exactly_once(layers: int, hidden: int, blocks: int) -> None:
    layout = layout_of(spec(num_layers=layers, hidden_size=hidden, intermediate_size=2 * hidden))
    pieces = cut(layout, blocks * CHECK_BYTES)
    assert [p.index for p in pieces] == list(range(len(pieces)))
    covered = 0
    for number, unit in enumerate(layout.units):
        mine = [p for p in pieces if p.unit == number]
        data, checks = mine[:-1], mine[-1]
        assert checks.is_checksums
        assert checks.num_bytes == 8 * -(-unit.num_bytes // CHECK_BYTES)
        cursor = unit.offset
        for piece in data:
            assert piece.offset == cursor
            assert (piece.offset - unit.offset) % CHECK_BYTES == 0
            cursor += piece.num_bytes
        assert cursor == unit.offset + unit.num_bytes
        covered += unit.num_bytes
    assert covered == layout.num_bytes


@pytest.mark.parametrize("chunk_bytes", [0, -CHECK_BYTES, CHECK_BYTES + 1])
def test_chunks_must_be_whole_checksum_blocks(chunk_bytes: int) -> None:
    with pytest.raises(BadRequest, match="chunk_bytes"):
        cut(LAYOUT, chunk_bytes)


@given(shares=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8))
def test_stripes_share_out_every_piece_once_in_order_and_in_proportion(shares: list[float]) -> None:
    stripes = deal(PIECES, shares)
    assert sorted(p.index for stripe in stripes for p in stripe) == [p.index for p in PIECES]
    total = sum(p.num_bytes for p in PIECES)
    for stripe, share in zip(stripes, shares, strict=True):
        assert [p.index for p in stripe] == sorted(p.index for p in stripe)
        wanted = total * share / sum(shares)
        assert abs(sum(p.num_bytes for p in stripe) - wanted) <= len(shares) * CHECK_BYTES


def test_layers_are_spread_over_all_stripes() -> None:
    for stripe in deal(PIECES, (0.5, 0.5)):
        assert {p.unit for p in stripe} == set(range(len(LAYOUT.units)))


@pytest.mark.parametrize("shares", [(), (1.0, 0.0), (-1.0,)])
def test_shares_must_be_positive(shares: tuple[float, ...]) -> None:
    with pytest.raises(BadRequest, match="shares"):
        deal(PIECES, shares)


@given(wanted=st.sets(st.integers(0, len(PIECES) - 1)))
def test_wanted_pieces_survive_the_wire(wanted: set[int]) -> None:
    bits = wanted_bits(PIECES.only(np.array(sorted(wanted), dtype=np.int64)))
    assert {p.index for p in wanted_pieces(PIECES, bits)} == wanted


@pytest.mark.parametrize("bits", [b"", b"\xff" * (len(PIECES) // 8 + 2), b"\xff" * -(-len(PIECES) // 8)])
def test_bits_of_another_copy_are_refused(bits: bytes) -> None:
    with pytest.raises(BadRequest):
        wanted_pieces(PIECES, bits)


def test_no_two_pieces_of_all_feeds_share_an_index() -> None:
    highest = feed_index(MAX_ATTEMPTS - 1, MAX_PIECES - 1)
    assert feed_index(0, MAX_PIECES - 1) < feed_index(1, 0)
    assert highest < REFETCH_INDEX
    for attempt, piece in ((MAX_ATTEMPTS, 0), (0, MAX_PIECES), (-1, 0)):
        with pytest.raises(BadRequest):
            feed_index(attempt, piece)
