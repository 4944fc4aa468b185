"""The worker's settings, read from the environment once."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, cast

from services.worker.device.late import LateOrder, LateTiming
from services.worker.engine.attention.kinds import ATTENTION, BY_DEVICE
from services.worker.engine.kinds import DEFAULT_ENGINE, ENGINES
from services.worker.engine.late.failures import LateFailures
from services.worker.engine.late.settings import LateSettings
from services.worker.engine.mock.settings import MockFaults, MockTiming
from shared.cgroup import num_cores
from shared.engines import NO_ENGINE, OTHERS
from shared.service import ServiceConfig, health_settings, process_settings, profiles_path
from shared.settings import Settings, SettingsError

MIB = 1024 * 1024
MAX_MIB = 1 << 32
"""Beyond what addresses can name."""
DEFAULT_LEAF = "leaf-0"
WarmStage = Literal["none", "imported", "started"]
_WARM_STAGES: tuple[WarmStage, ...] = ("none", "imported", "started")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    worker_id: str
    host: str
    device: str
    engine: str
    engines: tuple[str, ...]
    """Of others, that it offers (``shared.engines``)."""
    vllm_python: Path | None
    vllm_warm: WarmStage
    """Interpreter of vLLM's environment; None: it is not offered."""
    attention: str
    num_threads: int
    arena_bytes: int
    prefault_bytes: int
    kv_bytes: int
    block_size: int
    max_running_requests: int
    max_batch_tokens: int
    prefill_chunk_tokens: int
    slo_tbt_s: float
    """Of models without an objective of their own for the time between two tokens. 0: none."""
    max_queued_requests: int
    max_queued_tokens: int
    leaf: str
    nic: str
    """Name of the interface or RDMA port. Empty: found."""
    nic_gbps: float | None
    """Of this and the next: None or empty is found, measured, or stays unknown."""
    scale_up_domain: str
    scale_up_gbps: float | None
    host_link_gbps: float | None
    ssd_gbps: float | None
    limit_reads: bool
    """Whether reads from disk and from the host's memory go no faster than these two say, where they are set."""
    scratch_dir: Path | None
    """Where the disk may be measured. None: it is not."""
    visible_gpu: str
    """The GPU of this worker, as CUDA_VISIBLE_DEVICES lists it: index or UUID. Empty: the first."""
    gpu_claims: Path
    """Where the workers of this host note what they claim of their GPUs' memory."""
    host_cache_bytes: int
    """Host memory offered for host copies; 0: none."""
    report_interval_s: float
    stall_s: float
    clock_skew_s: float
    profiles: Path | None
    mock: MockTiming
    mock_faults: MockFaults
    mock_gpu: str
    """The model of GPU that the mock engine stands for. Empty: none."""
    late: LateSettings | None
    """The engine computes later than it is called. None: as it does by itself."""

    @property
    def log_name(self) -> str:
        return self.worker_id

    @classmethod
    def read(cls, env: Settings) -> Self:
        """Raises ``SettingsError``."""
        arena_mib = env.integer(
            "BLITZ_WORKER_ARENA_MIB",
            "Address space for weights: the largest model that this worker can hold. Pages are committed when written.",
            default=8192,
            minimum=1,
            maximum=MAX_MIB,
        )
        device = env.choice(
            "BLITZ_WORKER_DEVICE",
            "`cuda`: an [NVIDIA GPU](../gpu.md). Written, and not yet run on one.",
            ("cpu", "cuda"),
            default="cpu",
        )
        on_gpu = device == "cuda"
        engine = env.choice(
            "BLITZ_WORKER_ENGINE",
            "`mock` invents tokens and takes the times of `BLITZ_MOCK_*`, for tests and benchmarks. `none`: only those "
            "of `BLITZ_WORKER_ENGINES`; PyTorch is not needed.",
            tuple(ENGINES),
            default=DEFAULT_ENGINE,
        )
        engines = _engines(env, engine, on_gpu)
        max_batch_tokens = env.integer(
            "BLITZ_WORKER_MAX_BATCH_TOKENS",
            "Tokens per engine step.",
            default=8192 if on_gpu else 2048,
            minimum=1,
            shown="2048; 8192 on a GPU",
        )
        return cls(
            **process_settings(env),
            **health_settings(env),
            worker_id=_worker_id(env),
            host=env.text(
                "BLITZ_WORKER_HOST",
                "Workers with the same value share memory (UCX without error handling): those of one container or "
                "machine, and no others.",
                default=socket.gethostname(),
                shown="host name",
            ),
            device=device,
            engine=engine,
            engines=engines,
            vllm_python=_vllm_python(env, engines),
            vllm_warm=env.choice(
                "BLITZ_VLLM_WARM",
                "How far processes of vLLM that wait for their next instance may be: `imported`, one for any model, "
                "some 0.5 GiB; `started`, besides, that of the instance before, with its weights and KV, until the "
                "worker gets another model, or the host or the container has less than a tenth of its memory left; or "
                "`none`.",
                _WARM_STAGES,
                default="started",
            ),
            attention=env.choice(
                "BLITZ_WORKER_ATTENTION",
                "What computes the torch engine's attention. A CPU has `torch_cpu`, a GPU `flashinfer`; `torch_plain` "
                "runs anywhere, slowly.",
                (BY_DEVICE, *ATTENTION),
                default=BY_DEVICE,
            ),
            num_threads=env.integer(
                "BLITZ_WORKER_THREADS",
                "Compute threads of PyTorch. By default the cores that the process may use (affinity mask, and quota "
                "of its control group), divided, rounded down, and at least one.",
                default=_share_of_cores(env),
                minimum=1,
                maximum=1024,
                shown="cores / `BLITZ_WORKERS_PER_HOST`",
            ),
            arena_bytes=arena_mib * MIB,
            prefault_bytes=MIB
            * env.integer(
                "BLITZ_WORKER_PREFAULT_MIB",
                "Part of the arena to commit at start. The first copy into fresh pages is about half as fast.",
                default=0,
                minimum=0,
                maximum=MAX_MIB,
            ),
            kv_bytes=MIB
            * env.integer(
                "BLITZ_WORKER_KV_MIB",
                "KV cache. The torch engine commits 64 MiB while the worker is spare, and more with use.",
                default=1024,
                minimum=1,
                maximum=MAX_MIB,
            ),
            block_size=env.integer("BLITZ_WORKER_BLOCK_SIZE", "Tokens per KV block.", default=16, minimum=1),
            max_running_requests=env.integer(
                "BLITZ_WORKER_MAX_RUNNING", "Requests that run at once.", default=128, minimum=1
            ),
            max_batch_tokens=max_batch_tokens,
            prefill_chunk_tokens=env.integer(
                "BLITZ_WORKER_PREFILL_CHUNK",
                "Prompt tokens of one request per engine step at most; in live scaling, of one layer.",
                default=2048 if on_gpu else 512,
                minimum=1,
                shown="512; 2048 on a GPU",
            ),
            slo_tbt_s=env.number(
                "BLITZ_WORKER_SLO_TBT_MS",
                "TBT objective of models without one of their own. A step in which requests decode takes only as many "
                "prompt tokens as it leaves, a tenth of it at least; a step of prompts alone is not limited. 0: none.",
                default=100.0,
                minimum=0.0,
            )
            / 1000,
            max_queued_requests=env.integer(
                "BLITZ_WORKER_MAX_QUEUED", "Requests that may wait inside the worker.", default=1024, minimum=1
            ),
            max_queued_tokens=env.integer(
                "BLITZ_WORKER_MAX_QUEUED_TOKENS",
                "Prompt tokens that may wait inside the worker.",
                default=4 * max_batch_tokens,
                minimum=1,
                shown="4 · `BLITZ_WORKER_MAX_BATCH_TOKENS`",
            ),
            leaf=env.text(
                "BLITZ_WORKER_LEAF",
                "Name of the switch that the NIC is on. The planner prefers sources and targets of one leaf, and their "
                "workers connect in advance.",
                default=DEFAULT_LEAF,
            ),
            nic=_interface_name(env),
            nic_gbps=_bandwidth(
                env,
                "BLITZ_WORKER_NIC_GBPS",
                "Bandwidth of the NIC, which plans use. Found: what the kernel reports; virtual machines and "
                "containers report nothing reliable, so set it there.",
                shown="found, else `10`",
            ),
            scale_up_domain=env.text(
                "BLITZ_WORKER_SCALE_UP_DOMAIN",
                "Workers with the same value are joined by a scale-up network (NVLink). Found: GPUs of one host that "
                "NVML shows as connected.",
                default="",
                shown="found, else none",
            ),
            scale_up_gbps=_bandwidth(
                env,
                "BLITZ_WORKER_SCALE_UP_GBPS",
                "Bandwidth of the worker in that network, per direction. Found: the sum of its active NVLinks.",
                shown="found, else unknown",
            ),
            host_link_gbps=_bandwidth(
                env,
                "BLITZ_WORKER_HOST_LINK_GBPS",
                "Bandwidth between the worker and its host's memory, per direction. GPU: from its PCIe link. CPU: from "
                "a memory copy at start (about 0.1 s, 128 MiB).",
                shown="found or measured",
            ),
            ssd_gbps=_bandwidth(
                env,
                "BLITZ_WORKER_SSD_GBPS",
                "Bandwidth of reading checkpoints from the disk.",
                shown="measured, else unknown",
            ),
            limit_reads=env.boolean(
                "BLITZ_WORKER_LIMIT_READS",
                "Reads from the disk and from the host's memory go no faster than `BLITZ_WORKER_SSD_GBPS` and "
                "`BLITZ_WORKER_HOST_LINK_GBPS` say, where these are set. For benchmarks.",
                default=False,
            ),
            scratch_dir=_scratch_dir(env),
            visible_gpu=env.text(
                "CUDA_VISIBLE_DEVICES",
                "The worker's GPU: the first in this list, by index or UUID. The others are those that it reaches "
                "directly: list all of the host.",
                default="",
                shown="the first",
            )
            .split(",")[0]
            .strip(),
            gpu_claims=Path(
                env.text(
                    "BLITZ_WORKER_GPU_CLAIMS",
                    "Directory where the workers of this host note what they claim of their GPUs' memory, so that no "
                    "two take the same. Containers that share a GPU share it.",
                    default=f"/tmp/blitzscale-gpus-{os.geteuid()}",
                    shown="`/tmp/blitzscale-gpus-UID`",
                )
            ),
            host_cache_bytes=MIB
            * env.integer(
                "BLITZ_WORKER_HOST_CACHE_MIB",
                "Host memory that this worker offers for copies of models. 0: none.",
                default=arena_mib,
                minimum=0,
                maximum=MAX_MIB,
                shown="`BLITZ_WORKER_ARENA_MIB`",
            ),
            report_interval_s=env.number(
                "BLITZ_WORKER_REPORT_INTERVAL_S",
                "Time between two load reports; the same for all workers of a host.",
                default=0.1,
                minimum=0.01,
            ),
            stall_s=env.number(
                "BLITZ_WORKER_STALL_S",
                "A transfer that moves no byte for this long fails.",
                default=5.0,
                minimum=0.1,
            ),
            clock_skew_s=env.number(
                "BLITZ_WORKER_CLOCK_SKEW_S",
                "By so much the host's time of day may differ from the pool's before the worker warns and "
                "`blitzscale status` shows it. It decides nothing.",
                default=1.0,
                minimum=0.1,
            ),
            drain_timeout_s=env.number(
                "BLITZ_WORKER_DRAIN_TIMEOUT_S",
                "Time after SIGTERM in which requests may finish and other workers take over the last copies of "
                "models. Requests that are left continue elsewhere.",
                default=30.0,
                minimum=0.0,
            ),
            profiles=profiles_path(env),
            mock=MockTiming(
                layer_base_s=env.number(
                    "BLITZ_MOCK_LAYER_BASE_MS",
                    "Mock engine: time per layer and step. With this and the next two 0, a profile of the model says "
                    "how long batches take.",
                    default=0.0,
                    minimum=0.0,
                )
                / 1000,
                layer_per_token_s=env.number(
                    "BLITZ_MOCK_LAYER_PER_TOKEN_US",
                    "Mock engine: time per layer and token.",
                    default=0.0,
                    minimum=0.0,
                )
                / 1e6,
                step_overhead_s=env.number(
                    "BLITZ_MOCK_STEP_MS", "Mock engine: time per step.", default=0.0, minimum=0.0
                )
                / 1000,
            ),
            mock_faults=MockFaults(
                raise_token=env.integer_or_none(
                    "BLITZ_MOCK_RAISE_TOKEN", "Mock engine: a token id on which its layers raise.", minimum=0
                ),
                kill_token=env.integer_or_none(
                    "BLITZ_MOCK_KILL_TOKEN", "Mock engine: a token id on which its process dies.", minimum=0
                ),
            ),
            mock_gpu=env.text(
                "BLITZ_MOCK_GPU",
                "Mock engine: the model of GPU that it stands for (`NVIDIA H100 80GB HBM3`); it plays profiles of that "
                "one only.",
                default="",
                shown="any",
            ),
            late=_late(env),
        )


