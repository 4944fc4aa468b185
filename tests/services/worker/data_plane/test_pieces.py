from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.data_plane.pieces import HEADER_BYTES, Header, cut
from shared.errors import TransportError
from shared.layout import CHECK_BYTES, layout_of
from tests.records import spec


@given(layers=st.integers(1, 4), hidden=st.sampled_from([16, 128, 512]), blocks=st.integers(1, 5))
def test_pieces_cover_every_byte_of_every_unit_exactly_once(layers: int, hidden: int, blocks: int) -> None:
    layout = layout_of(spec(num_layers=layers, hidden_size=hidden, intermediate_size=2 * hidden))
    pieces = cut(layout, blocks * CHECK_BYTES)
    assert [p.index for p in pieces] == list(range(1, len(pieces) + 1))
    covered = 0
    for number, unit in enumerate(layout.units):
        mine = [p for p in pieces if p.unit == number]
        data, checks = mine[:-1], mine[-1]
        assert checks.is_checksums
        assert checks.last_of_unit
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
    with pytest.raises(ValueError, match="chunk_bytes"):
        cut(layout_of(spec()), chunk_bytes)


def test_a_header_survives_packing() -> None:
    header = Header(plan_id="p", model_hash="m", layout_hash="l", chunk_bytes=1, traceparent="00-ab-cd-01")
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert Header.unpack(packed) == header


@pytest.mark.parametrize(
    "packed", [bytearray(HEADER_BYTES), bytearray(b"\xff" * HEADER_BYTES), bytearray(b"\x02\x00ab")]
)
def test_garbage_is_no_header(packed: bytearray) -> None:
    with pytest.raises(TransportError):
        Header.unpack(packed)
