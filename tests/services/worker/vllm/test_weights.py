"""The worker's memory, as vLLM's loader reads it, and what it says of it at last."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from services.worker.device.memory import SharedMemory
from services.worker.memory.arena import Arena
from services.worker.memory.loader import load_unit
from services.worker.memory.weight_copy import WeightCopy
from services.worker.vllm.blitz_vllm.weights_source import WeightsSource
from services.worker.vllm.weights_server import WeightsServer
from shared.checkpoint import inspect_checkpoint
from tests.checkpoints import tiny_checkpoint


def _take(path: str, keep: bool) -> list[torch.Tensor]:
    """Copies of all tensors, and a view that is kept, as a loader of vLLM's might."""
    source = WeightsSource(path)
    taken, views = [], []
    for tensors in source.units():
        taken += [tensor.clone() for _, tensor in tensors]
        views += [tensor for _, tensor in tensors] if keep else []
    del tensors
    source.end()
    return [*taken, *views]


@pytest.mark.parametrize("keeps", [False, True])
async def test_memory_of_which_views_are_kept_is_not_free(tmp_path: Path, keeps: bool) -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"), generic=True)
    layout = checkpoint.layout
    memory = SharedMemory(layout.num_bytes)
    copy = WeightCopy(layout, Arena(memory), checkpoint.unit_digests)
    server = WeightsServer(copy, memory.descriptor, memory.first_byte)
    server.listen(str(tmp_path / "socket"))
    taking = asyncio.create_task(asyncio.to_thread(_take, str(tmp_path / "socket"), keeps))
    for number, unit in enumerate(layout.units):
        await asyncio.to_thread(load_unit, checkpoint, layout, unit, copy.arena)
        assert copy.seal(number)
        copy.mark_ready(number)
        assert not server.is_free
    assert await taking
    await server.taken.wait()
    assert server.is_free is not keeps
    await server.close()


async def test_units_that_are_ready_come_together_and_none_waits_for_others(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(tiny_checkpoint("llama"), generic=True)
    layout = checkpoint.layout
    memory = SharedMemory(layout.num_bytes)
    copy = WeightCopy(layout, Arena(memory), checkpoint.unit_digests)
    server = WeightsServer(copy, memory.descriptor, memory.first_byte)
    server.listen(str(tmp_path / "socket"))

    async def come(first: int, end: int) -> None:
        for number in range(first, end):
            await asyncio.to_thread(load_unit, checkpoint, layout, layout.units[number], copy.arena)
            assert copy.seal(number)
            copy.mark_ready(number)
        await asyncio.sleep(0.1)

    num_units = len(layout.units) - 1
    assert num_units >= 4
    source = await asyncio.to_thread(WeightsSource, str(tmp_path / "socket"))
    assert source.num_units == num_units
    units = source.units(num_units - 1)
    await come(0, 2)
    first = await asyncio.to_thread(next, units)
    await come(2, 4)
    names = [name for name, _ in first]
    second = await asyncio.to_thread(next, units)
    names += [name for name, _ in second]
    await come(4, num_units + 1)
    rest = await asyncio.to_thread(list, units)
    names += [name for tensors in rest for name, _ in tensors]
    assert len(rest) == (1 if num_units > 3 else 0)
    assert [slot.name for unit in layout.units[1:2] for slot in unit.slots] == [name for name, _ in first]
    assert [slot.name for unit in layout.units[2:4] for slot in unit.slots] == [name for name, _ in second]
    assert names == [slot.name for unit in layout.units[1:] for slot in unit.slots]
    del first, second, rest
    source.end()
    await server.close()
