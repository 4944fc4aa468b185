"""A GPU's memory and pinned memory, on the CPU: what lies where after which copy, and by way of what."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.device.completion import waited
from services.worker.device.cuda.device import CudaDevice
from services.worker.device.cuda.memory import BOUNCE_BYTES
from services.worker.device.memory import HostMemory
from shared.errors import BadRequest
from shared.layout import CHECK_BYTES
from shared.unit_digests import block_checksums
from tests.services.worker.device.cuda.drivers import PlayedDriver

SIZE = 3 * CHECK_BYTES + 4096


def hashes(memory: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(block_checksums(memory.numpy().data), dtype=np.uint64).view(np.int64))


def device(*, by_hand: bool = False) -> tuple[CudaDevice, PlayedDriver]:
    driver = PlayedDriver(by_hand=by_hand)
    return CudaDevice(driver, hashes, share_bytes=1 << 20), driver


def some_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=size, dtype=np.uint8)


def test_bytes_are_written_where_they_belong_through_pinned_memory() -> None:
    gpu, driver = device()
    memory = gpu.allocate(SIZE)
    before, source = driver.num_pinned, some_bytes(1000)
    waited(memory.write(4096, source))
    assert driver.num_pinned == before  # it is leased
    assert (memory.memory(4096, 1000).numpy() == source).all()
    assert not memory.memory(0, 4096).any()
    assert not memory.memory(5096, 1000).any()


def test_many_bytes_that_are_not_pinned_go_in_pieces() -> None:
    gpu, driver = device()
    memory = gpu.allocate(2 * BOUNCE_BYTES + 100)
    source = some_bytes(2 * BOUNCE_BYTES + 100)
    before = driver.num_pinned
    waited(memory.write(0, source))
    assert driver.num_pinned == before + 2  # larger than the share; the last one is leased
    assert (memory.memory(0, len(source)).numpy() == source).all()


def test_a_write_returns_before_it_is_done_and_bytes_that_are_not_pinned_may_change_then() -> None:
    gpu, driver = device(by_hand=True)
    memory = gpu.allocate(SIZE)
    source = some_bytes(100)
    written, copy = memory.write(0, source), source.copy()
    source[:] = 0
    assert not written.done
    driver.play()
    waited(written)
    assert (memory.memory(0, 100).numpy() == copy).all()


def test_a_pinned_copy_goes_to_the_device_directly_and_what_came_is_hashed() -> None:
    gpu, driver = device()
    memory, host = gpu.allocate(SIZE), gpu.host_memory(SIZE)
    host.bytes[:] = some_bytes(SIZE)
    host.pin()
    host.pin()
    assert driver.pins == {host.address: SIZE}
    before = driver.num_pinned
    checksums = waited(memory.copy_from(host, 0, SIZE))
    assert driver.num_pinned == before + 1  # for the checksums on their way back
    assert checksums == block_checksums(host.bytes.data)
    assert (memory.memory(0, SIZE).numpy() == host.bytes).all()
    host.release()
    assert not driver.pins


def test_a_copy_of_the_device_comes_to_the_host_and_is_hashed_there() -> None:
    gpu, driver = device()
    memory, host = gpu.allocate(SIZE), gpu.host_memory(SIZE)
    waited(memory.write(0, some_bytes(SIZE, 3)))
    checksums = waited(host.copy_from(memory, CHECK_BYTES, CHECK_BYTES + 10))
    assert driver.pins == {host.address: SIZE}
    assert (
        host.bytes[CHECK_BYTES : 2 * CHECK_BYTES + 10] == some_bytes(SIZE, 3)[CHECK_BYTES:][: CHECK_BYTES + 10]
    ).all()
    assert checksums == block_checksums(host.bytes.data[CHECK_BYTES : 2 * CHECK_BYTES + 10])
    assert not host.bytes[:CHECK_BYTES].any()


def test_pinned_memory_is_unpinned_before_it_goes() -> None:
    gpu, driver = device()
    host = gpu.host_memory(SIZE)
    host.pin()
    del host
    assert not driver.pins


def test_host_memory_is_copied_to_pinned_memory_as_to_any() -> None:
    gpu, _ = device()
    host, plain = gpu.host_memory(SIZE), HostMemory(SIZE)
    plain.bytes[:] = some_bytes(SIZE)
    assert waited(host.copy_from(plain, 0, SIZE)) == block_checksums(plain.bytes.data)
    assert (host.bytes == plain.bytes).all()


def test_checksums_are_of_the_range_and_unsigned() -> None:
    gpu, _ = device()
    memory = gpu.allocate(SIZE)
    waited(memory.write(0, some_bytes(SIZE)))
    assert memory.checksums(CHECK_BYTES, SIZE - CHECK_BYTES) == block_checksums(some_bytes(SIZE).data[CHECK_BYTES:])
    assert any(checksum >= 1 << 63 for checksum in memory.checksums(0, SIZE))


def test_tensors_are_views_and_ranges_are_checked() -> None:
    gpu, _ = device()
    memory = gpu.allocate(SIZE)
    memory.tensor_at(8, (3, 4), torch.float32).fill_(1.0)
    assert memory.memory(8, 48).view(torch.float32).eq(1.0).all()
    memory.release()
    assert not memory.memory(0, SIZE).any()
    for offset, num_bytes in ((-1, 1), (0, SIZE + 1), (SIZE, 1)):
        with pytest.raises(BadRequest, match="outside"):
            memory.memory(offset, num_bytes)
    with pytest.raises(BadRequest, match="positive"):
        gpu.allocate(0)


def test_arrays_go_up_together_in_one_copy_and_come_back() -> None:
    gpu, driver = device()
    arrays = [
        np.arange(5, dtype=np.int64),
        np.array([[1.5, 2.5]], dtype=np.float32),
        np.array([7], dtype=np.int32),
        np.empty(0, dtype=np.int64),
    ]
    before = driver.num_pinned
    tensors = gpu.tensors.upload(*arrays)
    assert driver.num_pinned == before + 1
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.shape == array.shape
        assert (tensor.numpy() == array).all()
        assert tensor.numpy().dtype == array.dtype
    for array, back in zip(arrays, gpu.tensors.download(*tensors), strict=True):
        assert (array == back).all()


def test_pinned_memory_is_written_from_the_device_and_from_the_host() -> None:
    gpu, driver = device()
    memory, host = gpu.allocate(SIZE), gpu.host_memory(SIZE)
    waited(memory.write(0, some_bytes(SIZE)))
    waited(host.write(4096, memory.memory(0, 100)))
    waited(host.write(5000, some_bytes(10, 2)))
    assert driver.pins == {host.address: SIZE}
    assert (host.bytes[4096:4196] == some_bytes(SIZE)[:100]).all()
    assert (host.bytes[5000:5010] == some_bytes(10, 2)).all()