def _engines(env: Settings, own: str, on_gpu: bool) -> tuple[str, ...]:
    key = "BLITZ_WORKER_ENGINES"
    engines = env.listing(
        key,
        "Engines of others that this worker offers beside its own to models that ask for one: `vllm`. Models of an "
        "engine get instances only on workers that offer it.",
        default=(),
    )
    for name in engines:
        if name not in OTHERS:
            raise SettingsError(f"{key}={name!r:.200}: there is no such engine, but {', '.join(OTHERS)}", param=key)
    if engines and on_gpu:
        raise SettingsError(f"{key}: in this version engines of others are for BLITZ_WORKER_DEVICE=cpu only", param=key)
    if own == NO_ENGINE and not engines:
        raise SettingsError(f"BLITZ_WORKER_ENGINE={NO_ENGINE}: name another engine in {key}", param=key)
    return tuple(dict.fromkeys(engines))


def _vllm_python(env: Settings, engines: tuple[str, ...]) -> Path | None:
    key = "BLITZ_VLLM_PYTHON"
    path = env.text(
        key,
        "Python interpreter of the environment that vLLM is installed in. Needed where `BLITZ_WORKER_ENGINES` has "
        "`vllm`.",
        default="",
        shown="none",
    )
    if "vllm" in engines and not path:
        raise SettingsError(
            f"BLITZ_WORKER_ENGINES has vllm: set {key} to the Python interpreter of vLLM's environment", param=key
        )
    if "vllm" in engines and not (Path(path).is_file() and os.access(path, os.X_OK)):
        raise SettingsError(f"{key}={path}: there is no program", param=key)
    return Path(path) if path else None


