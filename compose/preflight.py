"""What is checked before anything starts, so that a refusal is one line and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from compose.config import HEALTH_PORT_VARIABLE, StackConfig
from compose.errors import StackRefused
from compose.ports import require_free
from shared.checkpoint import inspect_checkpoint, is_directory
from shared.errors import BadCheckpoint, BadProfile
from shared.messages.common import SERVED_BY
from shared.profile import read_profile

CUDA_PROBE_S = 60.0
CUDA_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def model_names(models: tuple[Path, ...]) -> Mapping[str, Path]:
    """Directories by the name they are served under, which is their own.

    Raises ``StackRefused`` for a path that is no directory and for two of one name.
    """
    named: dict[str, Path] = {}
    for given in models:
        path = given.expanduser().resolve()
        try:
            there = is_directory(path)
        except BadCheckpoint as error:
            raise StackRefused(f"{given} cannot be served: {error.message}") from error
        if not there:
            raise StackRefused(f"{given} is not a directory: give the path of a Hugging Face checkpoint directory")
        if path.name in named and named[path.name] != path:
            raise StackRefused(f"{named[path.name]} and {path} would both be served as {path.name!r}: rename one")
        named[path.name] = path
    return named


def largest_checkpoint_bytes(models: tuple[Path, ...]) -> int:
    """Bytes of the largest model's weights in memory; headers and configuration are read, weights are not.

    Raises ``StackRefused`` naming file and tensor.
    """
    largest = 0
    for path in model_names(models).values():
        try:
            largest = max(largest, inspect_checkpoint(path, with_hash=False).layout.num_bytes)
        except BadCheckpoint as error:
            raise StackRefused(f"{path} cannot be served: {error.message}") from error
    return largest


def num_cuda_devices() -> int:
    """CUDA devices that torch can use; asked in a process of its own, so that this one stays small.

    Raises ``StackRefused`` where there is none or no torch.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-c", CUDA_PROBE], capture_output=True, text=True, timeout=CUDA_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StackRefused(f"--device cuda: torch did not answer within {CUDA_PROBE_S:g} s") from error
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise StackRefused(f"--device cuda: torch cannot be used: {reason}")
    devices = int(answer.stdout.strip() or 0)
    if devices < 1:
        raise StackRefused("--device cuda: torch finds no CUDA device here; use --device cpu")
    return devices


@dataclass(frozen=True, slots=True)
class Findings:
    """What the checks learned about models and machine."""

    num_cuda_devices: int
    """0 with ``--device cpu``."""
    prefault_bytes: int
    """Of each worker's arena to commit at start: what the largest model needs, where memory is plenty."""


def check_profiles(config: StackConfig) -> None:
    """Raises ``StackRefused`` for a path where nothing is, and ``BadProfile`` for a single profile that is of none of
    these models, or of other instances. Of those in a directory, services use what fits."""
    path = config.profiles
    if path is None or path.is_dir():
        return
    if not path.exists():
        raise StackRefused(f"--profiles {path}: no such file or directory")
    profile = read_profile(path)
    profile.check(engine=config.engine, device=config.device)
    layouts = {
        name: inspect_checkpoint(folder, with_hash=False).layout.hash
        for name, folder in model_names(config.models).items()
    }
    if layouts and profile.layout_hash not in layouts.values():
        raise BadProfile(f"{path} is of {profile.model}, of another layout than {', '.join(layouts)}")


def check(config: StackConfig) -> Findings:
    """Everything that can be refused early. Raises ``StackRefused``, ``BadProfile``."""
    largest = largest_checkpoint_bytes(config.models)
    check_profiles(config)
    if config.port:
        require_free(config.host, config.port, "--port")
    if config.nats_port:
        require_free("127.0.0.1", config.nats_port, "another NATS port")
    for offset in range(config.num_health_ports):
        require_free("127.0.0.1", config.first_health_port + offset, f"another {HEALTH_PORT_VARIABLE}")
    num_models, each = len(model_names(config.models)), len(SERVED_BY[config.served_as])
    # With a keep-alive they take turns.
    if num_models * each > config.workers and not config.keep_alive_s:
        needs = "a worker each" if each == 1 else f"{each} workers each"
        raise StackRefused(
            f"{num_models} models need {needs}, and there are {config.workers}: give --workers {num_models * each}, "
            "--keep-alive, or fewer models, and then: blitzscale models add DIR --min-instances 0"
        )
    plenty = config.workers * largest <= psutil.virtual_memory().available // 2
    return Findings(
        num_cuda_devices=num_cuda_devices() if config.device == "cuda" and config.engine == "torch" else 0,
        prefault_bytes=largest if plenty else 0,
    )
