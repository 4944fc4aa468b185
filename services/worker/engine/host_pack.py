"""Arrays of one step that go to the device in one copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from services.worker.device.tensors import Array, Tensors


class Packed:
    """One array of a pack."""

    __slots__ = ("array", "tensor")

    tensor: torch.Tensor
    """Of its shape and type, on the device; once the pack is uploaded."""

    def __init__(self, array: Array) -> None:
        self.array = array


class HostPack:
    """Gathers int64 and float64 arrays, and uploads them together."""

    def __init__(self) -> None:
        self._parts: list[Packed] = []

    def ints(self, values: npt.ArrayLike) -> Packed:
        return self._add(np.asarray(values, dtype=np.int64))

    def floats(self, values: npt.ArrayLike) -> Packed:
        return self._add(np.asarray(values, dtype=np.float64))

    def _add(self, array: Array) -> Packed:
        part = Packed(array)
        self._parts.append(part)
        return part

    def upload(self, tensors: Tensors) -> None:
        """Inside of an operation. Nothing is copied where nothing was added."""
        if not self._parts:
            return
        flat = np.concatenate([part.array.reshape(-1).view(np.int64) for part in self._parts])
        (on_device,) = tensors.upload(flat)
        tensors_of = torch.split(on_device, [part.array.size for part in self._parts])
        for part, tensor in zip(self._parts, tensors_of, strict=True):
            of_type = tensor.view(torch.float64) if part.array.dtype == np.float64 else tensor
            part.tensor = of_type.view(part.array.shape)