def _late(env: Settings) -> LateSettings | None:
    order = env.choice(
        "BLITZ_WORKER_LATE",
        "For tests: the engine computes later than it is called, as a GPU does, and fails calls that did not wait. "
        "Which of its streams goes first is said by this, or drawn by the seed.",
        default="off",
        choices=("off", "copies_first", "copies_last", "drawn"),
    )
    seed = env.integer("BLITZ_WORKER_LATE_SEED", "Of what is drawn in a late engine.", default=0, minimum=0)
    delay_s = env.number("BLITZ_WORKER_LATE_MS", "Late engine: most that an operation waits.", default=0.0, minimum=0.0)
    step_share = env.number(
        "BLITZ_WORKER_LATE_STEP_FAILURES", "Late engine: share of its steps that fail.", default=0.0, minimum=0.0
    )
    if order == "off":
        return None
    return LateSettings(
        timing=LateTiming(order=cast(LateOrder, order), seed=seed, delay_s=delay_s / 1000),
        failures=LateFailures(seed=seed, step_share=step_share),
    )


def _share_of_cores(env: Settings) -> int:
    """Of the cores that this process may use, which the workers of this host share."""
    sharers = env.integer(
        "BLITZ_WORKERS_PER_HOST",
        "Workers that share these cores. Set it, or the threads, where several run on one machine: more threads than "
        "cores make all of them very slow.",
        default=1,
        minimum=1,
    )
    return max(1, num_cores() // sharers)


def _bandwidth(env: Settings, key: str, meaning: str, *, shown: str) -> float | None:
    """Gbit/s; None if unset."""
    return env.number_or_none(key, meaning, minimum=0.001, shown=shown)


def _scratch_dir(env: Settings) -> Path | None:
    path = env.text(
        "BLITZ_WORKER_SCRATCH_DIR",
        "Directory on the disk of the checkpoints, where the worker measures it at start with a file of up to 64 MiB "
        "(about half a second).",
        default="",
        shown="no measurement",
    )
    return Path(path) if path else None


def _interface_name(env: Settings) -> str:
    """As the kernel names interfaces; empty if unset."""
    key = "BLITZ_WORKER_NIC"
    name = env.text(
        key,
        "Network interface (`eth0`) or RDMA device (`mlx5_0`; `mlx5_0:2`: its second port) of the worker's transfers. "
        "Found: an active RDMA port that the process may open, the nearest to the GPU; else the interface of the "
        "default route. Set it where `UCX_NET_DEVICES` or `UCX_TLS` make UCX use another. A name that does not exist "
        "ends the process.",
        default="",
        shown="found",
    )
    if "/" in name or any(c.isspace() for c in name):
        raise SettingsError(f"{key}={name!r}: must be the name of a network interface or RDMA device", param=key)
    return name


def _worker_id(env: Settings) -> str:
    key = "BLITZ_WORKER_ID"
    worker_id = env.text(
        key,
        "Up to 128 letters, digits, `-` and `_`. A worker whose id another one holds ends with exit code 1, so several "
        "workers on one host need different ids.",
        default=f"worker-{_subject_safe(socket.gethostname())}",
        shown="`worker-` and the host name",
    )
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", worker_id):
        raise SettingsError(f"{key}={worker_id!r}: use up to 128 letters, digits, '-' and '_'", param=key)
    return worker_id


def _subject_safe(name: str) -> str:
    return "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "-" for c in name)
