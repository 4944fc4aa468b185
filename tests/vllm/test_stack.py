"""A model that vLLM serves, beside one of ours, in a real stack with the unmodified client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Literal

import httpx
import psutil
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI, InternalServerError
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM

from bench.chaos.processes import list_processes, vllm_processes
from compose.config import StackConfig
from compose.stack import Stack
from shared import subjects
from shared.bus.nats import NatsBus
from shared.messages.admin import Status
from shared.messages.generation import GatewayHeartbeat, TokenBatch
from shared.subjects import Process
from tests.checkpoints import tiny_checkpoint
from tests.stack.client import until
from tests.stack.conftest import FAST, MODEL, NO_DEMAND, READY_S
from tests.vllm.conftest import CONTEXT_TOKENS, PATIENCE_S, PYTHON
from tests.vllm.families import write_family
from tests.wait_until import WAIT_S, eventually

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

NAME = "others"
ARGUMENTS = {"dtype": "float32", "max_model_len": CONTEXT_TOKENS, "kv_cache_gib": 1, "max_num_seqs": 8}
PROMPT = [1 + 7 * j % 255 for j in range(40)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    config = StackConfig(
        models=(tiny_checkpoint("llama"),),
        state_dir=tmp_path_factory.mktemp("vllm"),
        workers=4,
        port=0,
        env=FAST
        | NO_DEMAND
        | {"BLITZ_WORKER_ENGINES": "vllm", "BLITZ_VLLM_PYTHON": PYTHON, "BLITZ_GATEWAY_QUEUE_TIMEOUT_S": "600"},
    )
    async with Stack(config) as running:
        await running.wait_ready(READY_S)
        await running.admin.add_model(
            str(checkpoint),
            name=NAME,
            engine="vllm",
            engine_args=ARGUMENTS,
        )
        await serving(running, 1)
        yield running


async def serving(stack: Stack, num: int) -> None:
    """Until so many instances of it serve."""
    await until(
        stack, lambda status: sum(i.model == NAME and i.state == "serving" for i in status.instances) == num, PATIENCE_S
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0].tolist()[len(PROMPT) :]  # type: ignore[no-any-return]


def client_of(stack: Stack) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=300.0)


async def text_of(client: AsyncOpenAI, max_tokens: int = 60) -> str:
    answer = await client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=max_tokens, temperature=0.0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text


async def test_its_answers_are_the_models(stack: Stack, expected: list[int]) -> None:
    async with client_of(stack) as client:
        ours = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)
        assert ours.choices[0].finish_reason in ("length", "stop")
        text = await text_of(client)
        tokens = {"model": NAME, "tokens": expected}
        async with httpx.AsyncClient(base_url=stack.url) as plain:
            detokenized = (await plain.post("/detokenize", json=tokens)).raise_for_status().json()
        assert text == detokenized["prompt"]
        chat = await client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "hi"}], max_tokens=8, logprobs=True, top_logprobs=2
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens <= 8


async def test_prompts_have_their_log_probabilities(stack: Stack, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rows = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].detach(), dim=-1)
    expected = rows[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
    async with client_of(stack) as client:
        for max_tokens in (0, 3):
            answer = await client.completions.create(
                model=NAME,
                prompt=PROMPT,
                max_tokens=max_tokens,
                echo=True,
                logprobs=2,
                extra_body={"prompt_logprobs": 1, "priority": -1, "ignore_eos": True},
            )
            [choice] = answer.choices
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            first, *own = choice.logprobs.token_logprobs
            assert (first, len(own)) == (None, len(PROMPT) - 1 + max_tokens)
            assert own[: len(expected)] == pytest.approx(expected, abs=1e-3)
            shown = choice.model_extra["prompt_logprobs"] if choice.model_extra else []
            listed = [entry[str(token)]["logprob"] for entry, token in zip(shown[1:], PROMPT[1:], strict=True)]
            assert listed == pytest.approx(expected, abs=1e-3)


class Person(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=130)]
    kind: Literal["a", "b"]


async def test_answers_follow_their_schema_and_calls_are_forced(stack: Stack) -> None:
    async with client_of(stack) as client:
        messages = [{"role": "user", "content": "who?"}]
        for seed in range(6):
            answer = await client.chat.completions.parse(
                model=NAME, messages=messages, response_format=Person, max_tokens=200, temperature=1.0, seed=seed
            )
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].message.parsed is not None
        chosen = await client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=40, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert chosen.choices[0].text in ("yes", "no")


async def test_a_stream_goes_on_where_its_vllm_was_killed(stack: Stack) -> None:
    await stack.admin.scale(NAME, 2, hold_s=3600.0)
    await serving(stack, 2)
    async with client_of(stack) as client:
        whole = await text_of(client, 400)
        for _ in range(2):
            stream = await client.completions.create(
                model=NAME, prompt=PROMPT, max_tokens=400, temperature=0.0, stream=True, extra_body={"ignore_eos": True}
            )
            text, killed = "", False
            async for event in stream:
                text += event.choices[0].text
                if len(text) > 20 and not killed:
                    killed = True
                    busiest().send_signal(signal.SIGKILL)
            assert killed
            assert text == whole
            await serving(stack, 2)


async def test_a_request_that_kills_vllm_ends_and_those_beside_it_go_on(stack: Stack) -> None:
    await stack.admin.scale(NAME, 2, hold_s=3600.0)
    await serving(stack, 2)
    async with client_of(stack) as client, striking(stack) as strike:
        whole = await text_of(client, 400)
        others = [asyncio.create_task(text_of(client, 400)) for _ in range(4)]
        await eventually(lambda: len(strike.seen) == 5)
        strike.armed = True
        with pytest.raises(InternalServerError, match="3 workers that died, the last time alone") as failed:
            await text_of(client, 400)
        assert failed.value.code == "poison_request"
        assert len(strike.struck) == 3
        assert await asyncio.gather(*others) == [whole] * 4
        await serving(stack, 2)
        assert await text_of(client, 400) == whole


class Strike:
    """The next request that nobody has heard of kills the vLLM that computes it, wherever that is."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.seen: set[str] = set()
        self.armed = False
        self.struck: list[str] = []
        self._poison = ""
        self._attempt = 0

    def on_tokens(self, batch: TokenBatch) -> None:
        for part in batch.parts:
            if self.armed and not self._poison and part.request_id not in self.seen:
                self._poison = part.request_id
            self.seen.add(part.request_id)
            computes = part.token_ids or part.computing
            if part.request_id == self._poison and part.attempt > self._attempt and computes:
                self._attempt = part.attempt
                self.struck.append(batch.worker_id)
                worker = self._stack.processes[batch.worker_id].pid
                assert worker is not None
                os.kill(vllm_processes(worker, list_processes(worker))["vllm_worker"], signal.SIGKILL)


