"""One posted send or receive."""

from __future__ import annotations

import gc
import weakref

import pytest

from shared.errors import PeerLost
from shared.transport.transfer import PostedTransfer


class Memory:
    pass


async def test_what_waits_for_a_transfer_that_failed_is_free_at_once() -> None:
    """Pinned memory, of which there is little, in the frames of those who wait."""
    transfer = PostedTransfer(b"", 0, lambda _: None)
    kept: list[weakref.ref[Memory]] = []

    async def receive(transfer: PostedTransfer) -> Memory:
        memory = Memory()
        kept.append(weakref.ref(memory))
        await transfer.wait()
        return memory

    transfer.finish(PeerLost("the peer was lost"))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(PeerLost, match="was lost"):
            await receive(transfer)
        assert transfer.error is not None
        assert kept[0]() is None
    finally:
        gc.enable()
