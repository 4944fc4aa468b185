"""Log-probabilities of prompts in a real stack with the torch engine: those of ``transformers``, wherever the prompt is
computed, and whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI, BadRequestError

from compose.config import StackConfig
from compose.stack import Stack
from shared.load_feed import subscribe_load
from shared.messages.load import LoadReport
from tests.checkpoints import tiny_checkpoint
from tests.plain_http import http_client
from tests.services.worker.engine.harness import prompt_of, reference_logits
from tests.stack.client import bus, openai_client, scale, until
from tests.stack.conftest import FAST, MODEL, NO_DEMAND, READY_S
from tests.wait_until import eventually

pytestmark = [pytest.mark.stack, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

SPLIT = "split"
PROMPTS = [prompt_of(length, length) for length in (1, 2, 40, 333)]
"""The longer ones take several chunks."""
LONG = [prompt_of(900, seed) for seed in range(12)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One checkpoint under two names: two colocated instances; a prefill and a decode instance."""
    config = StackConfig(
        models=(tiny_checkpoint("llama"),),
        state_dir=tmp_path_factory.mktemp("scores"),
        workers=5,
        port=0,
        env=FAST | NO_DEMAND | {"BLITZ_WORKER_PREFILL_CHUNK": "32"},
    )
    async with Stack(config) as running:
        await running.wait_ready(READY_S)
        await scale(running, MODEL, 2)
        await running.admin.add_model(str(tiny_checkpoint("llama")), name=SPLIT, min_instances=0)
        for role in ("prefill", "decode"):
            await running.admin.scale(SPLIT, 1, hold_s=3600.0, role=role)
        await until(running, lambda s: sum(i.model == SPLIT and i.state == "serving" for i in s.instances) == 2)
        yield running


async def _echoed(client: AsyncOpenAI, model: str, prompt: list[int], max_tokens: int = 4) -> Any:
    answer = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        echo=True,
        logprobs=3,
        extra_body={"ignore_eos": True, "prompt_logprobs": 2},
    )
    return answer.choices[0]


def _check(choice: Any, prompt: list[int]) -> None:
    """Of the prompt alone."""
    table = torch.log_softmax(reference_logits("llama", prompt), dim=-1)
    shown = choice.logprobs
    assert shown.token_logprobs[0] is None
    assert choice.prompt_logprobs[0] is None
    assert len(choice.prompt_logprobs) == len(prompt)
    for position in range(1, len(prompt)):
        expected = table[position - 1]
        own = float(expected[prompt[position]])
        assert math.isclose(shown.token_logprobs[position], own, abs_tol=1e-4), position
        entry = choice.prompt_logprobs[position]
        best = expected.topk(2)
        assert set(entry) == {str(prompt[position]), *map(str, best.indices.tolist())}
        for rank, (token_id, value) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True), 1):
            assert entry[str(token_id)]["rank"] == rank
            assert math.isclose(entry[str(token_id)]["logprob"], value, abs_tol=1e-4)
        assert math.isclose(entry[str(prompt[position])]["logprob"], own, abs_tol=1e-4)
        # As exact as the numbers: of tokens that are as likely to within that, any may be before it.
        above, not_below = int((expected > own + 1e-4).sum()), int((expected >= own - 1e-4).sum())
        assert above < entry[str(prompt[position])]["rank"] <= not_below


@pytest.mark.parametrize("model", [MODEL, SPLIT])
async def test_they_are_those_of_transformers(stack: Stack, model: str) -> None:
    async with openai_client(stack) as client:
        for prompt in PROMPTS * 2:  # what the prefix cache has of it changes nothing
            choice = await _echoed(client, model, prompt)
            assert len(choice.logprobs.tokens) == len(prompt) + 4
            _check(choice, prompt)
        choices = await asyncio.gather(*(_echoed(client, model, prompt) for prompt in PROMPTS * 3))
        for choice, prompt in zip(choices, PROMPTS * 3, strict=True):
            _check(choice, prompt)


@pytest.mark.parametrize("model", [MODEL, SPLIT])
async def test_an_answer_may_be_the_prompt_alone(stack: Stack, model: str) -> None:
    async with openai_client(stack) as client:
        choice = await _echoed(client, model, PROMPTS[-1], 0)
        assert len(choice.logprobs.tokens) == len(PROMPTS[-1])
        _check(choice, PROMPTS[-1])


async def test_a_worker_that_is_killed_in_the_midst_of_a_prompt_loses_and_repeats_nothing(stack: Stack) -> None:
    await until(stack, lambda s: s.serving(MODEL) == 2)
    reports: dict[str, LoadReport] = {}
    async with openai_client(stack) as client, bus(stack) as listening:
        await subscribe_load(listening, lambda report: reports.update({report.worker_id: report}))
        lost_before = await _lost(stack)
        answering = [asyncio.create_task(_echoed(client, MODEL, prompt)) for prompt in LONG]

        def computing() -> list[str]:
            return [w for w, r in reports.items() if r.model == MODEL and r.prefilling_requests and r.running_requests]

        await eventually(computing)
        stack.kill(computing()[0])
        choices = await asyncio.gather(*answering)
        assert await _lost(stack) > lost_before, "it had some of them"
    for choice, prompt in zip(choices, LONG, strict=True):
        _check(choice, prompt)
        assert len(choice.logprobs.tokens) == len(prompt) + 4


async def _lost(stack: Stack) -> float:
    """Attempts that were made again."""
    async with http_client() as http:
        text = (await http.get(f"{stack.url}/metrics")).text
    name = f'blitz_gateway_failovers_total{{model_name="{MODEL}"}} '
    return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


async def test_more_than_the_bound_is_refused_by_name(stack: Stack) -> None:
    async with openai_client(stack) as client:
        with pytest.raises(BadRequestError, match="logprobs") as refused:
            await client.completions.create(
                model=MODEL, prompt=[prompt_of(900, n) for n in range(30)], echo=True, logprobs=20, max_tokens=1
            )
        assert refused.value.param == "logprobs"
