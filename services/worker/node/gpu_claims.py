"""Who has claimed how much of a GPU's memory, among the workers of a host: files in a directory that they share.

A GPU has a folder there, named by its UUID. In it is ``lock``, and for each worker that runs on the GPU a file with the
bytes that it claims, whose kernel lock it holds for as long as it lives. So a claim ends with its process, however that
ends, and also where process ids mean nothing to each other (containers that share the directory).

Free memory, as the driver tells it, says nothing of a worker that has looked and not allocated yet. Hence who claims
holds ``lock`` until it has allocated (``GpuClaim.allocated``): workers of one GPU start one after the other. What a
worker takes later, in the bounds of its claim, is known by the claim.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from services.worker.config import MIB, WorkerConfig
from services.worker.node.gpu_checks import MADE_BYTES, needed_bytes, too_little
from services.worker.node.gpu_facts import GpuFacts, read_gpu_facts
from services.worker.node.gpu_links import load_nvml
from shared.errors import Unavailable
from shared.settings import SettingsError

WAIT_S = 120.0
"""For the workers of this GPU that start first: each may have some 100 GiB to allocate and to register."""
_SETTING = "BLITZ_WORKER_GPU_CLAIMS"
_LOOK_S = 0.05
_LOCK = "lock"
_CLAIM = ".claim"
_MAX_BYTES = 64


@dataclass(frozen=True, slots=True)
class Claimed:
    """By another worker, which lives."""

    worker_id: str
    num_bytes: int


class GpuClaim:
    """A worker's own, for its life."""

    def __init__(self, lock: int, own: int, file: Path) -> None:
        """Both descriptors are locked."""
        self._lock = lock
        self._own = own
        self._file = file

    def allocated(self) -> None:
        """All that was claimed is taken, as far as it is taken at once: others may look. Safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def release(self) -> None:
        """The memory is free again. Where a process ends without this, the kernel does it. Safe to call twice."""
        self.allocated()
        if self._own >= 0:
            self._file.unlink(missing_ok=True)
            os.close(self._own)
            self._own = -1


def claim_of(
    config: WorkerConfig,
    read_gpu: Callable[[], GpuFacts | None] | None = None,
    *,
    wait_s: float = WAIT_S,
) -> GpuClaim:
    """What this worker needs of its GPU. ``read_gpu``: the GPU, with what is free at that moment; by default NVML's
    answer.

    Blocks while another worker of this GPU starts. Raises ``SettingsError`` where there is not so much left, and
    ``Unavailable`` where the other one takes longer than ``wait_s``, or the directory cannot be used.
    """
    read_gpu = read_gpu or functools.partial(_ask_nvml, config.visible_gpu)
    try:
        folder = _own_folder(config.gpu_claims) / _answering(read_gpu).uuid
        folder.mkdir(exist_ok=True)
        lock = _locked(folder, wait_s)
        try:
            own, file = _noted(config, folder, _answering(read_gpu))
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise Unavailable(
            f"{_SETTING}={config.gpu_claims}: claims on the GPU's memory cannot be noted there: "
            f"{_printable(_where(error, config.gpu_claims))}{error.strerror}"
        ) from error
    return GpuClaim(lock, own, file)


def _ask_nvml(visible_gpu: str) -> GpuFacts | None:
    nvml = load_nvml()
    return None if nvml is None else read_gpu_facts(nvml, visible_gpu)


def _answering(read_gpu: Callable[[], GpuFacts | None]) -> GpuFacts:
    """Raises ``Unavailable`` where it does not answer."""
    gpu = read_gpu()
    if gpu is None:
        raise Unavailable("the worker's GPU does not answer any more: look at nvidia-smi and at the driver's log")
    return gpu


def _noted(config: WorkerConfig, folder: Path, gpu: GpuFacts) -> tuple[int, Path]:
    """The claim's file, locked. Under the GPU's lock. Raises as ``claim_of`` does."""
    check_room(config, gpu, tuple(_living(folder)))
    # Of processes with one id in two containers, the worker's id says which is meant.
    file = folder / f"{config.worker_id}.{os.getpid()}{_CLAIM}"
    # Not emptied before it is locked: if it is another worker's, what that claims must stay.
    own = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(own, 0)
        os.write(own, str(needed_bytes(config)).encode())
    except BlockingIOError as error:
        os.close(own)
        raise Unavailable(
            f"a worker {config.worker_id} with this process id lives already, and holds {file}: each worker needs an "
            "id of its own (BLITZ_WORKER_ID)"
        ) from error
    except BaseException:
        os.close(own)
        raise
    return own, file


def check_room(config: WorkerConfig, gpu: GpuFacts, others: tuple[Claimed, ...]) -> None:
    """Raises ``SettingsError`` where a worker does not fit beside others, which have allocated, and beside what else
    is in the GPU's memory."""
    if not gpu.total_bytes:
        return
    claimed_bytes = sum(other.num_bytes for other in others)
    unclaimed_bytes = max(0, gpu.total_bytes - claimed_bytes)
    needed = needed_bytes(config)
    if needed <= unclaimed_bytes and needed - MADE_BYTES <= gpu.free_bytes:
        return
    has = f"{gpu.free_bytes // MIB} MiB free of {gpu.total_bytes // MIB}"
    if others:
        by = ", ".join(f"{other.worker_id} {other.num_bytes // MIB}" for other in others)
        has += f", {unclaimed_bytes // MIB} of them beside what other workers claim ({by} MiB)"
    raise too_little(config, gpu, has)


def _where(error: OSError, folder: Path) -> str:
    """What is in the way, if it is below the directory."""
    return "" if error.filename is None or Path(error.filename) == folder else f"{error.filename}: "


def _printable(text: str) -> str:
    """Of a name that somebody else gave to a file: no line of its own, and nothing that a terminal would obey."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _own_folder(folder: Path) -> Path:
    """This user's and nobody else's: what lies there is believed. Raises ``OSError``, ``SettingsError``."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise SettingsError(
            f"{_SETTING}={folder} belongs to another user: name a directory of this one", param=_SETTING
        )
    return folder


def _locked(folder: Path, wait_s: float) -> int:
    """The descriptor of the GPU's lock, held. Raises ``OSError``, ``Unavailable``."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                os.close(lock)
                raise Unavailable(
                    f"another worker of this GPU has not allocated its memory in {wait_s:g} s, and holds "
                    f"{folder / _LOCK}: look for one that hangs, and end it"
                ) from None
        time.sleep(_LOOK_S)


def _living(folder: Path) -> Iterator[Claimed]:
    """Claims of processes that live; files of others are removed. Under the GPU's lock."""
    for file in sorted(folder.glob(f"*{_CLAIM}")):
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink(missing_ok=True)
                continue
            text = os.pread(descriptor, _MAX_BYTES, 0)
        finally:
            os.close(descriptor)
        worker_id = file.name.removesuffix(_CLAIM).rpartition(".")[0]
        yield Claimed(_printable(worker_id), int(text) if text.isdigit() else 0)
