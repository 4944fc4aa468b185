"""The worker's settings, read from the environment once."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from services.worker.engine.mock.settings import MockFaults, MockTiming
from shared.messages.common import Device
from shared.service import ServiceConfig, health_settings, process_settings, profiles_path
from shared.settings import Settings, SettingsError

MIB = 1024 * 1024
MAX_MIB = 1 << 32
"""Beyond what addresses can name."""
DEFAULT_LEAF = "leaf-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """See ``docs/configuration.md`` for every variable."""

    worker_id: str
    host: str
    device: Device
    engine: Literal["torch", "mock"]
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
    host_cache_bytes: int
    """Host memory offered for host copies; 0: none."""
    report_interval_s: float
    load_by_host: bool
    stall_s: float
    clock_skew_s: float
    profiles: Path | None
    mock: MockTiming
    mock_faults: MockFaults

    @property
    def log_name(self) -> str:
        return self.worker_id

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> WorkerConfig:
        """Raises ``SettingsError`` naming the variable and its value."""
        env = Settings(environ)
        host = env.text("BLITZ_WORKER_HOST", default=socket.gethostname())
        device = env.choice("BLITZ_WORKER_DEVICE", ("cpu", "cuda"), default="cpu")
        engine = env.choice("BLITZ_WORKER_ENGINE", ("torch", "mock"), default="torch")
        scratch = env.text("BLITZ_WORKER_SCRATCH_DIR", default="")
        arena_mib = env.integer("BLITZ_WORKER_ARENA_MIB", default=8192, minimum=1, maximum=MAX_MIB)
        max_batch_tokens = env.integer("BLITZ_WORKER_MAX_BATCH_TOKENS", default=2048, minimum=1)
        return cls(
            **process_settings(env),
            **health_settings(env),
            worker_id=_worker_id(env),
            host=host,
            device=cast(Device, device),
            engine=cast(Literal["torch", "mock"], engine),
            num_threads=env.integer("BLITZ_WORKER_THREADS", default=_share_of_cores(env), minimum=1, maximum=1024),
            arena_bytes=arena_mib * MIB,
            prefault_bytes=env.integer("BLITZ_WORKER_PREFAULT_MIB", default=0, minimum=0, maximum=MAX_MIB) * MIB,
            kv_bytes=env.integer("BLITZ_WORKER_KV_MIB", default=1024, minimum=1, maximum=MAX_MIB) * MIB,
            block_size=env.integer("BLITZ_WORKER_BLOCK_SIZE", default=16, minimum=1),
            max_running_requests=env.integer("BLITZ_WORKER_MAX_RUNNING", default=128, minimum=1),
            max_batch_tokens=max_batch_tokens,
            prefill_chunk_tokens=env.integer("BLITZ_WORKER_PREFILL_CHUNK", default=512, minimum=1),
            slo_tbt_s=env.number("BLITZ_WORKER_SLO_TBT_MS", default=100.0, minimum=0.0) / 1000,
            max_queued_requests=env.integer("BLITZ_WORKER_MAX_QUEUED", default=1024, minimum=1),
            max_queued_tokens=env.integer("BLITZ_WORKER_MAX_QUEUED_TOKENS", default=4 * max_batch_tokens, minimum=1),
            leaf=env.text("BLITZ_WORKER_LEAF", default=DEFAULT_LEAF),
            nic=_interface_name(env, "BLITZ_WORKER_NIC"),
            nic_gbps=_bandwidth(env, "BLITZ_WORKER_NIC_GBPS"),
            scale_up_domain=env.text("BLITZ_WORKER_SCALE_UP_DOMAIN", default=""),
            scale_up_gbps=_bandwidth(env, "BLITZ_WORKER_SCALE_UP_GBPS"),
            host_link_gbps=_bandwidth(env, "BLITZ_WORKER_HOST_LINK_GBPS"),
            ssd_gbps=_bandwidth(env, "BLITZ_WORKER_SSD_GBPS"),
            limit_reads=env.boolean("BLITZ_WORKER_LIMIT_READS", default=False),
            scratch_dir=Path(scratch) if scratch else None,
            visible_gpu=env.text("CUDA_VISIBLE_DEVICES", default="").split(",")[0].strip(),
            host_cache_bytes=env.integer("BLITZ_WORKER_HOST_CACHE_MIB", default=arena_mib, minimum=0, maximum=MAX_MIB)
            * MIB,
            load_by_host=env.boolean("BLITZ_WORKER_LOAD_BY_HOST", default=True),
            report_interval_s=env.number("BLITZ_WORKER_REPORT_INTERVAL_S", default=0.1, minimum=0.01),
            stall_s=env.number("BLITZ_WORKER_STALL_S", default=5.0, minimum=0.1),
            clock_skew_s=env.number("BLITZ_WORKER_CLOCK_SKEW_S", default=1.0, minimum=0.1),
            drain_timeout_s=env.number("BLITZ_WORKER_DRAIN_TIMEOUT_S", default=30.0, minimum=0.0),
            profiles=profiles_path(env),
            mock=MockTiming(
                layer_base_s=env.number("BLITZ_MOCK_LAYER_BASE_MS", default=0.0, minimum=0.0) / 1000,
                layer_per_token_s=env.number("BLITZ_MOCK_LAYER_PER_TOKEN_US", default=0.0, minimum=0.0) / 1e6,
                step_overhead_s=env.number("BLITZ_MOCK_STEP_MS", default=0.0, minimum=0.0) / 1000,
            ),
            mock_faults=MockFaults(
                raise_token=_token_id(env, "BLITZ_MOCK_RAISE_TOKEN"), kill_token=_token_id(env, "BLITZ_MOCK_KILL_TOKEN")
            ),
        )


def _share_of_cores(env: Settings) -> int:
    """Of the cores that this process may use, which the workers of this host share."""
    sharers = env.integer("BLITZ_WORKERS_PER_HOST", default=1, minimum=1)
    return max(1, len(os.sched_getaffinity(0)) // sharers)


def _token_id(env: Settings, key: str) -> int | None:
    """None if unset."""
    return env.integer(key, minimum=0) if env.text(key, default="") else None


def _bandwidth(env: Settings, key: str) -> float | None:
    """Gb/s; None if unset."""
    return env.number(key, minimum=0.001) if env.text(key, default="") else None


def _interface_name(env: Settings, key: str) -> str:
    """As the kernel names interfaces; empty if unset."""
    name = env.text(key, default="")
    if "/" in name or any(c.isspace() for c in name):
        raise SettingsError(f"{key}={name!r}: must be the name of a network interface or RDMA device", param=key)
    return name


def _worker_id(env: Settings) -> str:
    worker_id = env.text("BLITZ_WORKER_ID", default=f"worker-{_subject_safe(socket.gethostname())}")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", worker_id):
        raise SettingsError(
            f"BLITZ_WORKER_ID={worker_id!r}: use up to 128 letters, digits, '-' and '_'", param="BLITZ_WORKER_ID"
        )
    return worker_id


def _subject_safe(name: str) -> str:
    return "".join(c if (c.isascii() and c.isalnum()) or c in "-_" else "-" for c in name)
