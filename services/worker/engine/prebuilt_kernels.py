"""FlashInfer's kernels that the engine calls, by the names of their modules, and which of them are not there.

FlashInfer compiles a module when it is first asked for it: minutes, and a compiler that no image should need. So they
are built before (``python -m compose.kernels``), and workers run with ``FLASHINFER_DISABLE_JIT=1``. FlashInfer then
loads ``FOLDER/NAME/NAME.so``, whatever GPU and whichever FlashInfer that was built for; that stands beside it, in
``built.json``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shared.errors import BadRequest

DTYPES = {"bfloat16": "bf16", "float16": "f16"}
"""Of queries, of KV and of what comes out: as the product names them, and FlashInfer in names of modules."""
BACKENDS = ("fa2", "fa3")
"""``fa2`` runs on every GPU from compute capability 8.0 on; ``fa3`` on 9.0 alone."""
SHARED_KERNELS = ("silu_and_mul", "rope")
"""Of every model, in all dtypes; what compiles soonest comes first."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """The module of paged attention, of prompts as of decoding on tensor cores: page numbers in int32, K and V of equal
    strides, positions encoded before. Raises ``BadRequest`` for a dtype or backend of which FlashInfer has none."""

    dtype: str
    head_dim: int
    sliding_window: bool
    backend: str = "fa2"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BadRequest(f"FlashInfer attends in {' and '.join(DTYPES)}, not in {self.dtype!r}", param="dtype")
        if self.backend not in BACKENDS:
            raise BadRequest(f"no such backend: {self.backend!r}, but {', '.join(BACKENDS)}", param="backend")

    @property
    def name(self) -> str:
        of, dim = DTYPES[self.dtype], self.head_dim
        return (
            f"batch_prefill_with_kv_cache_dtype_q_{of}_dtype_kv_{of}_dtype_o_{of}_dtype_idx_i32"
            f"_head_dim_qk_{dim}_head_dim_vo_{dim}_posenc_0_use_swa_{self.sliding_window}_use_logits_cap_False"
            f"_f16qk_False{'_kv_stride_equal' if self.backend == 'fa2' else '_sm90'}"
        )


@dataclass(frozen=True, slots=True)
class BuiltFor:
    """What a module was built for, and with."""

    capabilities: tuple[str, ...]
    """As compilers name them: ``8.0``, ``9.0a``, ``12.0f``."""
    flashinfer: str
    cuda: str

    def write(self, folder: Path) -> None:
        (folder / "built.json").write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return any(_runs_on(one, capability) for one in self.capabilities)


def is_capability(text: str) -> bool:
    """Whether it is one as compilers name them."""
    return re.fullmatch(r"[0-9]{1,3}\.[0-9][af]?", text) is not None


def _runs_on(built_for: str, capability: tuple[int, int]) -> bool:
    """Code for 8.0 runs on 8.6 and 8.9 too, as does a family's (``f``) on its later members; ``a`` is for one alone."""
    major, minor = (int(part) for part in built_for.rstrip("af").split("."))
    if built_for.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def built_for(folder: Path, name: str) -> BuiltFor | None:
    """None if the module ``name`` is not in ``folder``, or nothing there says what it was built for."""
    if not (folder / name / f"{name}.so").is_file():
        return None
    try:
        found = json.loads((folder / name / "built.json").read_text(encoding="utf-8"))
        built = BuiltFor(tuple(found["capabilities"]), str(found["flashinfer"]), str(found["cuda"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return built if all(isinstance(one, str) and is_capability(one) for one in built.capabilities) else None


@dataclass(frozen=True, slots=True)
class InstalledFlashInfer:
    version: str
    kernels: Path
    """Where it looks for modules that were built before."""


def installed_flashinfer() -> InstalledFlashInfer | None:
    """None where there is none. Imports nothing of it."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return None
    version = importlib.metadata.version("flashinfer-python")
    return InstalledFlashInfer(version, Path(spec.origin).parent / "data" / "aot")


def missing_kernels(
    installed: InstalledFlashInfer, capability: tuple[int, int], attention: Sequence[AttentionKernel]
) -> tuple[str, ...]:
    """Names of the modules that are not there, of ``attention`` and of ``SHARED_KERNELS``, for a GPU of this compute
    capability and the FlashInfer that is installed."""
    return tuple(
        name
        for name in (*SHARED_KERNELS, *(kernel.name for kernel in attention))
        if (built := built_for(installed.kernels, name)) is None
        or built.flashinfer != installed.version
        or not built.runs_on(capability)
    )
