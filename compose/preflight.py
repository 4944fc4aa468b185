"""What is checked before anything starts, so that a refusal is one line and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from compose.config import HEALTH_PORT_VARIABLE, StackConfig
from compose.errors import StackRefused
from compose.gpus import check_gpus, gpus_here
from compose.ports import require_free
from services.worker.engine.kinds import check_device
from shared.checkpoint import inspect_checkpoint, is_directory
from shared.errors import BadCheckpoint, BadProfile, BadRequest
from shared.messages.common import SERVED_BY
from shared.profile import read_profile


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


@dataclass(frozen=True, slots=True)
class Findings:
    """What the checks learned about models and machine."""

    prefault_bytes: int
    """Of each worker's arena to commit at start: what the largest model needs, where memory is plenty."""
    gpus: tuple[str, ...] = ()
    """Of this machine, where workers run on them."""


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


def _check_engine(config: StackConfig) -> None:
    try:
        check_device(config.engine, config.device, f"--device {config.device}")
    except BadRequest as error:
        raise StackRefused(error.message) from error


def check(config: StackConfig) -> Findings:
    """Everything that can be refused early. Raises ``StackRefused``, ``BadProfile``."""
    _check_engine(config)
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
    gpus = gpus_here() if config.device == "cuda" else ()
    if config.device == "cuda":
        try:
            check_gpus(config.engine, gpus)
        except BadRequest as error:
            raise StackRefused(error.message) from error
    return Findings(prefault_bytes=largest if plenty else 0, gpus=gpus)
