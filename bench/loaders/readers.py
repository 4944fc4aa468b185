"""Ways to bring a checkpoint's weights into memory. Each prepares its memory when made, and then reads once.

Everything that a server would have done before a model is asked for (imports, allocated and touched memory) is
preparation; what follows the request is reading.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from services.worker.device.host import HOST
from services.worker.memory.arena import Arena
from services.worker.memory.dtypes import TORCH_DTYPES
from services.worker.memory.loader import load_unit
from shared.checkpoint import WEIGHT_DTYPES, Checkpoint

_DIRECT_BYTES = 8 << 20


class Reader(ABC):
    """Made once, read once, in a process of its own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Allocate and touch what the weights go to."""
        self._checkpoint = checkpoint

    @abstractmethod
    def read(self) -> int:
        """What is measured; the bytes that were read."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What was read, by the checkpoint's names. Empty where only bytes are read."""
        return {}

    def digest(self) -> str:
        """Of all tensors: the same for every way that reads the same weights. Empty where only bytes are read."""
        digest = xxhash.xxh3_128()
        tensors = self.tensors()
        for name in sorted(tensors):
            digest.update(name.encode())
            digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
        return str(digest.hexdigest()) if tensors else ""

    def close(self) -> None:
        """Give back what outlives the object."""
        return


class _Preallocated(Reader):
    """Reads into tensors that were allocated and written before."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._targets = {
            name: torch.ones(entry.shape, dtype=TORCH_DTYPES[WEIGHT_DTYPES[entry.dtype]])
            for name, entry in checkpoint.tensors.items()
        }

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._targets

    def _num_bytes(self) -> int:
        return sum(t.nbytes for t in self._targets.values())


class Safetensors(_Preallocated):
    """``safe_open``, tensor by tensor, copied to where it belongs: what servers do."""

    def read(self) -> int:
        for file in self._checkpoint.weight_files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    self._targets[name].copy_(opened.get_tensor(name))
        return self._num_bytes()


class SafetensorsLoadFile(Reader):
    """``load_file``: tensors are views of the mapped file, so each page is touched, or nothing would have been read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._loaded: dict[str, torch.Tensor] = {}

    def read(self) -> int:
        for file in self._checkpoint.weight_files:
            self._loaded |= load_file(file)
        for tensor in self._loaded.values():
            tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
        return sum(t.nbytes for t in self._loaded.values())

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._loaded


class RunaiStreamer(_Preallocated):
    """The Run:ai model streamer; tensors are copied out of the buffer that it uses again."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        # May be absent, and is none of the other readers' business.
        from runai_model_streamer import SafetensorsStreamer

        super().__init__(checkpoint)
        self._streamer = SafetensorsStreamer()

    def read(self) -> int:
        with self._streamer as streamer:
            streamer.stream_files([str(file) for file in self._checkpoint.weight_files])
            for name, tensor in streamer.get_tensors():
                self._targets[name].copy_(tensor)
        return self._num_bytes()


class ArenaReader(Reader):
    """Ours: into a host arena, touched before, as a spare worker's is."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.layout = checkpoint.layout
        self.arena = Arena(HOST.allocate(self.layout.num_bytes))
        self.arena.prefault(self.layout.num_bytes)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        dtype = self._checkpoint.spec.dtype
        return {
            part.checkpoint_name: self.arena.tensor(slot, dtype)[part.row : part.row + part.shape[0]]
            for unit in self.layout.units
            for slot in unit.slots
            for part in slot.parts
        }


class Disk(ArenaReader):
    """Our way from disk: unit by unit, in order, with the checksums that others will verify."""

    seal = True

    def read(self) -> int:
        for unit in self.layout.units:
            load_unit(self._checkpoint, self.layout, unit, self.arena)
            if self.seal:
                self.arena.unit_checksums(unit)
        return self.layout.num_bytes


class DiskUnsealed(Disk):
    """The same without checksums."""

    seal = False


class DirectRead(Reader):
    """For reference, the files' bytes as the disk gives them, past the page cache (O_DIRECT), one request at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._buffer = mmap.mmap(-1, _DIRECT_BYTES)
        np.frombuffer(self._buffer, np.uint8)[:] = 1

    def read(self) -> int:
        total = 0
        for file in self._checkpoint.weight_files:
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
            try:
                size, offset = file.stat().st_size, 0
                while offset < size:
                    count = os.preadv(descriptor, [self._buffer], offset)
                    if count == 0:
                        raise EOFError(f"{file.name} ends at byte {offset} of {size}")
                    offset += count
                total += offset
            finally:
                os.close(descriptor)
        return total
