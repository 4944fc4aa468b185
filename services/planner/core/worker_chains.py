"""Plans in the form that workers carry out today: chains of single workers, from a worker's copy or a disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.planner.core import multicast
from services.planner.core.flows import Flow, Source
from services.planner.core.topology import topology_of
from shared.messages.common import InstanceState
from shared.messages.registry import WorkerInfo
from shared.messages.scaling import SourceKind


@dataclass(frozen=True, slots=True)
class WorkerSource:
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
    source: WorkerSource | None
    targets: tuple[WorkerInfo, ...]
    chunk_bytes: int
    predicted_finish_s: float


@dataclass(frozen=True, slots=True)
class WorkerChains:
    """The chains, and why they are as they are."""

    chains: tuple[PlannedChain, ...]
    explain: tuple[str, ...]
    left_out: tuple[str, ...]


def plan_worker_chains(
    sources: Sequence[WorkerSource], spare: Sequence[WorkerInfo], num_targets: int, model_bytes: int
) -> WorkerChains:
    """Plan ``num_targets`` new copies on the spare workers: every worker alone, every edge from one copy.

    Without any source the first target reads the checkpoint from its disk and forwards it. Fewer spare workers than
    targets give a smaller plan that says so. Raises what ``multicast.plan`` raises.
    """
    holders = {s.worker.worker_id: s for s in sources}
    workers = {w.worker_id: w for w in spare}
    planned = multicast.plan(
        topology_of([*(s.worker for s in sources), *spare], scale_up=False),
        [Source(holder=name, leaving=s.state == "draining" or s.busy_sending) for name, s in holders.items()],
        list(workers),
        num_targets,
        [Flow(source=name) for name, s in holders.items() if s.busy_sending],
        model_bytes,
        sharded=False,
    )
    chains = []
    for chain in planned.chains:
        first = chain.edges[0].stripes[0]
        chains.append(
            PlannedChain(
                source_kind=first.source_kind,
                source=holders.get(first.source) if first.source_kind == "gpu" else None,
                targets=tuple(workers[edge.targets[0]] for edge in chain.edges),
                chunk_bytes=chain.chunk_bytes,
                predicted_finish_s=chain.predicted_finish_s,
            )
        )
    return WorkerChains(tuple(chains), planned.explain if chains else (), planned.left_out)
