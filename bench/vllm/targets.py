"""Several workers get a model of vLLM at once, each into a process that waits for its first weights; and how many
copies of the weights are in their memory once all serve."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil

from bench.evaluate.machine import CpuTimes
from bench.lab.errors import LabFailed
from bench.lab.network import Network
from bench.lab.stack import LabStack
from bench.vllm.server import CORE, FRONT, WORKER, settle
from bench.zero import bandwidth
from shared.errors import DeadlineExceeded, Unavailable
from shared.messages.admin import InstanceStatus
from shared.messages.operations import ScaleRecord

LIMIT_S = 600.0
POLL_S = 0.5
HOLD_S = 3600.0
SHARED_MEMORY = "/memfd:blitz-weights"
"""Where workers keep the weights that vLLM takes."""


@dataclass(frozen=True, slots=True)
class Group:
    """So many workers at once."""

    mb: int
    num_targets: int
    model_bytes: int
    bytes_per_s: tuple[float, ...]
    serving_s: tuple[float, ...]
    """From the plan until the last one served."""
    busy_shares: tuple[float, ...]
    """Of the time of all cores until then: not idle."""
    vllm_cpu_s: tuple[float, ...]
    """Core seconds of all vLLM's processes until then."""
    copies_before: tuple[float, ...]
    """Weights in shared memory, when all of them served: of so many copies."""
    copies_after: tuple[float, ...]
    """The same when those had gone that had another copy elsewhere; the copy on the source's host is none of them."""

    def document(self, one_s: float) -> dict[str, Any]:
        """As JSON shows it. ``one_s``: what one worker alone took."""
        return {
            "mb": self.mb,
            "targets": self.num_targets,
            "scales": len(self.serving_s),
            "serving_s": round(median(self.serving_s), 3),
            "serving_worst_s": round(max(self.serving_s), 3),
            "over_one": round(median(self.serving_s) / one_s, 3),
            "weights_s": round(self.model_bytes / median(self.bytes_per_s), 3),
            "busy_share": round(median(self.busy_shares), 3),
            "vllm_cpu_s": round(median(self.vllm_cpu_s), 2),
            "copies_before": round(median(self.copies_before), 2),
            "copies_after": round(median(self.copies_after), 2),
        }


async def kept_warm(stack: LabStack, num_workers: int) -> None:
    """Wait until a vLLM without weights waits on so many workers. Raises ``LabFailed``."""

    async def enough() -> bool:
        return sum(bool(worker.warm_for) for worker in await stack.admin.workers()) >= num_workers

    await _until(enough, f"no vLLM waits for {stack.model} on {num_workers} workers")


async def scale_to(network: Network, stack: LabStack, num_bytes: int, num_targets: int) -> tuple[float, ...]:
    """The tuples' members of a ``Group``, from ``bytes_per_s`` on. Raises ``LabFailed``, ``BlitzError``."""
    await asyncio.to_thread(settle)
    per_s = await asyncio.to_thread(bandwidth.link, network, num_bytes)
    await stack.wait_quiet()
    cores, vllm_s = CpuTimes.now(), _vllm_cpu_s()
    asked = await stack.admin.scale(stack.model, num_targets, hold_s=HOLD_S)
    found: list[ScaleRecord] = []

    async def ended() -> bool:
        found[:] = [await stack.admin.scale_record(asked.plan_id, wait_s=LIMIT_S)]
        return found[0].status != "running"

    await _until(ended, f"{num_targets} instances of {stack.model} do not serve")
    (record,) = found
    if record.status != "done" or record.trigger_to_serving_ms is None or record.trigger_to_plan_ms is None:
        raise LabFailed(f"{num_targets} instances of {stack.model}: {record.status} {record.reason}")
    busy_share, _ = CpuTimes.now().shares_since(cores)
    vllm_s = _vllm_cpu_s() - vllm_s
    before = _shared_bytes() / num_bytes

    async def given_up() -> bool:
        there: tuple[InstanceStatus, ...] = (await stack.admin.status()).instances
        return len(there) == num_targets and all(instance.copy == "gone" for instance in there)

    await _until(given_up, "an instance keeps its copy")
    took_s = (record.trigger_to_serving_ms - record.trigger_to_plan_ms) / 1000
    return per_s, took_s, busy_share, vllm_s, before, _shared_bytes() / num_bytes


def _vllm_cpu_s() -> float:
    """Core seconds that vLLM's processes have taken so far."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = process.cmdline()
            if FRONT in command or (command and command[0].startswith((CORE, WORKER))):
                total += sum(process.cpu_times()[:2])
    return total


def _shared_bytes() -> int:
    """Weights in the shared memory of all workers here, by the share that each process has in what it maps."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            maps = process.memory_maps(grouped=False)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total += sum(part.pss for part in maps if part.path.startswith(SHARED_MEMORY))
    return total


async def _until(condition: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    """A gateway whose cores all do something else may be late with an answer."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(Unavailable, DeadlineExceeded):
            if await condition():
                return
        await asyncio.sleep(POLL_S)
    raise LabFailed(f"{otherwise} after {LIMIT_S:g} s")
