"""The engines that there are, by the name that a worker's configuration, its registration and profiles give.

What an engine is made of is imported when it is made, or by a process that has it at its start: PyTorch takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.worker.engine.attention.kinds import ATTENTION, BY_DEVICE
from services.worker.engine.mock.settings import MockFaults, MockTiming
from shared.engines import NO_ENGINE, offer_of
from shared.errors import BadRequest, Conflict
from shared.model_spec import DTYPE_BYTES
from shared.models.families import FAMILIES

if TYPE_CHECKING:
    from services.worker.device.device import Device
    from services.worker.engine.base import Engine
    from services.worker.engine.kv_pool import KvPool
    from services.worker.memory.arena import Arena
    from shared.layout import ArenaLayout
    from shared.profile import Profile

DEFAULT_ENGINE = "torch"
MOCK_KV_BYTES = 24
"""Least that the mock's KV takes per token and layer, however small the model is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of."""

    layout: ArenaLayout
    arena: Arena
    kv: KvPool
    device: Device
    num_blocks: int
    block_size: int
    attention: str = BY_DEVICE
    profile: Profile | None = None
    """What the mock plays, where ``timing`` says nothing."""
    timing: MockTiming = field(default_factory=MockTiming)
    faults: MockFaults = field(default_factory=MockFaults)


def _nothing(_num_threads: int) -> None:
    pass


def _warms_nothing(_device: Device) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """One of them."""

    make: Callable[[EngineParts], Engine]
    """Bound to the places where the weights are or will be."""
    devices: Mapping[str, Callable[[], Device]]
    """Those that it runs on in this version. One that computes nothing has the host's memory everywhere."""
    modules: tuple[str, ...] = ()
    """Modules that take long to import: a process does it at its start, not in the middle of the first load."""
    set_threads: Callable[[int], None] = _nothing
    """Of this process."""
    warm_up: Callable[[Device], object] = _warms_nothing
    """What a process computes once, before the first request could wait for it."""
    has_grammars: bool = False
    """Whether it keeps outputs to a grammar."""
    scores_prompts: bool = False
    """Whether it gives log-probabilities of prompts."""
    uses_kv_memory: bool = True
    """Whether its KV is in the worker's pool. Else that is only counted."""


def engine_kind(name: str) -> EngineKind:
    """Raises ``BadRequest`` for one that there is not."""
    kind = ENGINES.get(name)
    if kind is None:
        raise BadRequest(f"there is no engine {name!r}, but {', '.join(ENGINES)}")
    return kind


def check_device(engine: str, device: str, option: str) -> None:
    """Raises ``BadRequest`` where this engine does not run. ``option``: that which says where."""
    devices = engine_kind(engine).devices
    if device not in devices:
        raise BadRequest(f"{option}: in this version the {engine} engine runs on {' and '.join(devices)} only")


def device_of(engine: str, device: str) -> Device:
    """That device, for this engine. One is made for a worker's life. Raises as ``check_device`` does."""
    check_device(engine, device, f"device {device}")
    return engine_kind(engine).devices[device]()


def _host() -> Device:
    from services.worker.device.host import HOST

    return HOST


def _cuda() -> Device:
    from services.worker.device.cuda.device import cuda_device

    return cuda_device()


def _make_torch(parts: EngineParts) -> Engine:
    from services.worker.engine.torch_engine import TorchEngine

    return TorchEngine(
        parts.layout,
        parts.arena,
        parts.kv,
        num_blocks=parts.num_blocks,
        block_size=parts.block_size,
        attention=parts.attention,
        device=parts.device,
    )


def _set_torch_threads(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)


def _warm_up_torch(device: Device) -> None:
    from services.worker.engine import warm_up

    warm_up.warm_up(device)


def _make_mock(parts: EngineParts) -> Engine:
    from services.worker.engine.mock.mock_engine import MockEngine

    spec, num_layers = parts.layout.spec, parts.layout.num_layers
    return MockEngine(
        num_layers=num_layers,
        num_blocks=parts.num_blocks,
        block_size=parts.block_size,
        vocab_size=spec.vocab_size,
        timing=parts.timing,
        profile=parts.profile,
        device=parts.device,
        faults=parts.faults,
        hidden_bytes_per_token=spec.hidden_size * DTYPE_BYTES[spec.dtype],
        kv_bytes_per_token_layer=max(MOCK_KV_BYTES, spec.kv_bytes_per_token // num_layers),
    )


def _make_none(_parts: EngineParts) -> Engine:
    raise Conflict(f"this worker does not offer {offer_of('')}")


ENGINES = {
    "torch": EngineKind(
        make=_make_torch,
        devices={"cpu": _host, "cuda": _cuda},
        modules=(
            "torch",
            "services.worker.engine.warm_up",
            "services.worker.engine.grammar.guidance",
            *(f"services.worker.engine.attention.{name}" for name in ATTENTION),
            *(f"services.worker.engine.models.{family.name}" for family in FAMILIES),
        ),
        set_threads=_set_torch_threads,
        warm_up=_warm_up_torch,
        has_grammars=True,
        scores_prompts=True,
    ),
    "mock": EngineKind(
        make=_make_mock,
        devices={"cpu": _host, "cuda": _host},
        modules=("services.worker.engine.mock.mock_engine",),
        scores_prompts=True,
        uses_kv_memory=False,
    ),
    NO_ENGINE: EngineKind(make=_make_none, devices={"cpu": _host}, uses_kv_memory=False),
}
