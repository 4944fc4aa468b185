"""What no gateway, pool or planner that means well sends to a worker: refused by code, and nothing is changed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from shared import subjects
from shared.errors import BadRequest
from shared.messages.codec import MalformedMessage, decode
from shared.messages.common import Ack
from shared.messages.copies import HoldCopy
from shared.messages.generation import GOODBYE_S, DecodePlace, GatewayHeartbeat, SamplingParams, Submit
from tests.processes import INCARNATION, process
from tests.services.fake_gateway import PROMPT, expected_tokens
from tests.services.worker.lone_worker import LoneWorker, lone_worker, model_record
from tests.wait_until import eventually


@pytest.fixture
async def alone() -> AsyncIterator[LoneWorker]:
    async with lone_worker() as worker:
        yield worker


def submit(instance_id: str, *, sampling: dict[str, Any] | None = None, **changes: Any) -> Submit:
    params: dict[str, Any] = {"max_tokens": 3, "seed": 1, "temperature": 0.0}
    fields: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1,
        "gateway_id": "gw",
        "gateway_incarnation": "1",
        "instance_id": instance_id,
        "model": "m",
        "model_hash": model_record().model_hash,
        "prompt_token_ids": PROMPT,
        "sampling": SamplingParams(**(params | (sampling or {}))),
    }
    return Submit(**(fields | changes))


SAMPLING: list[dict[str, Any]] = [
    {"max_tokens": -1},
    {"seed": 2**63},
    {"top_k": -1},
    {"min_tokens": 2**62},
    {"logprobs": 2**31},
    {"prompt_logprobs": -1},
    {"prompt_logprobs": 2**31},
    {"temperature": math.nan},
    {"temperature": -1.0},
    {"top_p": math.inf},
    {"repetition_penalty": 0.0},
    {"presence_penalty": math.nan},
    {"logit_bias": ((-1, 1.0),)},
    {"logit_bias": ((1, math.nan),)},
    {"stop_token_ids": (2**62,)},
]


async def refused(alone: LoneWorker, request: Submit) -> None:
    with pytest.raises(BadRequest):
        await alone.gateway.bus.request(subjects.worker_submit(process("w0")), request, Ack, timeout_s=60)


async def test_a_request_that_no_sampler_can_serve_is_refused(alone: LoneWorker) -> None:
    instance_id = await alone.serve()
    for sampling in SAMPLING:
        await refused(alone, submit(instance_id, sampling=sampling))
    assert (await alone.stats()).load.queued_requests == 0


@pytest.mark.parametrize("name", ["", "a.b", "a b", ">"])
async def test_a_request_of_a_gateway_that_nobody_can_answer_is_refused_and_the_worker_serves_on(
    alone: LoneWorker, name: str
) -> None:
    instance_id = await alone.serve()
    await refused(alone, submit(instance_id, gateway_id=name))
    await refused(
        alone, submit(instance_id, decode_at=DecodePlace(worker_id=name, incarnation=INCARNATION, instance_id="i"))
    )
    await alone.gateway.submit("w0", instance_id, "next", max_tokens=3)
    await alone.gateway.end_of("next")
    assert alone.gateway.tokens("next") == expected_tokens(3)


@pytest.mark.parametrize("lease_s", [-1.0, 0.0, math.nan, math.inf, 1e300])
async def test_a_gateways_requests_are_not_freed_by_a_lease_that_is_no_time(alone: LoneWorker, lease_s: float) -> None:
    instance_id = await alone.serve()
    await alone.pause()
    await alone.gateway.submit("w0", instance_id, "r", max_tokens=3)
    heartbeat = GatewayHeartbeat(gateway_id=alone.gateway.gateway_id, lease_s=lease_s, incarnation="1")
    await alone.gateway.bus.publish(subjects.gateway_heartbeat(), heartbeat)
    await asyncio.sleep(0.3)
    alone.resume()
    await alone.gateway.end_of("r")
    assert alone.gateway.tokens("r") == expected_tokens(3)


async def test_a_gateway_that_says_goodbye_has_ended(alone: LoneWorker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    instance_id = await alone.serve()
    await alone.pause()
    await alone.gateway.submit("w0", instance_id, "r", max_tokens=3)
    goodbye = GatewayHeartbeat(gateway_id=alone.gateway.gateway_id, lease_s=GOODBYE_S, incarnation="1")
    await alone.gateway.bus.publish(subjects.gateway_heartbeat(), goodbye)
    await eventually(lambda: f"gateway {alone.gateway.gateway_id} has ended" in caplog.messages)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert not [warning for warning in warnings if "gateway" in warning]


@pytest.mark.parametrize("size", ["num_layers", "hidden_size", "vocab_size", "num_kv_heads"])
@pytest.mark.parametrize("value", [0, -1, 2**62])
def test_a_model_that_cannot_be_is_refused_before_anybody_lays_it_out(size: str, value: int) -> None:
    message = HoldCopy(model=model_record(), epoch=1, sources=())
    odd = msgspec.to_builtins(message)
    odd["model"]["spec"][size] = value
    with pytest.raises(MalformedMessage, match=size):
        decode(msgspec.msgpack.encode(odd), HoldCopy)
