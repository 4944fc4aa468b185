"""The product's engine as rows have it: by itself on a GPU, with weights made on the spot, and no bus.

Rows take where they run and how much they do as arguments, so that tests run all of them on a CPU with a tiny model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from bench.gpu.attention import HEAD_DIM, KV_HEADS, QUERY_HEADS, use_folder
from bench.gpu.decode import HIDDEN, INNER, NUM_LAYERS, VOCABULARY
from services.worker.device.completion import waited
from services.worker.device.device import Device
from services.worker.engine.base import Engine
from services.worker.engine.kv_pool import KvPool, kv_pool_bytes
from services.worker.engine.torch_engine import TorchEngine
from services.worker.memory.arena import Arena
from shared.layout import ArenaLayout, Unit, layout_of
from shared.model_spec import ModelSpec

BLOCK_SIZE = 16
LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_layers=NUM_LAYERS,
    num_heads=QUERY_HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_position=16_384,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
)
PlaceKind = Literal["cuda", "cpu"]
EngineT = TypeVar("EngineT", bound=TorchEngine)


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """What engines run on, and by which attention."""

    kind: PlaceKind
    device: Device
    attention: str

    def run(self, work: Callable[[], object]) -> float:
        """Seconds that the device takes for ``work``, which is done when this returns."""
        completion = self.device.streams.compute.run(torch.inference_mode()(work))
        waited(completion)
        return completion.device_s


def place_of(kind: PlaceKind, folder: Path) -> EnginePlace:
    """The first GPU, or the CPU. Kernels are compiled into the folder."""
    if kind == "cpu":
        from services.worker.device.host import HOST

        return EnginePlace(kind, HOST, "torch_cpu")
    use_folder(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    from services.worker.device.cuda.device import cuda_device

    return EnginePlace(kind, cuda_device(), "flashinfer")


def fill(arena: Arena, layout: ArenaLayout, unit: Unit, place: EnginePlace, seed: int) -> None:
    """Random weights of one unit, such that numbers stay of the order of one from layer to layer. The same for a seed
    on devices of a kind; nothing between tensors."""

    def draw() -> None:
        generator = torch.Generator(place.device.tensors.device).manual_seed(1000 * seed + unit.offset // 4096)
        for slot in unit.slots:
            weights = arena.tensor(slot, layout.spec.dtype)
            if len(slot.shape) == 1:
                weights.fill_(1.0)
            else:
                weights.normal_(0.0, slot.shape[-1] ** -0.5, generator=generator)

    place.run(draw)


def random_arena(spec: ModelSpec, place: EnginePlace, *, seed: int = 0) -> tuple[ArenaLayout, Arena]:
    """All weights of a model."""
    layout = layout_of(spec)
    arena = Arena(place.device.allocate(layout.num_bytes))
    for unit in layout.units:
        fill(arena, layout, unit, place, seed)
    return layout, arena


def engine_over(layout: ArenaLayout, arena: Arena, place: EnginePlace, num_blocks: int) -> TorchEngine:
    """With KV of its own."""
    return engine_as(TorchEngine, layout, arena, place, num_blocks)


def engine_as(
    engine_type: type[EngineT], layout: ArenaLayout, arena: Arena, place: EnginePlace, num_blocks: int
) -> EngineT:
    """As ``engine_over``, of a type that observes it."""
    pool = KvPool(place.device.allocate(kv_pool_bytes(layout, BLOCK_SIZE, num_blocks)))
    return engine_type(
        layout,
        arena,
        pool,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        attention=place.attention,
        device=place.device,
    )


def blocks_for(num_tokens: int, num_requests: int) -> int:
    """KV blocks of requests of so many tokens each, with one to spare for each."""
    return num_requests * (-(-num_tokens // BLOCK_SIZE) + 1)


def rehearse(engine: Engine) -> list[float]:
    """All that it wants to rehearse now, while nothing else runs: the seconds of each."""
    taken: list[float] = []
    while True:
        begin_s = time.perf_counter()
        begun = engine.rehearse()
        if begun is None:
            return taken
        waited(begun)
        taken.append(time.perf_counter() - begin_s)
