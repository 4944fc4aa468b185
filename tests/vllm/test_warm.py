"""Processes of vLLM that wait for their next instance."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from services.worker.vllm import warm as warm_module
from services.worker.vllm.warm import WarmFronts
from tests.vllm.conftest import PYTHON, Serving
from tests.vllm.families import write_family

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [1 + 7 * j % 255 for j in range(20)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("warm")
    return {
        "first": write_family(folder / "first", "llama"),
        "second": write_family(folder / "second", "llama", seed=8),
        "another": write_family(folder / "another", "qwen3"),
    }


async def served(path: Path, warm: WarmFronts) -> tuple[int | None, float, list[int]]:
    """The process, how long it took with weights that are there, and its answer."""
    serving = Serving(path, warm)
    await serving.fill()
    began_s = time.monotonic()
    serving.engine.prepare()
    await serving.engine.until_ready()
    took_s = time.monotonic() - began_s
    tokens = await serving.run("one", PROMPT)
    load = serving.engine.stats().load
    assert load.prefill_tokens_total <= len(PROMPT), "counters are of this instance alone"
    pid = serving.engine.pid
    await serving.submit("unfinished", PROMPT, max_tokens=400)
    await serving.close()
    assert (await serving.ends("unfinished")).error is not None
    return pid, took_s, tokens


async def test_the_next_instance_goes_on_with_it(models: dict[str, Path], warm: WarmFronts) -> None:
    first, cold_s, tokens = await served(models["first"], warm)
    again, warm_s, same = await served(models["first"], warm)
    assert (again, same) == (first, tokens)
    assert warm_s < 0.1 * cold_s
    other, fill_s, others = await served(models["second"], warm)
    assert other == first
    assert others != tokens
    assert fill_s < 0.5 * cold_s
    back, _, once_more = await served(models["first"], warm)
    assert (back, once_more) == (first, tokens)


async def test_another_shape_takes_another_process(models: dict[str, Path], warm: WarmFronts) -> None:
    await warm.prepare()
    waiting = warm._imported
    before, _, _ = await served(models["first"], warm)
    await warm.prepare()
    other, _, _ = await served(models["another"], warm)
    assert other != before
    assert waiting is not None
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(before or 0, 0)
            await asyncio.sleep(0.1)


async def test_one_that_died_is_not_waited_for(models: dict[str, Path], warm: WarmFronts) -> None:
    before, _, tokens = await served(models["another"], warm)
    os.kill(before or 0, signal.SIGKILL)
    again, _, same = await served(models["another"], warm)
    assert again != before
    assert same == tokens


async def test_it_goes_when_memory_is_scarce(
    models: dict[str, Path], warm: WarmFronts, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _, _ = await served(models["another"], warm)
    assert warm._started is not None
    monkeypatch.setattr(warm_module, "MIN_AVAILABLE", 1.0)
    for _ in range(100):
        if warm._started is None:
            break
        await asyncio.sleep(0.1)
    assert warm._started is None
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(before or 0, 0)
            await asyncio.sleep(0.1)


async def test_none_waits_where_none_is_to(models: dict[str, Path]) -> None:
    none = WarmFronts(PYTHON, 1, "none")
    await none.prepare()
    assert none._imported is None
    serving = Serving(models["first"], none)
    await serving.start()
    pid = serving.engine.pid
    await serving.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)
    await none.close()
