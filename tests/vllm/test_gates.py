"""A vLLM that computes while its weights come."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from bench.chaos.processes import list_processes, vllm_processes
from services.worker.vllm import warm as warm_module
from services.worker.vllm.warm import WarmFronts
from shared.errors import EngineBroken
from tests.vllm.conftest import PYTHON, Serving, processes_of
from tests.vllm.families import write_family
from tests.wait_until import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [[1 + (7 + n) * j % 255 for j in range(20 + n)] for n in range(8)]


async def answers(serving: Serving) -> list[list[int]]:
    names = [f"r{n}" for n in range(len(PROMPTS))]
    await asyncio.gather(*(serving.submit(name, prompt) for name, prompt in zip(names, PROMPTS, strict=True)))
    for name in names:
        end = await serving.ends(name)
        assert end.finish_reason == "length", end
    return [serving.tokens(name) for name in names]


async def waiting(path: Path) -> WarmFronts:
    """Whose process has no weights."""
    warm = WarmFronts(PYTHON, 1, "started")
    await asyncio.sleep(warm_module.QUIET_S)
    warm.start_for(Serving(path, warm).model)
    while warm.is_starting:
        await asyncio.sleep(0.05)
    assert warm.engine is not None
    return warm


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
async def test_it_computes_as_layers_come(family: str, tmp_path: Path) -> None:
    paths = [write_family(tmp_path / f"{seed}", family, seed=seed) for seed in (7, 8)]
    warm = await waiting(paths[0])
    try:
        expected = []
        for path in paths:  # other weights, as they have always come
            serving = Serving(path, warm)
            await serving.start()
            assert serving.engine.has_own_weights
            expected.append(await answers(serving))
            await serving.close()
        assert expected[0] != expected[1]
        # Slower than they are computed with, faster, and all before the first request; and back.
        for turn, pause_s in enumerate((0.3, 0.0, 0.05, 0.3)):
            serving = Serving(paths[turn % 2], warm, early=True)
            serving.engine.prepare()
            assert await serving.engine.until_open()
            filling = asyncio.create_task(serving.fill(pause_s=pause_s))
            if turn == 1:
                await filling
            computing = asyncio.create_task(answers(serving))
            if pause_s:
                await asyncio.sleep(0.1)
                assert not filling.done()
            await filling
            await serving.engine.until_ready()
            assert await computing == expected[turn % 2], (family, turn)
            await serving.close()
            assert serving.failures == []
    finally:
        await warm.close()


async def test_its_first_token_follows_the_last_layer(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m", "llama")
    warm = await waiting(path)
    try:
        serving = Serving(path, warm, early=True)
        serving.engine.prepare()
        assert await serving.engine.until_open()
        await serving.submit("early", PROMPTS[0], max_tokens=4)
        await serving.submit("leaves", PROMPTS[1], max_tokens=4)
        filling = asyncio.create_task(serving.fill(pause_s=0.2))
        await asyncio.sleep(0.3)
        assert await asyncio.wrap_future(serving.engine.cancel("leaves", 1))
        assert not filling.done()
        await filling
        await serving.engine.until_ready()
        await serving.ends("early")
        assert "leaves" not in serving.parts
        await serving.run("later", PROMPTS[2])
        await serving.close()
    finally:
        await warm.close()


async def test_weights_that_do_not_come_end_it(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m", "llama")
    warm = await waiting(path)
    try:
        serving = Serving(path, warm, early=True)
        serving.engine.prepare()
        assert await serving.engine.until_open()
        await serving.submit("early", PROMPTS[0])
        await asyncio.sleep(1.0)
        pids = processes_of(serving.engine)
        assert pids
        serving.engine.stop(EngineBroken("its load has failed"))
        assert await asyncio.to_thread(serving.engine.join, 10.0)
        end = await serving.ends("early")
        assert end.error is not None
        assert end.error.code == "engine_broken"
        assert processes_of(serving.engine) == []
        assert warm.engine is None
    finally:
        await warm.close()


@pytest.mark.parametrize("early", [True, False], ids=["at a gate", "in a refill"])
@pytest.mark.parametrize("kind", ["vllm_front", "vllm_core", "vllm_worker"])
async def test_killed_while_weights_come_nothing_waits_for_them(kind: str, early: bool, tmp_path: Path) -> None:
    path = write_family(tmp_path / "m", "llama")
    warm = await waiting(path)
    try:
        serving = Serving(path, warm, early=early)
        serving.engine.prepare()
        if early:
            assert await serving.engine.until_open()
            await serving.submit("waits", PROMPTS[0])
        filling = asyncio.create_task(serving.fill(pause_s=0.5))
        await asyncio.sleep(1.0)
        started = processes_of(serving.engine)
        os.kill(vllm_processes(os.getpid(), list_processes(os.getpid()))[kind], signal.SIGKILL)
        killed_s = time.monotonic()
        with pytest.raises(EngineBroken):
            await serving.engine.until_ready()
        if early:  # otherwise the load fails, and nobody has sent it requests
            assert [type(error) for error in serving.failures] == [EngineBroken]
            end = await serving.ends("waits")
            assert end.error is not None
            assert end.error.code == EngineBroken.code
        assert time.monotonic() - killed_s < 5.0
        assert not filling.done()
        await filling  # for others to come: the worker's memory is its own
        await serving.close()
        assert started
        await eventually(lambda: not any(psutil.pid_exists(pid) for pid in started))
        assert warm.engine is None
    finally:
        await warm.close()
