"""Tensors of a GPU, and the way of arrays there and back: through pinned memory, without waiting."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.device.cuda.driver import Driver
from services.worker.device.tensors import Array
from shared.transport.base import Buffer

_ALIGN_BYTES = 16
_NUMPY_DTYPES = {
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
_DTYPES = {theirs: ours for ours, theirs in _NUMPY_DTYPES.items()}


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
        for offset, array in zip(offsets, arrays, strict=True):
            packed.array[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = torch.empty(end, dtype=torch.uint8, device=self.device)
        there.copy_(packed.tensor, non_blocking=True)
        return [
            there[offset : offset + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for offset, array in zip(offsets, arrays, strict=True)
        ]

    def download(self, *tensors: torch.Tensor) -> list[Array]:
        arrays = []
        for tensor in tensors:
            here = self._driver.pinned(tensor.nbytes)
            here.tensor.copy_(tensor.contiguous().view(-1).view(torch.uint8), non_blocking=True)
            arrays.append(here.array.view(_NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape))
        return arrays
