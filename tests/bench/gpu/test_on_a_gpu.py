"""What only a GPU shows: ``make test-gpu``. Rows of the bench with little to do; rates are the bench's own.

Kernels are compiled into ``build/gpu``, which takes minutes the first time.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from bench.gpu.engines import LLAMA_8B, EnginePlace, place_of
from bench.gpu.first import FirstSettings
from bench.gpu.first import measure_on as measure_first
from bench.gpu.kernels import MODELS
from bench.gpu.kernels import measure_on as measure_kernels
from bench.gpu.loads import LoadSettings
from bench.gpu.loads import measure_on as measure_loads
from bench.gpu.pair import PairSettings
from bench.gpu.pair import measure_on as measure_pair
from bench.gpu.steps import StepSettings
from bench.gpu.steps import measure_on as measure_steps
from bench.gpu.timing import keep_busy
from bench.gpu.tokens import TokenSettings
from bench.gpu.tokens import measure_on as measure_tokens
from bench.gpu.waits import WaitSettings
from bench.gpu.waits import measure_on as measure_waits
from services.worker.device.completion import waited
from shared.unit_digests import block_checksums
from tests.bench.gpu.places import Found

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
KERNELS = Path(__file__).resolve().parents[3] / "build" / "gpu"
SMALL = msgspec.structs.replace(LLAMA_8B, num_layers=2)


@pytest.fixture(scope="module")
def place() -> EnginePlace:
    """A device is made once in a process's life."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    return place_of("cuda", KERNELS)


@pytest.fixture
def found(tmp_path: Path) -> Found:
    return Found("gpu", tmp_path)


def test_bytes_go_to_the_gpu_and_back_and_are_hashed_there(place: EnginePlace) -> None:
    device, size = place.device, (20 << 20) + 4096
    memory, host = device.allocate(size), device.host_memory(size)
    source = np.random.default_rng(1).integers(256, size=size, dtype=np.uint8)
    waited(memory.write(0, source))
    assert memory.checksums(0, size) == block_checksums(source)
    assert waited(host.copy_from(memory, 0, size)) == block_checksums(source)
    memory.release()
    assert not memory.memory(0, size).any()
    assert waited(memory.copy_from(host, 0, size)) == block_checksums(source)


def test_kernels_are_compiled_and_run(place: EnginePlace, found: Found) -> None:
    measure_kernels(found.report, place, MODELS)
    assert found.failed == []


def test_the_engine_computes_what_transformers_computes(place: EnginePlace, found: Found) -> None:
    measure_tokens(found.report, place, TokenSettings(prompt_tokens=(1, 20, 100), output_tokens=16))
    assert found.failed == found.off == []
    assert (found["llama, bfloat16: rehearsals"].value or 0) > 0


def test_the_host_waits_for_nothing(place: EnginePlace, found: Found) -> None:
    settings = WaitSettings(SMALL, num_requests=2, prompt_tokens=100, num_steps=20)
    measure_waits(found.report, place, settings, torch.cuda.set_sync_debug_mode, keep_busy)
    assert found.failed == found.off == []


def test_steps_are_timed(place: EnginePlace, found: Found) -> None:
    settings = StepSettings(
        SMALL, (1, 3), 100, num_steps=20, prompt_tokens=500, prompt_chunks=(500,), prompt_rounds=1, plan_batches=(1,)
    )
    measure_steps(found.report, place, settings, 1.0, lambda *_: 1.0)
    measure_first(found.report, place, FirstSettings(SMALL), lambda: torch.cuda.mem_get_info()[0])
    assert found.failed == []


@pytest.mark.ucx
def test_weights_come_from_the_host_and_from_another_process(place: EnginePlace, found: Found) -> None:
    measure_loads(found.report, place, LoadSettings(SMALL, rounds=1, peer_spec=SMALL, chunks=(8 << 20, 64 << 20)))
    assert found.failed == []
    assert [name for name in found.off if "differ" in name] == []


@pytest.mark.ucx
def test_kv_moves_to_another_process(place: EnginePlace, found: Found) -> None:
    measure_pair(found.report, place, PairSettings(SMALL, prompt_tokens=(17, 500), output_tokens=16))
    assert found.failed == found.off == []
