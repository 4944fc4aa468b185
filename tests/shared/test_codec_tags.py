from __future__ import annotations

import msgspec
import pytest

from shared.messages.codec import MalformedMessage, decode, encode
from shared.messages.common import Ack
from shared.messages.generation import Cancel


@pytest.mark.parametrize("body", [{}, {"kind": "never.v0"}, {"kind": "cancel.v1", "request_id": "a", "attempt": 1}])
def test_a_message_without_its_own_tag_is_malformed(body: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        decode(msgspec.msgpack.encode(body), Ack)


def test_a_tagged_message_survives() -> None:
    cancel = Cancel(request_id="a", attempt=2)
    assert decode(encode(cancel), Cancel) == cancel