@contextlib.asynccontextmanager
async def striking(stack: Stack) -> AsyncIterator[Strike]:
    """It hears what the gateway hears."""
    strike, heard = Strike(stack), asyncio.Event()
    bus = await NatsBus.connect(
        stack.addresses.nats_url, name="gateway", id="strike", access=stack.nats_access("gateway")
    )
    subscribing: list[asyncio.Task[None]] = []

    async def hear(gateway: Process) -> None:
        await bus.subscribe(subjects.tokens(gateway), TokenBatch, strike.on_tokens)
        heard.set()

    def on_gateway(heartbeat: GatewayHeartbeat) -> None:
        if not subscribing:
            subscribing.append(asyncio.create_task(hear(Process(heartbeat.gateway_id, heartbeat.incarnation))))

    try:
        await bus.subscribe(subjects.gateway_heartbeat(), GatewayHeartbeat, on_gateway)
        await asyncio.wait_for(heard.wait(), WAIT_S)
        yield strike
    finally:
        await bus.close()


async def test_instances_give_their_copies_up_and_others_come_from_the_one_that_stays(stack: Stack) -> None:
    async with client_of(stack) as client:
        whole = await text_of(client)
        await stack.admin.scale(NAME, 3, hold_s=3600.0)
        await serving(stack, 3)
        await until(stack, _copies_are_gone, PATIENCE_S)
        [pool] = [model for model in (await stack.admin.pool()).models if model.name == NAME]
        assert (pool.instances, pool.host_copy, pool.invariant) == ((), "ready", "ok")
        assert _shared_bytes() < pool.weights_bytes
        assert await asyncio.gather(*(text_of(client) for _ in range(6))) == [whole] * 6
        await stack.admin.scale(NAME, 1, hold_s=3600.0)
        await serving(stack, 1)
        await stack.admin.scale(NAME, 2, hold_s=3600.0)
        await serving(stack, 2)
        assert await asyncio.gather(*(text_of(client) for _ in range(6))) == [whole] * 6


def _copies_are_gone(status: Status) -> bool:
    return all(instance.copy == "gone" for instance in status.instances if instance.model == NAME)


def _shared_bytes() -> int:
    """Of weights, in the memory that workers share with their vLLM; of those of ``MODEL`` there are few."""
    num_bytes = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            maps = process.memory_maps(grouped=False)
            num_bytes += sum(part.pss for part in maps if part.path.startswith("/memfd:blitz-weights"))
    return num_bytes


async def test_a_model_that_is_kept_warm_computes_while_its_weights_come(stack: Stack, tmp_path: Path) -> None:
    path, name = write_family(tmp_path / "sleeps", "llama"), "sleeps"
    await stack.admin.add_model(str(path), name=name, engine="vllm", engine_args=ARGUMENTS, warm=True, min_instances=0)
    await until(stack, lambda status: any(name in (w.warm_for or ()) for w in status.workers), PATIENCE_S)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    async with client_of(stack) as client, httpx.AsyncClient(base_url=stack.url) as plain:
        for prompt in (PROMPT, PROMPT[::-1]):
            out = expected.generate(
                torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            put_out = out[0].tolist()[len(prompt) :]
            tokens = {
                "model": name,
                "tokens": [token for token in put_out if token < 256],
            }  # bytes, and nothing special
            text = (await plain.post("/detokenize", json=tokens)).raise_for_status().json()["prompt"]
            answer = await client.completions.create(
                model=name,
                prompt=prompt,
                max_tokens=16,
                temperature=0.0,
                extra_body={"ignore_eos": True},
            )
            assert answer.choices[0].text == text
    status = await stack.admin.status()
    (instance,) = (i for i in status.instances if i.model == name)
    assert instance.weights_digest


def busiest() -> psutil.Process:
    """The engine process of vLLM that has computed most in the last moment."""
    engines = [
        process
        for front in psutil.Process(os.getpid()).children(recursive=True)
        if "blitz_vllm" in front.cmdline()
        for process in front.children(recursive=True)
    ]
    before = {process.pid: sum(process.cpu_times()[:2]) for process in engines}
    psutil.cpu_percent(interval=0.2)
    return max(engines, key=lambda process: sum(process.cpu_times()[:2]) - before[process.pid])
