"""Scaling a real stack: weights over UCX, requests over all instances, and back."""

from __future__ import annotations

import asyncio

import pytest

from compose.stack import Stack
from shared.load_feed import subscribe_load
from shared.messages.load import LoadReport
from tests.checkpoints import tiny_checkpoint
from tests.services.waiting import eventually
from tests.stack.client import bus, complete, openai_client, scale, stream, until
from tests.stack.conftest import MODEL

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]


async def test_three_instances_hold_identical_weights_and_answer_identically(torch_stack: Stack) -> None:
    async with openai_client(torch_stack) as client:
        alone = await complete(client, MODEL)
        record = await scale(torch_stack, MODEL, 3)
        assert record.status == "done", record
        assert len(record.targets) == 2
        assert record.trigger_to_first_byte_ms is not None
        assert record.trigger_to_serving_ms is not None
        assert len(record.layer_ready_ms) == 4
        assert record.bytes == sum(t.received_bytes for t in record.targets) > 0
        status = await until(torch_stack, lambda s: s.serving(MODEL) == 3)
        digests = {i.weights_digest for i in status.instances}
        assert len(digests) == 1
        assert digests != {""}

        reports: dict[str, LoadReport] = {}
        async with bus(torch_stack) as listening:
            await subscribe_load(listening, lambda r: reports.update({r.instance_id: r}))
            texts = await asyncio.gather(*(complete(client, MODEL) for _ in range(30)))
            assert set(texts) == {alone}
            # Requests spread over all instances.
            await eventually(lambda: len(reports) == 3 and all(r.decode_tokens_total > 0 for r in reports.values()))


async def test_scaling_in_lets_streams_finish(torch_stack: Stack) -> None:
    async with openai_client(torch_stack) as client:
        await scale(torch_stack, MODEL, 3)
        expected = await complete(client, MODEL, max_tokens=300)

        async def read() -> str:
            return "".join([piece async for piece in stream(client, MODEL, max_tokens=300)])

        reading = [asyncio.create_task(read()) for _ in range(9)]
        await asyncio.sleep(0.2)
        record = await scale(torch_stack, MODEL, 1)
        assert record.status == "done", record
        assert record.direction == "in"
        assert await asyncio.gather(*reading) == [expected] * 9
        await until(
            torch_stack,
            lambda s: s.serving(MODEL) == 1 and sum(1 for w in s.workers if w.state == "spare") == 3,
        )


async def test_more_instances_than_workers_give_what_there_is_and_say_so(torch_stack: Stack) -> None:
    record = await scale(torch_stack, MODEL, 9)
    assert record.status == "done"
    assert record.left_out
    await until(torch_stack, lambda s: s.serving(MODEL) == 4)
    await scale(torch_stack, MODEL, 1)


async def test_a_worker_that_dies_while_it_loads_is_replaced(torch_stack: Stack) -> None:
    await scale(torch_stack, MODEL, 1)
    # One that still drains would be revived.
    await until(torch_stack, lambda s: len(s.instances) == 1 and sum(w.state == "spare" for w in s.workers) == 3)
    starting = await torch_stack.admin.scale(MODEL, 3, hold_s=60.0)
    torch_stack.kill(starting.targets[0].worker_id)
    await until(torch_stack, lambda s: s.serving(MODEL) == 3)
    async with openai_client(torch_stack) as client:
        texts = await asyncio.gather(*(complete(client, MODEL) for _ in range(12)))
        assert len(set(texts)) == 1
        await scale(torch_stack, MODEL, 1)


async def test_other_weights_under_a_name_that_was_removed_are_never_mixed_with_the_old(torch_stack: Stack) -> None:
    async with openai_client(torch_stack) as client:
        await torch_stack.admin.add_model(str(tiny_checkpoint("llama")), name="swapped")
        await until(torch_stack, lambda s: s.serving("swapped") == 1)
        old = await complete(client, "swapped")
        still_running = asyncio.create_task(complete(client, "swapped", max_tokens=300))
        await asyncio.sleep(0.1)
        await torch_stack.admin.remove_model("swapped")
        await torch_stack.admin.add_model(str(tiny_checkpoint("qwen2")), name="swapped")
        answers = [await complete(client, "swapped") for _ in range(5)]
        assert len(set(answers)) == 1
        assert answers[0] != old
        assert (await still_running).startswith(old)
        await torch_stack.admin.remove_model("swapped")
        await until(torch_stack, lambda s: all(i.model != "swapped" for i in s.instances))
