"""The worker's memory, where weights lie or come meanwhile, as vLLM's processes see it.

The worker listens on a unix socket. It sends a read-only descriptor of its memory with the first frame, which says
where each unit lies; then a frame each time that more units are ready. The first unit is the manifest, which tells the
others' tensors. These are views of that memory, in the order of the units, and one whose unit is not ready is waited
for. At last the loader says that it has taken all.
"""

from __future__ import annotations

import gc
import mmap
import select
import socket
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from . import words

if TYPE_CHECKING:
    import torch

SILENCE_S = 300.0
"""The worker's process gives up long before; one that hangs is not waited for longer."""
COPIED, TAKEN = b"\x01", b"\x02"
"""What the loader says at last: it has copied all and sees this memory no more, or it has all and may still use views
of it."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """By its name in the checkpoint."""

    name: str
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of its unit."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame: what the descriptor is of. The first unit is the manifest: eight bytes of length (little
    endian), and the tensors of each unit behind it, as msgpack."""

    num_bytes: int
    units: tuple[int, ...]
    """Where each begins."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """So many units can be read, from the first on. Where no more will come, the connection ends."""

    num_units: int


_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


class WeightsSource:
    """The worker's memory, in one process of vLLM."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(SILENCE_S)
        self._socket.connect(path)
        self._said = select.poll()
        self._said.register(self._socket, select.POLLIN)
        first, descriptors, _, _ = socket.recv_fds(self._socket, words.LENGTH_BYTES, 1)
        data = self._read(words.length_of(first + self._read(words.LENGTH_BYTES - len(first))))
        self._memory = msgspec.msgpack.decode(data, type=Memory)
        with open(descriptors[0], "rb", buffering=0) as file:
            self._map = mmap.mmap(file.fileno(), self._memory.num_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        self._num_ready = 0
        self._units: tuple[tuple[Tensor, ...], ...] | None = None

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = self._socket.recv(num_bytes - len(data))
            if not part:
                raise ConnectionError("the worker that has the weights is gone")
            data += part
        return bytes(data)

    def _wait(self, num_units: int) -> None:
        """Until so many can be read, and it is known whether more can. Raises ``ConnectionError`` if they never can."""
        while self._num_ready < num_units or self._said.poll(0):
            data = self._read(words.length_of(self._read(words.LENGTH_BYTES)))
            self._num_ready = msgspec.msgpack.decode(data, type=Ready).num_units

    def _manifest(self) -> tuple[tuple[Tensor, ...], ...]:
        if self._units is None:
            self._wait(1)
            begin = self._memory.units[0]
            length, begin = int.from_bytes(self._map[begin : begin + 8], "little"), begin + 8
            self._units = msgspec.msgpack.decode(self._map[begin : begin + length], type=tuple[tuple[Tensor, ...], ...])
        return self._units

    def _view(self, tensor: Tensor, begin: int) -> torch.Tensor:
        import torch

        dtype: torch.dtype | None = getattr(torch, _DTYPES.get(tensor.dtype, ""), None)
        if dtype is None:
            raise ValueError(f"tensor {tensor.name} is of {tensor.dtype}, which this version of PyTorch does not have")
        count = 1
        for size in tensor.shape:
            count *= size
        if not count:
            return torch.empty(tensor.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin + tensor.offset)
        return flat.view(tensor.shape)

    def end(self) -> None:
        """Tell the worker that all weights have their places, and whether the model still has views of its memory."""
        mapped = weakref.ref(self._map)
        del self._map
        if mapped() is not None:
            gc.collect()
        try:
            self._socket.sendall(COPIED if mapped() is None else TAKEN)
        finally:
            self.close()

    def close(self) -> None:
        """Views stay valid: the mapping goes with the last of them."""
        self._socket.close()

    @property
    def num_units(self) -> int:
        """That have tensors."""
        return len(self._memory.units) - 1

    def units(self, at_once: int = 1) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The tensors of each, in the order of the units, as they come: views that are not to be written. Of several
        units together, up to so many, where these are ready."""
        manifest, number = self._manifest(), 0
        while number < len(manifest):
            self._wait(number + 2)  # the manifest is the first of all
            end = min(number + at_once, self._num_ready - 1)
            yield [
                (tensor.name, self._view(tensor, self._memory.units[unit + 1]))
                for unit in range(number, end)
                for tensor in manifest[unit]
            ]
            number = end
