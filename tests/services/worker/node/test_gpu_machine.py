"""A machine is described without touching a GPU."""

from __future__ import annotations

import pytest

from services.worker.node.gpu_checks import CudaPackage, check_gpu
from services.worker.node.gpu_facts import GpuFacts
from services.worker.node.gpu_machine import GpuProbes, TorchBuild, ask_torch, gpu_machine
from shared.settings import SettingsError
from tests.services.worker.node.fake_nvml import FakeGpu, FakeNvml
from tests.services.workers import worker_config

TORCH = TorchBuild("2.13.0+cu130", "13.0", 2, ("sm_90",))
WHEELS = {"cupy-cuda13x": "14.2.0", "ucxx-cu13": "0.52.0", "flashinfer-python": "0.7.2"}


def _probes(
    nvml: FakeNvml | None = None,
    *,
    torch: TorchBuild | None = TORCH,
    wheels: dict[str, str] | None = None,
    missing: tuple[str, ...] = (),
) -> GpuProbes:
    def missing_kernels(gpu: GpuFacts) -> tuple[str, ...]:
        assert gpu.capability == (9, 0)
        return missing

    return GpuProbes(
        load_nvml=lambda: nvml,
        ask_torch=lambda: torch,
        wheel_version=(WHEELS if wheels is None else wheels).get,
        missing_kernels=missing_kernels,
        find_nvcc=lambda: "/cuda/bin/nvcc",
    )


NVML = FakeNvml(FakeGpu("0000:3b:00.0", uuid="GPU-11aa"), FakeGpu("0000:3c:00.0", uuid="GPU-22bb"))


def test_a_machine_with_all_there_is() -> None:
    found = gpu_machine("GPU-22bb", _probes(NVML, missing=("batch_decode",)))
    assert found.gpu is not None
    assert found.gpu.uuid == "GPU-22bb"
    assert found.driver is not None
    assert (found.driver.cuda, found.num_usable, found.architectures) == ((13, 0), 2, ("sm_90",))
    assert found.packages == (
        CudaPackage(name="torch", wheel="torch 2.13.0+cu130", cuda_major=13),
        CudaPackage(name="cupy", wheel="cupy-cuda13x 14.2.0", cuda_major=13),
        CudaPackage(name="ucxx", wheel="ucxx-cu13 0.52.0", cuda_major=13),
        CudaPackage(name="flashinfer", wheel="flashinfer-python 0.7.2"),
    )
    assert (found.kernels.missing, found.kernels.compiler) == (("batch_decode",), "/cuda/bin/nvcc")
    check_gpu(worker_config("w", device="cuda"), found)


def test_flashinfer_may_be_told_to_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert not gpu_machine("", _probes(NVML)).kernels.may_compile
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    assert gpu_machine("", _probes(NVML)).kernels.may_compile


@pytest.mark.parametrize(
    ("wheels", "packages"),
    [
        ({}, [("cupy", "", None), ("ucxx", "", None), ("flashinfer", "", None)]),
        (
            {"cupy": "14.2.0", "flashinfer-python": "0.7.2"},
            [("cupy", "cupy 14.2.0", None), ("ucxx", "", None), ("flashinfer", "flashinfer-python 0.7.2", None)],
        ),
        (
            {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.1.0", "ucxx-cu12": "0.52.0"},
            [
                ("cupy", "cupy-cuda12x 14.2.0", 12),
                ("cupy", "cupy-cuda13x 14.1.0", 13),
                ("ucxx", "ucxx-cu12 0.52.0", 12),
                ("flashinfer", "", None),
            ],
        ),
    ],
)
def test_packages_by_the_names_of_their_wheels(
    wheels: dict[str, str], packages: list[tuple[str, str, int | None]]
) -> None:
    found = gpu_machine("", _probes(NVML, wheels=wheels)).packages[1:]
    assert [(package.name, package.wheel, package.cuda_major) for package in found] == packages


@pytest.mark.parametrize(
    ("probes", "said"),
    [
        (_probes(None), r"no NVIDIA driver answers here \(the package nvidia-ml-py is not installed\)"),
        (_probes(FakeNvml(starts=False)), r"no NVIDIA driver answers here \(NVML does not start: Driver Not Loaded\)"),
        (_probes(NVML, torch=None), "the package torch is not installed"),
        (_probes(NVML, torch=TorchBuild("2.13.0+cpu", None, 0, ())), r"torch 2.13.0\+cpu is built without CUDA"),
        (_probes(FakeNvml()), "but no GPU that answers"),
    ],
)
def test_what_is_missing_is_found_by_the_checks(probes: GpuProbes, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check_gpu(worker_config("w", device="cuda"), gpu_machine("", probes))


def test_this_machine_is_described_as_it_is() -> None:
    torch = ask_torch()
    assert torch is not None
    found = gpu_machine("")
    assert found.packages[0].wheel == f"torch {torch.version}"
    assert [package.name for package in found.packages if package.wheel][-1] == "ucxx"
