"""What is checked before anything starts, so that a refusal is one line and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from compose.config import StackConfig
from compose.errors import StackRefused
from compose.ports import require_free
from shared.checkpoint import inspect_checkpoint
from shared.errors import BadCheckpoint

_CUDA_PROBE_S = 60.0
_CUDA_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def model_names(models: tuple[Path, ...]) -> Mapping[str, Path]:
    """Directories by the name they are served under, which is their own.

    Raises ``StackRefused`` for a path that is no directory and for two of one name.
    """
    named: dict[str, Path] = {}
    for given in models:
        path = given.expanduser().resolve()
        if not path.is_dir():
            raise StackRefused(f"{given} is not a directory: give the path of a Hugging Face checkpoint directory")
        if path.name in named and named[path.name] != path:
            raise StackRefused(f"{named[path.name]} and {path} would both be served as {path.name!r}: rename one")
        named[path.name] = path
    return named


def check_checkpoints(models: tuple[Path, ...]) -> None:
    """Headers and configuration only, weights unread. Raises ``StackRefused`` naming file and tensor."""
    for path in model_names(models).values():
        try:
            inspect_checkpoint(path, with_hash=False)
        except BadCheckpoint as error:
            raise StackRefused(f"{path} cannot be served: {error.message}") from error


def num_cuda_devices() -> int:
    """CUDA devices that torch can use; asked in a process of its own, so that this one stays small.

    Raises ``StackRefused`` where there is none or no torch.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _CUDA_PROBE], capture_output=True, text=True, timeout=_CUDA_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StackRefused(f"--device cuda: torch did not answer within {_CUDA_PROBE_S:g} s") from error
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise StackRefused(f"--device cuda: torch cannot be used: {reason}")
    devices = int(answer.stdout.strip() or 0)
    if devices < 1:
        raise StackRefused("--device cuda: torch finds no CUDA device here; use --device cpu")
    return devices


def check(config: StackConfig) -> int:
    """Everything that can be refused early; gives the number of CUDA devices (0 with ``--device cpu``)."""
    check_checkpoints(config.models)
    if config.port:
        require_free(config.host, config.port, "--port")
    if config.nats_port:
        require_free("127.0.0.1", config.nats_port, "another NATS port")
    return num_cuda_devices() if config.device == "cuda" and config.engine == "torch" else 0
