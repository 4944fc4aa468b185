"""One vLLM for all tests of a module: it takes half a minute to start."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.device.memory import SharedMemory
from services.worker.engine.loop import StepOutput
from services.worker.memory.arena import Arena
from services.worker.memory.loader import load_unit
from services.worker.memory.weight_copy import WeightCopy
from services.worker.vllm.blitz_vllm import words
from services.worker.vllm.engine import VllmEngine
from services.worker.vllm.served_model import ServedModel, Shape
from services.worker.vllm.warm import WarmFronts
from services.worker.vllm.weights_server import WeightsServer
from shared.checkpoint import inspect_checkpoint
from shared.errors import BlitzError
from shared.messages.generation import PromptLogprobs, SamplingParams, StreamPart
from tests.checkpoints import build_model, write_tokenizer
from tests.wait_until import eventually

PYTHON = os.environ.get("BLITZ_VLLM_PYTHON", "")
CONTEXT_TOKENS = 512
ARGUMENTS: dict[str, int | float | str | bool] = {
    "dtype": "float32",
    "max_model_len": CONTEXT_TOKENS,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
}
PATIENCE_S = 400.0
"""A first start reads a gigabyte of cold files."""


@pytest.fixture(scope="session", autouse=True)
def python() -> str:
    if not PYTHON:
        pytest.fail("BLITZ_VLLM_PYTHON names no interpreter that has vLLM")
    return PYTHON


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where vLLM's processes put what they compile."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("compiled")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model = build_model("llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=8)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


class Serving:
    """An engine, the weights that it gets, and what it put out."""

    def __init__(self, path: Path, warm: WarmFronts, *, early: bool = False, **changed: Any) -> None:
        """``changed``: of what is served."""
        self.checkpoint = inspect_checkpoint(path, generic=True)
        layout = self.checkpoint.layout
        self.memory = SharedMemory(layout.num_bytes)
        self.arena = Arena(self.memory)
        # What has not come must not be read: no layer of NaN computes a token.
        self.memory.bytes[:] = 0xFF
        self.copy = WeightCopy(layout, self.arena, self.checkpoint.unit_digests)
        self.parts: dict[str, list[StreamPart]] = {}
        self.scores: dict[str, list[PromptLogprobs]] = {}
        self.failures: list[BlitzError] = []
        model = ServedModel(
            path=str(path),
            arguments=ARGUMENTS,
            tokenizer=words.Tokenizer(
                file=str(path / "tokenizer.json"),
                sha256=hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest(),
                end_ids=self.checkpoint.layout.of.eos_token_ids,
            ),
            limits=SchedulerConfig(num_blocks=128, block_size=16, context_tokens=CONTEXT_TOKENS, max_num_sequences=8),
            shape=Shape(layout.hash, ()),
            model_hash=self.checkpoint.model_hash,
            num_bytes=layout.num_bytes,
            kv_bytes=1 << 30,
            vocab_size=layout.of.vocab_size,
            check=lambda: None,
        )
        self.model = dataclasses.replace(model, **changed)
        self.weights = weights = WeightsServer(self.copy, self.memory.descriptor, self.memory.first_byte)
        self.engine = VllmEngine(self.model, weights, self._put, self.failures.append, warm, early=early)

    def _put(self, output: StepOutput) -> None:
        for part in output.prompts:
            assert part.prompt is not None
            assert part.request_id not in self.parts, "a prompt's come before the first token"
            self.scores.setdefault(part.request_id, []).append(part.prompt)
        for part in output.outputs:
            self.parts.setdefault(part.request_id, []).append(part)

    async def fill(self, *, pause_s: float = 0.0) -> None:
        """Its weights come, unit by unit."""
        layout = self.copy.layout
        for number, unit in enumerate(layout.units):
            await asyncio.to_thread(load_unit, self.checkpoint, layout, unit, self.arena)
            assert self.copy.seal(number)
            self.copy.mark_ready(number)
            await asyncio.sleep(pause_s)

    async def start(self, *, pause_s: float = 0.0) -> None:
        """Until it serves."""
        self.engine.prepare()
        async with asyncio.timeout(PATIENCE_S):
            await self.fill(pause_s=pause_s)
            await self.engine.until_ready()
            await self.may_lose_its_copy()

    async def may_lose_its_copy(self) -> None:
        """Where vLLM says that it has weights of its own, what it got them from is nothing any more."""
        await eventually(lambda: self.engine.has_own_weights or self.weights.taken.is_set())
        if self.engine.has_own_weights:
            self.memory.bytes[:] = 0xFF

    async def submit(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        output: Sequence[int] = (),
        stops: tuple[int, ...] = (),
        alone_tokens: int = 0,
        scope: str = "",
        **how: object,
    ) -> None:
        params = SamplingParams(**{"max_tokens": 16, "seed": 1, "temperature": 0.0, **how})  # type: ignore[arg-type]
        sequence = ActiveSequence(
            request_id=name,
            attempt=1,
            gateway_id="g",
            prompt=tuple(prompt),
            output=list(output),
            params=params,
            eos_token_ids=stops,
            alone_tokens=alone_tokens,
            cache_scope=scope,
        )
        await asyncio.wrap_future(self.engine.submit(sequence))

    async def ends(self, name: str) -> StreamPart:
        """Its last part."""
        deadline_s = time.monotonic() + 120
        while not self.parts.get(name) or self.parts[name][-1].finish_reason is None:
            assert time.monotonic() < deadline_s, f"{name} does not end"
            await asyncio.sleep(0.01)
        return self.parts[name][-1]

    def tokens(self, name: str) -> list[int]:
        parts, tokens = self.parts[name], []
        for part in parts:
            assert part.offset == parts[0].offset + len(tokens)
            tokens += part.token_ids
        return tokens

    async def run(self, name: str, prompt: Sequence[int], **how: object) -> list[int]:
        """Its tokens."""
        await self.submit(name, prompt, **how)  # type: ignore[arg-type]
        end = await self.ends(name)
        assert end.finish_reason in ("stop", "length"), end
        return self.tokens(name)

    async def close(self) -> None:
        self.engine.stop()
        assert await asyncio.to_thread(self.engine.join, 30.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def warm() -> AsyncIterator[WarmFronts]:
    """The processes of one worker."""
    warm = WarmFronts(PYTHON, 1, "started")
    yield warm
    await warm.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(checkpoint: Path, warm: WarmFronts) -> AsyncIterator[Serving]:
    """Its weights came while vLLM was starting, one unit after the other."""
    serving = Serving(checkpoint, warm)
    await serving.start(pause_s=0.2)
    yield serving
    await serving.close()


def processes_of(engine: VllmEngine) -> list[int]:
    """All that vLLM's process has started, itself included."""
    group = engine.pid
    listed = subprocess.run(["ps", "-eo", "pid,pgid,stat"], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in listed.splitlines()[1:]]
    return [int(pid) for pid, of, state in rows if int(of) == group and not state.startswith("Z")]
