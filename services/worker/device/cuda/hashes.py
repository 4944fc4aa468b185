"""Checksums of a GPU's memory, piece by piece. Imports Triton when the first is made."""

from __future__ import annotations

import torch

from services.worker.device.cuda.driver import Driver
from shared.layout import CHECK_BYTES

AT_ONCE_BYTES = 128 << 20
"""Their sums take a sixteenth of it."""


class CudaHashes:
    """``Hashes`` of a GPU. On one stream: the space for sums is used again."""

    def __init__(self, driver: Driver) -> None:
        from services.worker.device.cuda.xxh3_kernel import BlockChecksums

        assert AT_ONCE_BYTES % CHECK_BYTES == 0
        self._checksums = BlockChecksums(str(driver.device), AT_ONCE_BYTES)

    def __call__(self, memory: torch.Tensor) -> torch.Tensor:
        parts = [
            self._checksums(memory[begin : begin + AT_ONCE_BYTES]).clone()
            for begin in range(0, len(memory), AT_ONCE_BYTES)
        ]
        return torch.cat(parts)
