"""Tensors of a GPU, and the way of arrays there and back: through pinned memory, without waiting."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.device.cuda.driver import Driver
from services.worker.device.tensors import Array
from shared.transport.base import Buffer

_ALIGN_BYTES = 16


class CudaTensors:
    """``Tensors`` of a GPU."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.device = driver.device

    def of(self, buffer: Buffer) -> torch.Tensor:
        if isinstance(buffer, torch.Tensor):
            return buffer
        flat = np.frombuffer(buffer, dtype=np.uint8)
        return torch.from_numpy(flat if flat.flags.writeable else flat.copy())

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        packed = self._driver.pinned(end)
        flat = packed.numpy()
        for offset, array in zip(offsets, arrays, strict=True):
            flat[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = packed.to(self.device, non_blocking=True)
        return [
            there[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for offset, array in zip(offsets, arrays, strict=True)
        ]

    def download(self, *tensors: torch.Tensor) -> list[Array]:
        arrays = []
        for tensor in tensors:
            here = self._driver.pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            here.copy_(tensor, non_blocking=True)
            arrays.append(here.numpy())
        return arrays
