"""Where tests run the rows of an engine: a tiny model on the CPU, as it is and as a device that is asynchronous."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import torch

from bench.gpu.engines import LLAMA_8B, EnginePlace, place_of
from bench.gpu.figures import FAILED, OFF, Figure, Report
from services.worker.device.cuda.device import CudaDevice
from tests.services.worker.device.cuda.drivers import PlayedDriver, PlayedEvent
from tests.services.worker.device.cuda.test_memory import hashes
from tests.services.worker.engine.flashinfer_harness import put_twin

TINY = msgspec.structs.replace(
    LLAMA_8B,
    dtype="float32",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


class ClockedEvent(PlayedEvent):
    """Knows when it was come to."""

    def come(self) -> None:
        super().come()
        self.at_ms = time.perf_counter() * 1000


class ClockedDriver(PlayedDriver):
    """Which comes to its events at once."""

    def event(self) -> PlayedEvent:
        return ClockedEvent(self)


def cpu() -> EnginePlace:
    """Operations have run when a call returns."""
    return place_of("cpu", Path())


def played_gpu() -> EnginePlace:
    """Operations are known to have ended a little later, on a thread of the device. Its attention records no graphs."""
    return EnginePlace("cpu", CudaDevice(ClockedDriver(), hashes, share_bytes=1 << 20), "torch_cpu")


def twin_gpu(monkeypatch: pytest.MonkeyPatch) -> EnginePlace:
    """The same with FlashInfer's twin, which takes float32 and is recorded in graphs."""
    put_twin(monkeypatch, torch.float32)
    return EnginePlace("cpu", CudaDevice(ClockedDriver(), hashes, share_bytes=1 << 20), "flashinfer")


class Found:
    """A report's figures."""

    def __init__(self, row: str, folder: Path) -> None:
        self.figures: list[Figure] = []
        self.report = Report(row, self.figures.append, folder)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.figures]

    @property
    def failed(self) -> list[str]:
        return [f"{one.name}: {one.note}" for one in self.figures if one.unit == FAILED]

    @property
    def off(self) -> list[str]:
        """Figures that are not what they should be."""
        return [one.name for one in self.figures if OFF in one.note]

    def __getitem__(self, name: str) -> Figure:
        (found,) = [one for one in self.figures if one.name == name]
        return found
