"""FlashInfer's wrappers, each of which holds the plan of one batch, and who may plan on one again when.

What FlashInfer 0.7.2 does (``decode.py``, ``prefill.py``, ``attention/scheduler.cuh``):

``plan`` computes on the host which block of the kernel computes what, writes that into 8 MiB of pinned memory of its
wrapper, and has it copied to 8 MiB of the wrapper's on the device, in the order of the current stream. Until that copy
has been made a second plan on the wrapper would change what the first one's ``run`` reads: kernels were seen never to
end (docs/results.md, section 11). So an event behind each plan says when its wrapper may be planned on again. What
lies on the device needs no such care: what a later plan copies there is in the stream behind what an earlier one ran.

``plan`` calls ``to(device, non_blocking=True)`` on what it is given: copies from pinned memory are waited for by
nobody, and PyTorch keeps that memory until they are made; page numbers are on the device, and are not copied. ``run``
copies nothing. What ``plan`` copies from unpinned memory all the same are the ``B + 1`` numbers of queries of a decode
wrapper without a graph, at most 64 KiB, which CUDA takes at the call.

The float workspace has partial results between two kernels of one ``run``: all wrappers of a stream may share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from services.worker.engine.attention.backend import PagedBatch


class PinnedBatch(NamedTuple):
    """A ``PagedBatch`` as int32 in pinned memory of the host, but for its pages."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    kv_lens: torch.Tensor
    """``[N]``: tokens of each sequence. FlashInfer would compute them in unpinned memory, and copy from there."""


def pinned(batch: PagedBatch, block_size: int) -> PinnedBatch:
    """A copy of it."""
    full_pages = np.maximum(np.diff(batch.kv_indptr) - 1, 0)
    arrays = (batch.qo_indptr, batch.kv_indptr, batch.last_page_len, full_pages * block_size + batch.last_page_len)
    together = torch.from_numpy(np.concatenate(arrays, dtype=np.int32)).pin_memory()
    parts = torch.split(together, [len(array) for array in arrays])
    return PinnedBatch(*parts)


@dataclass(slots=True, eq=False)
class FlashInferPlan:
    """Of one batch: what it is planned from, as often as that is needed, and where the plan is."""

    batch: PinnedBatch
    pages: torch.Tensor
    """``[kv_indptr[N]]`` int32, on the device. Read by ``run``, where it lies."""
    slots: torch.Tensor
    """``[num_tokens]``: where the batch's own K and V go."""
    pool: WrapperPool | None
    """Whose wrappers it is planned on; None for one that has its wrapper for good."""
    holder: PlannedWrapper | None = None
    """Which was planned on for it. Others may have been since."""

    def wrapper(self) -> Any:
        """FlashInfer's, planned for this batch. Plans again if another batch has taken its place."""
        if self.pool is None:
            assert self.holder is not None
            return self.holder.wrapper
        return self.pool.holder_of(self).wrapper


class PlannedWrapper:
    """A wrapper of FlashInfer's, and whose plan is in it."""

    def __init__(self, wrapper: Any, plan_on: Callable[[Any, PinnedBatch, torch.Tensor], None]) -> None:
        """``plan_on(wrapper, batch, pages)`` calls its ``plan``."""
        self.wrapper = wrapper
        self.plan: FlashInferPlan | None = None
        self.num_waits = 0
        """How often the host had to wait before it could plan: it was a whole round of plans ahead of the device."""
        self._plan_on = plan_on
        events: Any = torch.cuda
        self._copied = events.Event()
        """Behind the copy of the last plan out of pinned memory. One that was never recorded has passed."""

    def take(self, plan: FlashInferPlan) -> None:
        """Plan for it."""
        if not self._copied.query():
            self.num_waits += 1
            self._copied.synchronize()
        self.plan = None
        try:
            self._plan_on(self.wrapper, plan.batch, plan.pages)
        finally:
            self._copied.record()  # also behind half a plan
        self.plan, plan.holder = plan, self


class WrapperPool:
    """Wrappers of one kind. The one whose plan was run longest ago is planned on next."""

    def __init__(self, make: Callable[[], PlannedWrapper], most: int) -> None:
        """``make``: when one is needed, ``most`` times at most."""
        self._make, self._most = make, most
        self._holders: list[PlannedWrapper] = []
        """In the order of their use."""
        self.num_plans = 0

    @property
    def num_waits(self) -> int:
        return sum(holder.num_waits for holder in self._holders)

    def holder_of(self, plan: FlashInferPlan) -> PlannedWrapper:
        """One that is planned for this batch."""
        holder = plan.holder
        if holder is not None and holder.plan is plan:
            self._holders.remove(holder)
        else:
            holder = self._make() if len(self._holders) < self._most else self._holders.pop(0)
            try:
                self.num_plans += 1
                holder.take(plan)
            except BaseException:
                self._holders.insert(0, holder)
                raise
        self._holders.append(holder)
        return holder
