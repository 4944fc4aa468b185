"""From sources and targets to forwarding chains (paper section 5.1, Figure 11).

One chain from the best source: the time of a serial chain hardly depends on its length
(|M|/B + (n-1)·chunk/B), so a single chain is as fast as the slowest link in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages.common import InstanceState
from shared.messages.registry import WorkerInfo
from shared.messages.scaling import SourceKind

MIN_CHUNK_BYTES = 256 * 1024
"""Below this the cost per message shows (one checksum block, too)."""
MAX_CHUNK_BYTES = 8 * 1024 * 1024
FILL_SHARE = 0.02
"""Largest share of the transfer time that filling the chain may take (design section 5)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A complete copy of the model in a worker's memory."""

    worker: WorkerInfo
    instance_id: str
    epoch: int
    state: InstanceState
    busy_sending: bool
    """Whether it already sends weights: its egress is spent."""


@dataclass(frozen=True, slots=True)
class PlannedChain:
    """Where the bytes come from and the order in which targets forward them."""

    source_kind: SourceKind
    source: Source | None
    targets: tuple[WorkerInfo, ...]
    chunk_bytes: int
    predicted_finish_s: float


@dataclass(frozen=True, slots=True)
class Multicast:
    """The chains, and why they are as they are."""

    chains: tuple[PlannedChain, ...]
    explain: tuple[str, ...]
    left_out: tuple[str, ...]


def chunk_bytes(model_bytes: int, num_hops: int) -> int:
    """Chunk size for a chain of ``num_hops``: the fill (n-1)·chunk stays below 2 % of |M|.

    With a single hop nothing has to fill, and the largest chunk costs least.
    The result is a multiple of the floor, so that checksum blocks never straddle chunks.
    """
    wanted = MAX_CHUNK_BYTES if num_hops <= 1 else int(FILL_SHARE * model_bytes / (num_hops - 1))
    blocks = max(1, min(wanted, MAX_CHUNK_BYTES) // MIN_CHUNK_BYTES)
    return blocks * MIN_CHUNK_BYTES


def plan_multicast(
    sources: Sequence[Source], spare: Sequence[WorkerInfo], num_targets: int, model_bytes: int
) -> Multicast:
    """Plan ``num_targets`` new copies on the spare workers.

    Sources whose egress is spent are pruned unless nothing is left; without any source the first
    target reads the checkpoint from its disk and forwards it. Targets on the source's host come
    first, then host by host, so that a chain enters each host once. Deterministic: ties are
    broken by worker id. Fewer spare workers than targets give a smaller plan that says so.
    """
    left_out: tuple[str, ...] = ()
    if len(spare) < num_targets:
        left_out = (f"{num_targets - len(spare)} of {num_targets} instances: only {len(spare)} workers are spare",)
    wanted = min(num_targets, len(spare))
    if wanted == 0:
        return Multicast((), (), left_out)
    free = [s for s in sources if not s.busy_sending]
    explain = []
    if sources and not free:
        explain.append(f"all {len(sources)} sources already send; the least bad one is shared")
    candidates = free or list(sources)
    source = min(candidates, key=_preference) if candidates else None
    targets = _ordered_targets(source, spare)[:wanted]
    link_gbps = min(w.nic_gbps for w in targets)
    if source is None:
        explain.append(f"no copy in any worker's memory: {targets[0].worker_id} reads the checkpoint and forwards it")
    else:
        link_gbps = min(link_gbps, source.worker.nic_gbps)
        explain.append(
            f"source {source.worker.worker_id} ({source.state}, {len(free)} of {len(sources)} sources free to send)"
        )
    explain.append("chain order " + " -> ".join(w.worker_id for w in targets) + ": same host first, then by host")
    chunk = chunk_bytes(model_bytes, len(targets))
    seconds = (model_bytes + (len(targets) - 1) * chunk) * 8 / (link_gbps * 1e9)
    kind: SourceKind = "disk" if source is None else "gpu"
    return Multicast((PlannedChain(kind, source, tuple(targets), chunk, seconds),), tuple(explain), left_out)


def _preference(source: Source) -> tuple[bool, float, str]:
    # A draining copy may go away; otherwise the widest link, then a stable order.
    return source.state == "draining", -source.worker.nic_gbps, source.worker.worker_id


def _ordered_targets(source: Source | None, spare: Sequence[WorkerInfo]) -> list[WorkerInfo]:
    home = source.worker.host if source else ""
    leaf = source.worker.leaf if source else ""
    return sorted(spare, key=lambda w: (w.host != home, w.leaf != leaf, -w.nic_gbps, w.leaf, w.host, w.worker_id))
