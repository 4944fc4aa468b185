"""What services do on their event loops takes each callback little time, also where models and clusters are large.

Callbacks that run by themselves are watched in all tests (``tests.loop_watch``). Decisions of the control plane are
called one by one here; of each, the quickest of a few counts, in CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest

from bench.decisions.states import States
from bench.decisions.stopwatch import Decision
from services.worker.core.upstreams import StripeSources, Upstream
from services.worker.memory.pieces import MAX_PIECES, cut, wanted_bits
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.copies import Copies, Offer
from services.worker.weights.feed_client import FeedClient
from services.worker.weights.receiving import Fill
from services.worker.weights.sending import Sender
from shared.errors import NoResponder, TransportError
from shared.layout import CHECK_BYTES, ArenaLayout, layout_of
from shared.messages.feeds import Feed
from shared.transport.base import TensorTransport
from shared.unit_digests import DIGEST_DIGITS
from tests.loop_watch import MAX_CALLBACK_S, LoopWatch
from tests.processes import INCARNATION
from tests.records import spec

CHUNK_BYTES = 3 * CHECK_BYTES
LARGE = spec(
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    dtype="bfloat16",
)
GPUS, MODELS, REPETITIONS = 1000, 50, 3


class NoMemory:
    """An arena that holds nothing."""

    def __init__(self, layout: ArenaLayout) -> None:
        self.capacity_bytes = layout.num_bytes


@pytest.fixture
def copy() -> WeightCopy:
    layout = layout_of(LARGE)
    assert layout.num_bytes > 141e9
    return WeightCopy(layout, cast(Any, NoMemory(layout)), "0" * DIGEST_DIGITS * len(layout.units))


class Gone:
    """Upstreams of which none answers."""

    async def connect(self, upstream: Upstream) -> Any:
        await asyncio.sleep(0)
        raise NoResponder(f"{upstream.worker_id} is gone")


async def test_a_load_of_a_large_model_begins_and_changes_its_upstream(
    copy: WeightCopy, watched_loops: LoopWatch
) -> None:
    pieces = cut(copy.layout, CHUNK_BYTES)
    assert MAX_PIECES / 2 < len(pieces) < MAX_PIECES
    upstreams = tuple(Upstream("gpu", f"w{i}", "h", b"") for i in range(3))
    stripes = [StripeSources(share, upstreams) for share in (1.0, 1.5, 2.0, 0.7)]

    async def nothing(*_: object) -> None: ...

    with watched_loops.callback("a fill is made"):
        fill = Fill(
            copy,
            "",
            (),
            cast(TensorTransport, None),
            cast(FeedClient, Gone()),
            1,
            CHUNK_BYTES,
            stripes,
            nothing,
            nothing,
            stall_s=1.0,
        )
    with pytest.raises(TransportError, match="no upstream is left"):
        await asyncio.create_task(fill.run())
    with watched_loops.callback("the digest of an instance"):
        assert len(copy.digest()) == 32


async def test_a_feed_of_a_large_model_is_asked_for(copy: WeightCopy) -> None:
    async def unreachable(*_: object) -> Any:
        raise TransportError("no way there")

    copies = Copies()
    copies.offer(Offer("gpu", "hash", copy, contextlib.nullcontext, "i0"))
    sender = Sender(copies, unreachable, cast(Any, None), stall_s=1.0)
    feed = Feed(
        worker_id="w1",
        incarnation=INCARNATION,
        host="h",
        transport_address=b"",
        kind="gpu",
        instance_id="i0",
        model_hash="hash",
        layout_hash=copy.layout.hash,
        plan_id="plan",
        epoch=1,
        attempt=0,
        chunk_bytes=CHUNK_BYTES,
        pieces=wanted_bits(cut(copy.layout, CHUNK_BYTES)),
    )
    with pytest.raises(TransportError, match="no way there"):
        await asyncio.create_task(sender.on_feed(feed))


def test_decisions_on_a_thousand_workers() -> None:
    states = States(GPUS, MODELS, seed=1)
    states.everything(REPETITIONS)
    least_ms = {decision: min(times) / 1000 for decision, times in states.stopwatch.times_us().items()}
    # It has no end here: the planner's shell puts off what a round has no time for.
    del least_ms[Decision("a burst", "planner", "round")]
    too_long = {decision: ms for decision, ms in least_ms.items() if ms > 1000 * MAX_CALLBACK_S}
    assert not too_long
