"""A prompt that is computed in chunks: its KV leaves chunk by chunk, whatever happens to it in the meantime."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from services.worker.device.completion import Completion, Landed
from services.worker.engine.loop import EngineLoop
from services.worker.engine.mock.tokens import next_token
from shared.errors import Conflict
from shared.messages.disaggregated import DecodeRoom, RenewDecode
from shared.transport.base import Buffer
from tests.services.fake_gateway import expected_tokens
from tests.services.worker.kv_transfer.fakes import FakeDecode, FakePrefill, clean
from tests.services.worker.kv_transfer.sender.steps import Gate, ended, kept, submit
from tests.services.worker.lone_worker import LoneWorker
from tests.wait_until import WAIT_S, eventually

LONG = tuple(32 + (7 * j) % 90 for j in range(150))
"""Three chunks of 64 tokens at most."""


async def whole(alone: LoneWorker, decode: FakeDecode, output: tuple[int, ...] = ()) -> None:
    """All KV that it did not hold is at the decode instance, and right; so is the first token."""
    prefill = FakePrefill(alone, "")
    sent = prefill.kv(prefill.request(prompt=LONG, output=output), start=decode.held_tokens)
    for got, computed in zip(decode.kv(0), sent, strict=True):
        assert np.array_equal(got, computed)
    await prefill.close()
    assert [b.token_id for b in decode.begins] == [next_token((*LONG, *output))]
    await clean(alone)


def preempt(loop: EngineLoop) -> None:
    """As a decode does that finds no block."""
    table = loop.scheduler.table
    (victim,) = table.running
    if table.flies(victim):
        table.torn.add(id(victim))
    table.running.clear()
    table.free(victim)
    victim.num_computed = 0
    table.wait(victim)


async def test_kv_of_a_chunk_leaves_before_the_next_one_is_computed(alone: LoneWorker, decode: FakeDecode) -> None:
    gate = Gate(alone.worker, 0, passes=1)
    num_layers = alone.worker.serving.engine.loop.engine.num_layers
    await submit(alone, decode, prompt=LONG)
    await eventually(lambda: decode.layers_here(0) == num_layers)
    await eventually(gate.inside.is_set)
    assert decode.chunks[0] == [(0, 64)]
    gate.open()
    await ended(alone, moved=1)
    assert decode.chunks[0] == [(0, 64), (64, 128), (128, 150)]
    await whole(alone, decode)


async def test_what_an_earlier_attempt_put_out_is_in_the_chunks(alone: LoneWorker, decode: FakeDecode) -> None:
    output = expected_tokens(9, LONG)
    await submit(alone, decode, prompt=LONG, output=output, attempt=2, max_tokens=20)
    await ended(alone, moved=1)
    assert decode.chunks[0] == [(0, 64), (64, 128), (128, 159)]
    await whole(alone, decode, output)


async def test_room_that_comes_late_is_for_chunks_of_the_usual_size(alone: LoneWorker, decode: FakeDecode) -> None:
    room, real = asyncio.Event(), decode.on_reserve

    async def late(message):  # type: ignore[no-untyped-def]
        await room.wait()
        return await real(message)

    decode.on_reserve = late
    await submit(alone, decode, prompt=LONG)
    await alone.gateway.tokens_arrived("r", 1)
    room.set()
    await ended(alone, moved=1)
    assert [end - start for start, end in decode.chunks[0]] == [64, 64, 22]
    await whole(alone, decode)


async def test_a_prompt_that_is_preempted_between_its_chunks_arrives_all_the_same(
    alone: LoneWorker, decode: FakeDecode
) -> None:
    gate = Gate(alone.worker, 1, passes=1)
    await submit(alone, decode, prompt=LONG)
    await eventually(lambda: decode.layers_here(0) > 4)
    preempted = alone.worker.serving.engine.call(preempt)  # after the second of its steps
    gate.open()
    await asyncio.wrap_future(preempted)
    await ended(alone, moved=1)
    assert len(decode.chunks[0]) == 3
    await whole(alone, decode)


async def test_what_is_read_from_blocks_that_are_anothers_by_then_does_not_leave(
    alone: LoneWorker, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(alone.worker, 0, passes=1)
    engine = alone.worker.serving.engine.loop.engine
    export_kv, reading, read = engine.export_kv, threading.Event(), threading.Event()

    def slowly(*args: object, **kwargs: object) -> Completion[Buffer]:
        exported = export_kv(*args, **kwargs)  # type: ignore[arg-type]
        if reading.is_set():
            return exported
        reading.set()
        assert read.wait(WAIT_S)
        return Landed(np.zeros_like(np.frombuffer(exported.result(), dtype=np.uint8)))

    monkeypatch.setattr(engine, "export_kv", slowly)
    await submit(alone, decode, prompt=LONG)
    await eventually(reading.is_set)
    await eventually(gate.inside.is_set)
    preempted = alone.worker.serving.engine.call(preempt)
    gate.open()
    await asyncio.wrap_future(preempted)
    read.set()
    await ended(alone, moved=1)
    await whole(alone, decode)


async def test_a_decode_worker_that_does_not_want_a_chunk_does_not_get_the_request(
    alone: LoneWorker, decode: FakeDecode
) -> None:
    real = decode.on_renew

    async def refuse(message: RenewDecode) -> DecodeRoom:
        if message.chunk_start:
            raise Conflict("no")
        return await real(message)

    decode.on_renew = refuse
    await submit(alone, decode, prompt=LONG)
    await kept(alone, prompt=LONG)
    await ended(alone, kept=1)


@pytest.mark.parametrize("held", [32, 64, 144])
async def test_what_the_decode_worker_holds_is_not_sent(alone: LoneWorker, decode: FakeDecode, held: int) -> None:
    decode.held_tokens = held
    await submit(alone, decode, prompt=LONG)
    await ended(alone, moved=1)
    chunks = decode.chunks[0]
    assert [chunks[0][0], *(end for _, end in chunks)] == [*(start for start, _ in chunks), len(LONG)]
    assert chunks[0][0] == held
    await whole(alone, decode)


async def test_a_prompt_of_one_step_leaves_without_what_is_held(alone: LoneWorker, decode: FakeDecode) -> None:
    decode.held_tokens = 16
    await submit(alone, decode, prompt=LONG[:40])
    await ended(alone, moved=1)
    assert decode.chunks[0] == [(16, 40)]
    prefill = FakePrefill(alone, "")
    for got, computed in zip(decode.kv(0), prefill.kv(prefill.request(prompt=LONG[:40]), start=16), strict=True):
        assert np.array_equal(got, computed)
    await prefill.close()
    await clean(alone)


async def test_how_much_of_the_transfer_prefill_hid_is_counted(alone: LoneWorker, decode: FakeDecode) -> None:
    await submit(alone, decode, prompt=LONG)
    await ended(alone, moved=1)
    samples = {s.name: s.value for metric in alone.worker.metrics.collect() for s in metric.samples}
    assert samples["blitz_worker_kv_transfer_seconds_count"] == 1
    assert samples["blitz_worker_kv_transfer_seconds_sum"] > 0
    assert samples["blitz_worker_kv_exposed_seconds_count"] == 1
    assert samples["blitz_worker_kv_exposed_seconds_sum"] >= 0
