"""vLLM's loader of weights that a worker has, or receives meanwhile: ``--load-format blitz``.

The worker listens on a unix socket. It sends a read-only descriptor of its memory with the first frame, which says
where each tensor lies; then a frame each time that more units are ready. Tensors are views of that memory, in the order
of the units, and a tensor whose unit is not ready is waited for.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from . import words

if TYPE_CHECKING:
    import torch

FORMAT = "blitz"
SILENCE_S = 300.0
"""The worker's process gives up long before; one that hangs is not waited for longer."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """By its name in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the memory."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame."""

    num_bytes: int
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``."""
    units: tuple[tuple[Tensor, ...], ...]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Units that can be read. Where no more will come, the connection ends."""

    units: tuple[int, ...]


class WeightsSource:
    """The worker's memory, in one process of vLLM."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(SILENCE_S)
        self._socket.connect(path)
        first, descriptors, _, _ = socket.recv_fds(self._socket, words.LENGTH_BYTES, 1)
        data = self._read(words.length_of(first + self._read(words.LENGTH_BYTES - len(first))))
        self.manifest = msgspec.msgpack.decode(data, type=Manifest)
        with open(descriptors[0], "rb", buffering=0) as file:
            self._map = mmap.mmap(file.fileno(), self.manifest.num_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        self._ready: set[int] = set()

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = self._socket.recv(num_bytes - len(data))
            if not part:
                raise ConnectionError("the worker that has the weights is gone")
            data += part
        return bytes(data)

    def wait(self, unit: int) -> None:
        """Until it can be read. Raises ``ConnectionError`` if it never can."""
        while unit not in self._ready:
            ready = msgspec.msgpack.decode(self._read(words.length_of(self._read(words.LENGTH_BYTES))), type=Ready)
            self._ready.update(ready.units)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, in the order of the units: views that are not to be written."""
        import warnings

        import torch

        dtype = getattr(torch, self.manifest.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            for number, unit in enumerate(self.manifest.units):
                self.wait(number)
                for tensor in unit:
                    count = 1
                    for size in tensor.shape:
                        count *= size
                    flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=tensor.offset)
                    yield tensor.name, flat.view(tensor.shape)


def register() -> None:
    """Make the format known to vLLM, in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class BlitzModelLoader(BaseModelLoader):
        """``model_loader_extra_config``: ``{"socket": PATH}``."""

        def download_model(self, model_config: object) -> None:
            """Nothing: the worker has them."""

        def load_weights(self, model: Any, model_config: object) -> None:  # noqa: ARG002 - vLLM's word
            source = WeightsSource(self.load_config.model_loader_extra_config["socket"])
            loaded = model.load_weights(source.tensors())
            missing = {name for name, _ in model.named_parameters()} - set(loaded or ())
            if loaded is not None and missing:
                raise ValueError(f"weights that did not come: {', '.join(sorted(missing)[:5])}")

    register_model_loader(FORMAT)(BlitzModelLoader)
