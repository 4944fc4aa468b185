"""How a plan brings weights to its targets: forwarding chains, or what they are compared with.

``star``: every target receives from one and the same source. ``disk``: every target reads the checkpoint
itself. Both are baselines for benchmarks; both give a ``WorkerChains``, so that everything after the plan is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from services.planner.core.timing import chunk_bytes
from services.planner.core.worker_chains import PlannedChain, WorkerChains, WorkerSource, plan_worker_chains
from shared.messages.registry import WorkerInfo

Strategy = Literal["chain", "star", "disk"]
STRATEGIES: tuple[Strategy, ...] = ("chain", "star", "disk")


def plan_by(
    strategy: Strategy,
    sources: Sequence[WorkerSource],
    spare: Sequence[WorkerInfo],
    num_targets: int,
    model_bytes: int,
) -> WorkerChains:
    """Plan ``num_targets`` new copies on the spare workers. Raises what ``multicast.plan`` raises."""
    match strategy:
        case "chain":
            return plan_worker_chains(sources, spare, num_targets, model_bytes)
        case "star":
            return plan_star(sources, spare, num_targets, model_bytes)
        case "disk":
            return plan_disk(spare, num_targets, model_bytes)


def plan_star(
    sources: Sequence[WorkerSource], spare: Sequence[WorkerInfo], num_targets: int, model_bytes: int
) -> WorkerChains:
    """One chain of one target per target, all from the widest source that stays. Without any source: ``plan_disk``.

    Deterministic: ties are broken by worker id. Fewer spare workers than targets give a smaller plan that says so.
    """
    if not sources:
        return plan_disk(spare, num_targets, model_bytes)
    targets, left_out = _targets(spare, num_targets)
    if not targets:
        return WorkerChains((), (), left_out)
    source = min(sources, key=lambda s: (s.state == "draining", -s.worker.nic_gbps, s.worker.worker_id))
    # They share the source's egress, so all of them end when the last byte has left it.
    egress_s = len(targets) * model_bytes * 8 / (source.worker.nic_gbps * 1e9)
    chains = tuple(
        PlannedChain(
            "gpu",
            source,
            (target,),
            chunk_bytes(model_bytes, 1),
            max(egress_s, model_bytes * 8 / (target.nic_gbps * 1e9)),
        )
        for target in targets
    )
    explain = (f"star: {source.worker.worker_id} sends to {', '.join(t.worker_id for t in targets)}, each on its own",)
    return WorkerChains(chains, explain, left_out)


def plan_disk(spare: Sequence[WorkerInfo], num_targets: int, model_bytes: int) -> WorkerChains:
    """Every target reads the checkpoint itself. A finish is predicted (else 0) where the disk's speed is known."""
    targets, left_out = _targets(spare, num_targets)
    if not targets:
        return WorkerChains((), (), left_out)
    chains = tuple(
        PlannedChain(
            "disk",
            None,
            (target,),
            chunk_bytes(model_bytes, 1),
            model_bytes * 8 / (target.ssd_gbps * 1e9) if target.ssd_gbps else 0.0,
        )
        for target in targets
    )
    return WorkerChains(
        chains, (f"disk: {', '.join(t.worker_id for t in targets)} each read the checkpoint",), left_out
    )


def _targets(spare: Sequence[WorkerInfo], num_targets: int) -> tuple[list[WorkerInfo], tuple[str, ...]]:
    chosen = sorted(spare, key=lambda w: (-w.nic_gbps, w.worker_id))[:num_targets]
    if len(chosen) == num_targets:
        return chosen, ()
    missing = num_targets - len(chosen)
    return chosen, (f"{missing} of {num_targets} instances: only {len(chosen)} workers are spare",)
