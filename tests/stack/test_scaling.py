"""Scaling a real stack: weights over UCX, requests over all instances, and back."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from compose.stack import Stack
from shared.load_feed import subscribe_load
from shared.messages.load import LoadReport
from tests.checkpoints import tiny_checkpoint
from tests.plain_http import http_client
from tests.stack.client import PATIENCE_S, bus, complete, openai_client, scale, stream, until
from tests.stack.conftest import MODEL
from tests.wait_until import eventually

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


async def test_scaling_in_moves_streams_and_none_of_their_tokens_changes(torch_stack: Stack) -> None:
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"temperature": 0.8, "seed": 6, "logprobs": 2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    ]
    long = "the quick brown fox " * 12

    async def read(http: httpx.AsyncClient, options: dict[str, object]) -> list[tuple[str, tuple[float, ...]]]:
        """Text and log-probabilities, piece by piece. Parsed at the end: what scales in must not wait for it."""
        fixed = {"model": MODEL, "prompt": long, "stream": True, "ignore_eos": True}
        async with http.stream("POST", f"{torch_stack.url}/v1/completions", json=fixed | options) as answer:
            answer.raise_for_status()
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        return [(c["text"], tuple((c["logprobs"] or {}).get("token_logprobs") or ())) for c in choices]

    def joined(pieces: list[tuple[str, tuple[float, ...]]]) -> tuple[str, list[float]]:
        return "".join(text for text, _ in pieces), [value for _, values in pieces for value in values]

    async with http_client(timeout=PATIENCE_S) as http:
        # On a busy machine the streams may be over first: more of them take longer.
        for max_tokens, times in ((400, 4), (750, 4), (750, 8), (750, 12)):
            for options in kinds:
                options["max_tokens"] = max_tokens
            expected = [joined(await read(http, options)) for options in kinds]
            await scale(torch_stack, MODEL, 3)
            reading = [asyncio.create_task(read(http, options)) for options in kinds * times]
            await asyncio.sleep(0.3)
            moved = await _moves(torch_stack)
            record = await scale(torch_stack, MODEL, 1)
            assert record.status == "done", record
            assert record.direction == "in"
            for (text, logprobs), task in zip(expected * times, reading, strict=True):
                found, found_logprobs = joined(await task)
                assert found == text
                assert found_logprobs == pytest.approx(logprobs, abs=1e-4)
            # What moved had not ended: its instance went without waiting for it.
            moved = await _moves(torch_stack) - moved
            if moved >= 4:
                break
        assert moved >= 4, "streams were over before their instances went"
        await until(
            torch_stack,
            lambda s: s.serving(MODEL) == 1 and sum(1 for w in s.workers if w.state == "spare") == 3,
        )


async def _moves(stack: Stack) -> float:
    """Requests that moved to another instance, as the gateway counts them."""
    async with http_client(timeout=PATIENCE_S) as http:
        text = (await http.get(f"{stack.url}/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("blitz_gateway_moves_total{"))


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
    starting = await torch_stack.admin.scale(MODEL, 3, hold_s=600.0)
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
        still_running = stream(client, "swapped", max_tokens=300)
        begun = await anext(still_running)
        await torch_stack.admin.remove_model("swapped")
        await torch_stack.admin.add_model(str(tiny_checkpoint("qwen2")), name="swapped")
        answers = [await complete(client, "swapped") for _ in range(5)]
        assert len(set(answers)) == 1
        assert answers[0] != old
        assert "".join([begun, *[piece async for piece in still_running]]).startswith(old)
        await torch_stack.admin.remove_model("swapped")
        await until(torch_stack, lambda s: all(i.model != "swapped" for i in s.instances))
