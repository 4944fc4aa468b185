"""Processes of vLLM that wait for their next instance."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from services.pool.inspection import record_of
from services.worker.vllm import engine as engine_module
from services.worker.vllm import warm as warm_module
from services.worker.vllm.served_model import BLOCK_TOKENS, served_model
from services.worker.vllm.warm import MAX_FAILURES, WarmFronts
from shared.checkpoint import inspect_checkpoint
from shared.engine_args import EngineArgs
from shared.errors import EngineBroken
from tests.checkpoints import VOCAB_SIZE
from tests.services.workers import worker_config
from tests.vllm.conftest import ARGUMENTS, PYTHON, Serving, processes_of
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
        "experts": write_family(folder / "experts", "moe"),
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


async def gone(pid: int | None) -> None:
    for _ in range(100):
        if not psutil.pid_exists(pid or 0):
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"{pid} is still there")


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
    assert warm.num_waiting == 2
    before, _, _ = await served(models["first"], warm)
    await warm.prepare()
    other, _, _ = await served(models["another"], warm)
    assert other != before
    await gone(before)


async def test_one_that_died_is_not_waited_for(models: dict[str, Path], warm: WarmFronts) -> None:
    before, _, tokens = await served(models["another"], warm)
    os.kill(before or 0, signal.SIGKILL)
    await gone(before)
    again, _, same = await served(models["another"], warm)
    assert again != before
    assert same == tokens


@pytest.mark.parametrize("family", ["first", "another", "experts"])
async def test_one_that_has_no_weights_waits_for_them(models: dict[str, Path], family: str) -> None:
    """Where they could not come into it, none is kept."""
    first, cold = WarmFronts(PYTHON, 1, "started"), WarmFronts(PYTHON, 1, "none")
    try:
        serving = Serving(models[family], first)
        await asyncio.sleep(warm_module.QUIET_S)
        for _ in range(2):
            first.start_for(serving.model)
            while first.is_starting:
                await asyncio.sleep(0.05)
        assert (first.engine is None) == (family == "experts")
        waits, _, tokens = await served(models[family], first)
        again, _, same = await served(models[family], cold)
        assert tokens == same
        assert waits != again
        if family != "experts":
            assert serving.engine.pid is None
    finally:
        await first.close()
        await cold.close()


async def test_it_goes_when_memory_is_scarce(
    models: dict[str, Path], warm: WarmFronts, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _, _ = await served(models["another"], warm)
    assert warm.engine is not None
    monkeypatch.setattr(warm_module, "MIN_AVAILABLE", 1.0)
    for _ in range(100):
        if warm.engine is None:
            break
        await asyncio.sleep(0.1)
    assert warm.engine is None
    await gone(before)


async def test_one_that_hangs_is_noticed(
    models: dict[str, Path], warm: WarmFronts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "HUNG_S", 2.0)
    serving = Serving(models["another"], warm)
    await serving.start()
    await serving.run("before", PROMPT)
    for pid in processes_of(serving.engine):
        if pid != serving.engine.pid:
            os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(3.0)
    assert not serving.failures, "nobody waits for anything"
    await serving.submit("waits", PROMPT, max_tokens=400)
    end = await serving.ends("waits")
    assert end.error is not None
    assert "computed nothing" in end.error.message
    assert [type(error) for error in serving.failures] == [EngineBroken]
    await serving.close()
    assert processes_of(serving.engine) == []


async def test_what_does_not_start_is_not_tried_without_end(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = WarmFronts("/bin/false", 1, "none")
    for number in range(MAX_FAILURES + 2):
        serving = Serving(models["first"], broken)
        serving.engine.prepare()
        with pytest.raises(EngineBroken, match="is not tried here" if number >= MAX_FAILURES else "ended with 1"):
            await serving.engine.until_ready()
        assert (serving.engine.pid is None) is (number >= MAX_FAILURES)
        await serving.close()
    monkeypatch.setattr(warm_module, "GIVEN_UP_S", 0.0)
    serving = Serving(models["first"], broken)
    serving.engine.prepare()
    with pytest.raises(EngineBroken, match="ended with 1"):
        await serving.engine.until_ready()
    await serving.close()


async def test_why_one_does_not_start_is_said_wherever_it_was_found(models: dict[str, Path]) -> None:
    cold = WarmFronts(PYTHON, 1, "none")
    too_much = {**ARGUMENTS, "kv_cache_memory_bytes": 1 << 50}
    changes: dict[str, dict[str, object]] = {
        "Available memory on node": {"arguments": too_much},  # by a process behind the one that we hear
        rf"reads a vocabulary of {VOCAB_SIZE} tokens from config.json": {"vocab_size": 2_000_000},
    }
    try:
        for why, changed in changes.items():
            serving = Serving(models["first"], cold, **changed)
            serving.engine.prepare()
            with pytest.raises(EngineBroken, match=why):
                await serving.start()
            await serving.close()
    finally:
        await cold.close()


async def test_what_vllm_cannot_serve_is_tried_once(models: dict[str, Path]) -> None:
    cold = WarmFronts(PYTHON, 1, "none")
    try:
        for said in ("max_model_len", "does not start, and is not tried here for an hour: ValidationError"):
            serving = Serving(models["first"], cold, arguments={**ARGUMENTS, "max_model_len": 1 << 20})
            serving.engine.prepare()
            with pytest.raises(EngineBroken, match=said) as failed:
                await serving.start()
            assert len(failed.value.message) < 1000
            await serving.close()
    finally:
        await cold.close()


async def test_the_longest_prompt_fits_where_kv_is_scarce(models: dict[str, Path]) -> None:
    """No more was promised than there is."""
    cold = WarmFronts(PYTHON, 1, "none")
    record = record_of(inspect_checkpoint(models["first"], generic=True), "vllm")
    arguments = EngineArgs(
        dtype="float32", kv_cache_gib=5 * BLOCK_TOKENS * record.basics.kv_bytes_per_token / (1 << 30)
    )
    model = served_model(msgspec.structs.replace(record, engine_args=arguments), worker_config("w"))
    serving = Serving(models["first"], cold, arguments=model.arguments, limits=model.limits)
    try:
        await serving.start()
        limit = model.limits.limit_tokens
        assert limit == 4 * BLOCK_TOKENS
        assert len(await serving.run("long", [7] * (limit - 3), max_tokens=100)) == 3
        await serving.close()
    finally:
        await cold.close()


ORPHAN = """
import asyncio, sys
from services.worker.vllm.front_process import FrontProcess
async def main():
    front = FrontProcess(sys.argv[1])
    await front.start(threads=1)
    print(front.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_none_outlives_its_worker_also_while_it_imports() -> None:
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", ORPHAN, PYTHON, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    pid = int(await worker.stdout.readline())
    await asyncio.sleep(1.0)
    assert psutil.pid_exists(pid)
    worker.kill()
    await worker.wait()
    killed_s = time.monotonic()
    await gone(pid)
    assert time.monotonic() - killed_s < 5.0


async def test_none_waits_where_none_is_to(models: dict[str, Path]) -> None:
    none = WarmFronts(PYTHON, 1, "none")
    await none.prepare()
    assert none.num_waiting == 0
    serving = Serving(models["first"], none)
    await serving.start()
    pid = serving.engine.pid
    await serving.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)
    await none.close()
