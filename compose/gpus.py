"""Which GPUs a host's workers see: all of them, each its own first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.worker.engine.kinds import engine_kind
from services.worker.node.gpu_facts import NvmlFailed, read_driver
from services.worker.node.gpu_links import Nvml, load_nvml
from shared.errors import BadRequest

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def gpus_here(load: Callable[[], Nvml | None] = load_nvml) -> tuple[str, ...]:
    """UUIDs of this machine's GPUs. Empty: none is found."""
    nvml = load()
    if nvml is None:
        return ()
    try:
        return read_driver(nvml).uuids
    except NvmlFailed:
        return ()


def check_gpus(engine: str, gpus: tuple[str, ...]) -> None:
    """Raises ``BadRequest`` where there are none and the engine computes."""
    if not gpus and engine_kind(engine).uses_kv_memory:
        raise BadRequest("--device cuda: no NVIDIA driver and GPU answer on this machine; nvidia-smi must list one")


def own_first(environ: Mapping[str, str], here: tuple[str, ...], index: int) -> dict[str, str]:
    """What worker ``index`` of those with this environment is given: its GPU, then all others, which it reaches
    directly. They are those that the environment lists, else those ``here``. Of more workers than GPUs some share
    one."""
    gpus = here
    if VISIBLE_GPUS in environ:
        gpus = tuple(gpu for entry in environ[VISIBLE_GPUS].split(",") if (gpu := entry.strip()))
    if not gpus:
        return {}
    first = index % len(gpus)
    return {VISIBLE_GPUS: ",".join((*gpus[first:], *gpus[:first]))}
