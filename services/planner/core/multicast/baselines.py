"""How a plan brings weights to its targets: multicast, or what it is compared with.

``star``: every target receives on its own from a complete copy; they share the copies evenly. ``disk``: every target
reads the checkpoint itself.
``host-cache`` (as in ServerlessLLM): every target reads its own host's memory if a copy was kept there, its disk if
not, and leaves a copy on its host. They are baselines for benchmarks; all give ``WorkerChains``, so everything after is
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from services.planner.core.multicast.chains import WorkerChains, fallbacks_of, left_out_of, plan_worker_chains
from services.planner.core.multicast.cluster import Cluster
from services.planner.core.multicast.explain import names
from services.planner.core.multicast.timing import chunk_bytes
from shared.messages.plans import Chain, Hop, SourceKind, Stripe
from shared.messages.registry import WorkerInfo

Strategy = Literal["chain", "star", "disk", "host-cache"]
_NONE: Mapping[str, Collection[str]] = MappingProxyType({})
STRATEGIES: tuple[Strategy, ...] = ("chain", "star", "disk", "host-cache")


def plan_by(
    strategy: Strategy, cluster: Cluster, num_targets: int, model_bytes: int, *, tails: int = 1
) -> WorkerChains:
    """Plan ``num_targets`` new copies on the spare workers. Raises what ``multicast.plan`` raises.

    Deterministic: ties are broken by worker id. Fewer spare workers than targets give a smaller plan that says so.
    ``tails``: chains to start at least, where copies allow; the baselines' chains are all of one target.
    """
    if strategy == "chain":
        return plan_worker_chains(cluster, num_targets, model_bytes, tails=tails)
    baselines = {"star": plan_star, "disk": plan_disk, "host-cache": plan_host_cache}
    return baselines[strategy](cluster, num_targets, model_bytes)


def plan_star(cluster: Cluster, num_targets: int, model_bytes: int) -> WorkerChains:
    """One chain of one target per target, dealt out to the GPU copies that stay, the widest first; to those that go or
    to host copies where there are no others, and without any source like ``plan_disk``. It looks at no traffic."""
    if not cluster.copies:
        return plan_disk(cluster, num_targets, model_bytes)
    best = min((c.kind != "gpu", c.draining) for c in cluster.copies)
    sources = [c for c in cluster.copies if (c.kind != "gpu", c.draining) == best]
    sources.sort(key=lambda c: (-c.worker.nic_gbps, c.worker_id))
    targets = _targets(cluster, num_targets)
    chains, explain = [], []
    for number, source in enumerate(sources[: len(targets)]):
        mine = targets[number :: len(sources)]
        # They share the source's egress, so all of them end when the last byte has left it.
        egress_s = len(mine) * model_bytes * 8 / (source.worker.nic_gbps * 1e9)
        for t in mine:
            finish_s = max(egress_s, model_bytes * 8 / (t.nic_gbps * 1e9))
            chains.append(_alone(t, source.worker_id, source.kind, finish_s, model_bytes))
        held = "'s host copy" if source.kind == "host" else ""
        explain.append(f"star: {source.worker_id}{held} sends to {_ids(mine)}, each on its own")
    return _plan(cluster, num_targets, tuple(chains), tuple(explain), fallbacks=True)


def plan_disk(cluster: Cluster, num_targets: int, model_bytes: int) -> WorkerChains:
    """Every target reads the checkpoint itself. A finish is predicted (else 0) where the disk's speed is known."""
    targets = _targets(cluster, num_targets)
    chains = tuple(_from_disk(t, model_bytes) for t in targets)
    return _plan(cluster, num_targets, chains, (f"disk: {_ids(targets)} each read the checkpoint",))


def plan_host_cache(cluster: Cluster, num_targets: int, model_bytes: int) -> WorkerChains:
    """Every target reads a copy in its own host's memory, or its disk; hosts with a copy are chosen first. No byte
    crosses the network. Of the targets of a host without a copy the first keeps one there: they share its memory."""
    holders = cluster.host_holders()
    targets = _targets(cluster, num_targets, holders)
    hits = [t for t in targets if t.host in holders]
    misses = [t for t in targets if t.host not in holders]
    at_host = Counter(t.host for t in hits)
    chains = []
    for t in hits:
        workers = holders[t.host]
        source = t.worker_id if t.worker_id in workers else workers[0]
        # GPUs have a host link each; processes of one host share its memory.
        readers = at_host[t.host] if t.device == "cpu" else 1
        link_gbps = cluster.topology.gpus[t.worker_id].host_link_gbps / readers
        chains.append(_alone(t, source, "host", model_bytes * 8 / (link_gbps * 1e9), model_bytes))
    chains += [_from_disk(t, model_bytes) for t in misses]
    explain = []
    if hits:
        explain.append(f"host-cache: a copy is kept on the host of {_ids(hits)}")
    if misses:
        explain.append(f"host-cache: no copy on the host of {_ids(misses)}, read from disk")
    first_at = {t.host: t.worker_id for t in reversed(misses)}
    return _plan(cluster, num_targets, tuple(chains), tuple(explain), keepers=tuple(sorted(first_at.values())))


def _plan(
    cluster: Cluster,
    num_targets: int,
    chains: tuple[Chain, ...],
    explain: tuple[str, ...],
    *,
    fallbacks: bool = False,
    keepers: tuple[str, ...] = (),
) -> WorkerChains:
    left_out = left_out_of(cluster, len(chains), num_targets)
    if not chains:
        return WorkerChains((), (), left_out)
    return WorkerChains(chains, explain, left_out, fallbacks_of(cluster, chains) if fallbacks else (), keepers)


def _alone(target: WorkerInfo, source: str, kind: SourceKind, finish_s: float, model_bytes: int) -> Chain:
    stripe = Stripe(source=source, source_kind=kind, target=target.worker_id)
    hop = Hop(targets=(target.worker_id,), stripes=(stripe,), predicted_finish_s=finish_s)
    return Chain(hops=(hop,), chunk_bytes=chunk_bytes(model_bytes, 1))


def _from_disk(target: WorkerInfo, model_bytes: int) -> Chain:
    finish_s = model_bytes * 8 / (target.ssd_gbps * 1e9) if target.ssd_gbps else 0.0
    return _alone(target, "", "disk", finish_s, model_bytes)


def _targets(cluster: Cluster, num_targets: int, holders: Mapping[str, Collection[str]] = _NONE) -> list[WorkerInfo]:
    """The widest workers; before them those on the hosts of ``holders``, the holders themselves first."""

    def place(worker: WorkerInfo) -> tuple[bool, bool, float, str]:
        held_by = holders.get(worker.host, ())
        return not held_by, worker.worker_id not in held_by, -worker.nic_gbps, worker.worker_id

    return sorted(cluster.spare, key=place)[:num_targets]


def _ids(workers: Iterable[WorkerInfo]) -> str:
    return names([w.worker_id for w in workers])
