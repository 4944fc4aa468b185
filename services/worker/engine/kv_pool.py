"""The KV pool: one flat buffer per worker, viewed per model as pages of K and V for each layer.

Allocated once; its address is fixed for the worker's life, whatever model the worker serves.
Per layer K, then V, each ``[num_blocks, block_size, num_kv_heads, head_dim]`` (FlashInfer's NHD pages).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.worker.device.memory import HUGE_PAGE_BYTES, DeviceMemory
from shared.errors import BadRequest
from shared.layout import ArenaLayout

if TYPE_CHECKING:
    import torch

_ALIGN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KvCache:
    """A model's view of the pool. ``k[i]`` and ``v[i]`` are layer i's pages
    ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``."""

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    num_blocks: int
    """That sequences have. One more is behind them (``scratch_block``)."""
    block_size: int

    @property
    def scratch_block(self) -> int:
        """Nobody's: what is computed for nobody writes there."""
        return self.num_blocks

    def gather(self, slots: torch.Tensor, out: torch.Tensor, first_layer: int = 0) -> None:
        """Copy the KV of ``slots [n]`` (block * block_size + offset) in layers ``first_layer ..`` into ``out``.

        ``out``: ``[num_layers, 2 (K, V), n, num_kv_heads, head_dim]``. Reads no other slots and no other layers:
        other threads may be writing those.
        """
        import torch

        for layer, (keys, values) in enumerate(out, start=first_layer):
            torch.index_select(self.k[layer].flatten(0, 1), 0, slots, out=keys)
            torch.index_select(self.v[layer].flatten(0, 1), 0, slots, out=values)

    def scatter(self, slots: torch.Tensor, kv: torch.Tensor, first_layer: int = 0) -> None:
        """The reverse of ``gather``: write ``kv`` into ``slots``, and no others."""
        for layer, (keys, values) in enumerate(kv, start=first_layer):
            self.k[layer].flatten(0, 1).index_copy_(0, slots, keys)
            self.v[layer].flatten(0, 1).index_copy_(0, slots, values)

    def poison(self, layer: int, slots: npt.NDArray[np.int64]) -> None:
        """NaN in these slots of one layer, and in no others."""
        import torch

        index = torch.from_numpy(slots)
        for pages in (self.k[layer], self.v[layer]):
            pages.flatten(0, 1).index_fill_(0, index, torch.nan)


def kv_block_bytes(layout: ArenaLayout, block_size: int) -> int:
    """Bytes of one block over all layers, K and V."""
    return layout.kv_bytes_per_token * block_size


def kv_pool_bytes(layout: ArenaLayout, block_size: int, num_blocks: int) -> int:
    """Capacity of a pool that holds ``num_blocks`` blocks: them, nobody's, and the alignment of K and V of each
    layer."""
    return (num_blocks + 1) * kv_block_bytes(layout, block_size) + 2 * layout.num_layers * _ALIGN_BYTES


SPARE_BYTES = 64 << 20
"""Committed while no model uses the pool. Which places its first blocks will have is known with the model only; but
memory that was just given back is committed again in 0.2 ms per huge page, and memory that the system has to find first
in 7 ms (measured on a small virtual machine)."""


class KvPool:
    """The buffer. One model uses it at a time."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.capacity_bytes = memory.capacity_bytes

    def rest(self) -> None:
        """No model uses the pool: give back its memory but for ``SPARE_BYTES``, which the next view will free."""
        self._memory.release()
        self._memory.populate(0, min(SPARE_BYTES, self.capacity_bytes))

    def release(self) -> None:
        """Give all of its memory back."""
        self._memory.release()

    def num_blocks(self, layout: ArenaLayout, block_size: int) -> int:
        """How many blocks of that size fit."""
        usable_bytes = self.capacity_bytes - kv_pool_bytes(layout, block_size, 0)
        return max(0, usable_bytes) // kv_block_bytes(layout, block_size)

    def view(self, layout: ArenaLayout, block_size: int, num_blocks: int | None = None) -> KvCache:
        """The pool as pages of a model, zeroed: what another model left could read as NaN.

        ``num_blocks`` limits them. Raises ``BadRequest`` if they do not fit.
        """
        fitting = self.num_blocks(layout, block_size)
        if num_blocks is None:
            num_blocks = fitting
        if not 0 < num_blocks <= fitting:
            raise BadRequest(
                f"KV pool of {self.capacity_bytes} bytes holds {fitting} blocks of {block_size}, not {num_blocks}"
            )
        from services.worker.memory.dtypes import TORCH_DTYPES

        self._memory.release()
        spec = layout.spec
        shape = (num_blocks + 1, block_size, layout.num_kv_heads, spec.head_dim)
        dtype = TORCH_DTYPES[spec.dtype]
        region_bytes = kv_block_bytes(layout, block_size) // (2 * layout.num_layers) * (num_blocks + 1)
        region_bytes = -(-region_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        pages = [self._memory.tensor_at(i * region_bytes, shape, dtype) for i in range(2 * layout.num_layers)]
        return KvCache(tuple(pages[0::2]), tuple(pages[1::2]), num_blocks, block_size)

    def blocks_in_pages_of(self, cache: KvCache, num_blocks: int) -> int:
        """How many first blocks of every layer lie in the huge pages that hold the first ``num_blocks``."""
        if not self._memory.on_host:
            return cache.num_blocks  # a device's memory is there
        num_blocks = min(num_blocks, cache.num_blocks)
        fitting = [cache.num_blocks]
        for pages in (*cache.k, *cache.v):
            end = pages[num_blocks - 1].data_ptr() + pages[0].nbytes
            fitting.append((-(-end // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES - pages.data_ptr()) // pages[0].nbytes)
        return min(fitting)

    def populate_blocks(self, cache: KvCache, first: int, last: int) -> None:
        """Commit blocks ``first <= i < last`` of every layer of ``cache``, this pool's, and change nothing in them.
        From any thread, also while the blocks are used."""
        if not self._memory.on_host:
            return
        for pages in (*cache.k, *cache.v):
            blocks = pages[first:last]
            self._memory.populate(blocks.data_ptr() - self._memory.address, blocks.nbytes)
