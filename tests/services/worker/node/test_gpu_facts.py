"""Which GPU a worker has, as NVML tells."""

from __future__ import annotations

import pytest

from services.worker.node.gpu_facts import GpuFacts, NvidiaDriver, NvmlFailed, gpu_of, read_driver, read_gpu_facts
from tests.services.worker.node.fake_nvml import FakeGpu, FakeNvml, FakeNvmlError
from tests.services.workers import worker_config

FIRST = FakeGpu("0000:3b:00.0", uuid="GPU-11aa")
SECOND = FakeGpu(
    "0000:3c:00.0",
    uuid="GPU-22bb",
    name="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    total_bytes=85 << 30,
    free_bytes=7,
)


@pytest.mark.parametrize(
    ("visible", "uuid"), [("", "GPU-11aa"), ("0", "GPU-11aa"), ("1", "GPU-22bb"), ("GPU-22", "GPU-22bb")]
)
def test_the_gpu_is_found_as_cuda_lists_it(visible: str, uuid: str) -> None:
    nvml = FakeNvml(FIRST, SECOND)
    found = read_gpu_facts(nvml, visible)
    assert found is not None
    assert found.uuid == uuid
    assert nvml.users == 0, "NVML is left open"


def test_what_is_known_of_a_gpu() -> None:
    assert read_gpu_facts(FakeNvml(FIRST, SECOND), "1") == GpuFacts(
        name="NVIDIA A100-SXM4-80GB", uuid="GPU-22bb", capability=(8, 0), total_bytes=85 << 30, free_bytes=7
    )


@pytest.mark.parametrize("visible", ["2", "GPU-33", "MIG-1", "-1", "much"])
def test_there_may_be_no_such_gpu(visible: str) -> None:
    assert read_gpu_facts(FakeNvml(FIRST, SECOND), visible) is None


def test_a_part_of_a_gpu_is_named_by_its_uuid() -> None:
    part = FakeGpu("0000:3b:00.0", uuid="MIG-5c7d", name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", total_bytes=10 << 30)
    found = read_gpu_facts(FakeNvml(part), "MIG-5c7d")
    assert found is not None
    assert found.total_bytes == 10 << 30


def test_an_nvml_that_does_not_start_knows_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    assert read_gpu_facts(FakeNvml(FIRST, starts=False), "0") is None
    assert "Driver Not Loaded" in caplog.text


def test_a_gpu_without_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_supported(self: FakeNvml, handle: FakeGpu) -> None:
        raise FakeNvmlError("Not Supported")

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetMemoryInfo", not_supported)
    found = read_gpu_facts(FakeNvml(FIRST), "0")
    assert found is not None
    assert (found.name, found.total_bytes) == (FIRST.name, 0)


def test_what_a_worker_computes_on() -> None:
    found = gpu_of(worker_config("w", device="cuda", engine="torch", visible_gpu="1"), lambda: FakeNvml(FIRST, SECOND))
    assert found is not None
    assert (found.uuid, found.capability_text) == ("GPU-22bb", "8.0")
    assert found.shown == "NVIDIA A100-SXM4-80GB (GPU-22bb)"
    assert gpu_of(worker_config("w", device="cuda", engine="torch"), lambda: None) is None


def test_a_worker_on_the_cpu_and_a_mock_do_not_ask() -> None:
    def never() -> None:
        raise AssertionError("asked NVML")

    assert gpu_of(worker_config("w", device="cpu", engine="torch"), never) is None
    assert gpu_of(worker_config("w", device="cuda", engine="mock"), never) is None
    stands_for = gpu_of(worker_config("w", device="cuda", engine="mock", mock_gpu="H100 SXM 80 GB"), never)
    assert stands_for == GpuFacts(name="H100 SXM 80 GB")
    assert stands_for.shown == "H100 SXM 80 GB"
    assert stands_for.capability_text == ""


def test_the_driver_and_its_gpus() -> None:
    nvml = FakeNvml(FIRST, SECOND, driver="550.54.14", cuda=12040)
    assert read_driver(nvml) == NvidiaDriver(version="550.54.14", cuda=(12, 4), uuids=("GPU-11aa", "GPU-22bb"))
    assert nvml.users == 0, "NVML is left open"


def test_one_gpu_that_does_not_answer_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def uuid(self: FakeNvml, handle: FakeGpu) -> str:
        if handle is FIRST:
            raise FakeNvmlError("GPU is lost")
        return handle.uuid

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetUUID", uuid)
    assert read_driver(FakeNvml(FIRST, SECOND)).uuids == ("GPU-22bb",)
    assert "GPU 0 of this machine does not answer: GPU is lost" in caplog.text


def test_without_a_driver_it_is_said_why() -> None:
    with pytest.raises(NvmlFailed, match="NVML does not start: Driver Not Loaded"):
        read_driver(FakeNvml(starts=False))
