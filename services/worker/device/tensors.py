"""Tensors of a device, and the way of arrays there and back.

What is made here is in order behind what the calling thread's stream was given: whoever calls from inside of an
operation (``Stream.run``) has it there. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from shared.transport.base import Buffer

Array = np.ndarray[Any, np.dtype[Any]]


class Tensors(Protocol):
    """Of one device."""

    device: torch.device

    def of(self, buffer: Buffer) -> torch.Tensor:
        """A buffer as ``[num_bytes]`` uint8, where it lies: on the device, or in memory of the host that the device
        copies from and to. One that may not be written is copied."""

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """These arrays on the device, in their shapes. The arrays are nobody's any more: they may be what a tensor lies
        in."""

    def download(self, *tensors: torch.Tensor) -> list[Array]:
        """Arrays of the host that have what is in these tensors once the operation that calls this is done, and not
        before. The tensors may be what an array lies in."""


class HostTensors:
    """``Tensors`` of a CPU: the same memory."""

    device = torch.device("cpu")

    def of(self, buffer: Buffer) -> torch.Tensor:
        flat = np.frombuffer(buffer, dtype=np.uint8)
        return torch.from_numpy(flat if flat.flags.writeable else flat.copy())

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def download(self, *tensors: torch.Tensor) -> list[Array]:
        return [tensor.numpy() for tensor in tensors]
