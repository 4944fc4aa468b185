from __future__ import annotations

import pytest

from services.gateway.request_bodies.body import refuse_large_text, refuse_many_ids
from shared.errors import PayloadTooLarge


@pytest.mark.parametrize("text", ["", "x" * 12, "\u00e9" * 6, "\u4e2d" * 4, "\U0001f600" * 3, "\ud800" * 4])
def test_text_up_to_the_limit_in_bytes_is_taken(text: str) -> None:
    refuse_large_text(text, max_bytes=12, param="prompt")


@pytest.mark.parametrize("text", ["x" * 13, "\u00e9" * 6 + "x", "\u4e2d" * 4 + "x", "\U0001f600" * 3 + "x"])
def test_text_beyond_it_is_refused_with_its_size_in_bytes(text: str) -> None:
    with pytest.raises(PayloadTooLarge, match="13 bytes") as refused:
        refuse_large_text(text, max_bytes=12, param="messages")
    assert refused.value.param == "messages"


def test_ids_are_refused_when_there_are_more_than_bytes() -> None:
    refuse_many_ids(12, max_bytes=12, param="prompt")
    with pytest.raises(PayloadTooLarge, match="13 token ids"):
        refuse_many_ids(13, max_bytes=12, param="prompt")
