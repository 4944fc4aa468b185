"""Ranges of pinned memory: whose they are, and for how long."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.device.completion import Completion, waited
from services.worker.device.cuda.device import CudaDevice
from services.worker.device.cuda.staging import ALIGN_BYTES, Share, StagingMemory
from tests.services.worker.device.cuda.drivers import PlayedDriver

PIECE = ALIGN_BYTES


def share(num_pieces: int) -> Share:
    return Share(PlayedDriver().pinned(num_pieces * PIECE))


def lease(of: Share, num_bytes: int) -> Any:
    leased = of.lease(num_bytes)
    assert leased is not None
    return leased


def test_ranges_are_apart_and_whole() -> None:
    one = share(8)
    leased = [lease(one, PIECE // 2), lease(one, PIECE), lease(one, 2 * PIECE + 1)]
    assert [len(memory) for memory in leased] == [PIECE // 2, PIECE, 2 * PIECE + 1]
    assert one.free_bytes == 3 * PIECE
    for number, memory in enumerate(leased):
        memory[:] = number
    assert [set(memory.tolist()) for memory in leased] == [{0}, {1}, {2}]


def test_what_finds_no_room_has_memory_of_its_own() -> None:
    driver = PlayedDriver()
    staging = StagingMemory(driver, 2 * PIECE)
    before = driver.num_pinned
    held = [staging.lease(PIECE, "into") for _ in range(2)]
    assert driver.num_pinned == before
    held.append(staging.lease(1, "into"))
    assert driver.num_pinned == before + 1
    held.append(staging.lease(2 * PIECE, "out"))  # which has a share of its own
    assert driver.num_pinned == before + 1
    assert len({memory.ctypes.data for memory in held}) == 4  # type: ignore[union-attr]


PARTS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda memory: memory[5:9],
    "frombuffer": lambda memory: np.frombuffer(memory, dtype=np.uint8),
    "split": lambda memory: np.split(np.frombuffer(memory, dtype=np.uint8), 2)[1][3:],
    "tensor": lambda memory: torch.from_numpy(memory)[7:].view(-1),
    "memoryview": lambda memory: memoryview(memory)[1:],
}


@pytest.mark.parametrize("part", PARTS)
def test_a_range_is_leased_while_anybody_has_a_part_of_it(part: str) -> None:
    one = share(1)
    memory = lease(one, PIECE)
    kept = PARTS[part](memory)
    del memory
    gc.collect()
    assert one.lease(1) is None
    del kept
    assert one.free_bytes == PIECE
    lease(one, PIECE)


def test_ranges_that_touch_are_one_again() -> None:
    one = share(5)
    leased = [lease(one, PIECE) for _ in range(5)]
    for index in (1, 3, 2):
        leased[index] = None
    assert one.lease(3 * PIECE) is not None
    leased.clear()
    assert one.free_bytes == 5 * PIECE
    assert len(lease(one, 5 * PIECE)) == 5 * PIECE


def test_a_range_comes_back_on_any_thread_and_inside_of_a_lease() -> None:
    """What the collector frees, it frees anywhere: also where the share is just looking."""
    one = share(64)
    errors: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(300):
                loop: list[Any] = [one.lease(PIECE)]
                loop.append(loop)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert not errors
    assert one.free_bytes == 64 * PIECE


def test_an_operation_keeps_what_it_was_given_until_it_is_done() -> None:
    driver = PlayedDriver(by_hand=True)
    gpu = CudaDevice(driver, lambda memory: memory, share_bytes=2 * PIECE)
    memory = gpu.allocate(PIECE)
    shares = gpu.staging_memory.shares

    def copy() -> Completion[Any]:
        flat = gpu.tensors.of(gpu.staging(PIECE, "into"))
        return gpu.streams.into.run(lambda: memory.memory(0, PIECE).copy_(flat, non_blocking=True))

    copied = copy()
    gc.collect()
    assert shares["into"].free_bytes == PIECE
    driver.play()
    waited(copied)
    del copied
    for _ in range(100):
        if shares["into"].free_bytes == 2 * PIECE:
            break
        threading.Event().wait(0.01)
    assert shares["into"].free_bytes == 2 * PIECE
