"""λScale (arXiv 2502.09922): weights come in blocks, from all complete copies at once, and those that receive them run
the model together before any of them is whole (λPipe).

The planner decides as for the other systems, when, how many and on which workers; what its plan says of sources stands
only where nothing below applies. Taken from the paper, of which we could read the beginning, and from descriptions of
it: models in blocks; the binomial pipeline (``binomial``); k-way transmission, with the block orders of k sources
shifted against each other; execution pipelines over receivers that together have all blocks, and mode switching with
recomputed KV (``pipelines``); copies in GPUs before copies in host memory, and these before the disk. The rest is
assumed:

- 16 blocks of equal size, cut between tensors (``blocks``).
- Every complete copy that stays is a source for the receivers of its scale-up domain, and for those whose domain has
  none; those that send already, or whose instances send KV, only where there are no others. Receivers that are not
  whole send within their own plan's multicast alone.
- Receivers whose host keeps a copy read its memory, each from another block on, where they have all blocks between them
  no later so than from the GPUs of their domain. Half of a link that KV leaves by counts.
- A transfer waits for nothing but its own sender and receiver; there are no steps that all take together.
- A pipeline is formed the moment that receivers which are in none have all blocks between them, of whichever plans;
  that takes no time. It is not formed anew when more blocks arrive. The source has no part in it.
- Hidden states take their bytes' time at the link's full rate, though they add to its load.
- Prompts, and requests that are decoded where their prompts were computed, go through pipelines. An instance that is to
  decode for others loads, and begins when it is whole: KV comes to it whole. λScale itself knows no such split.
- KV that leaves for a decode instance leaves from the member that has the request.
- Each member becomes local by itself, and computes anew what it has of KV elsewhere as one prompt.
- Nothing is lost on the way: no one dies here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from bench.sim.blocks import Blocks, BlockSend, BlockTransfer, Group, from_host, groups_of, multicast
from bench.sim.clock import Clock
from bench.sim.fabric import Fabric, Path
from bench.sim.flows import Network
from bench.sim.instance import SimInstance
from bench.sim.latencies import Latencies
from bench.sim.loading import Load, Loads
from bench.sim.models import SimModel
from bench.sim.pipelines import Pipelines
from shared.messages.common import TAKES_PROMPTS, Role

KV_LEAVES = 0.5
"""Of the link of a GPU that sends KV."""


class Fleet(Protocol):
    """The workers (``bench.sim.workers.SimWorkers``)."""

    def whole(self, model_hash: str) -> list[str]:
        """Those whose instances have all weights of a model, and stay."""

    def instance_at(self, worker_id: str) -> SimInstance:
        """Of a worker that has one."""

    def serve_early(self, worker_id: str) -> None:
        """A worker's instance takes requests before it is whole."""


class LambdaPipe:
    """The weights of plans as blocks, and the pipelines of their receivers (``bench.sim.loading.Transfers``)."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        fabric: Fabric,
        latencies: Latencies,
        model: SimModel,
        otherwise: Loads,
        fleet: Callable[[], Fleet],
    ) -> None:
        """``otherwise``: takes what no GPU and no host's memory can give. Workers are named as their GPUs."""
        self._clock = clock
        self._network = network
        self._fabric = fabric
        self._latencies = latencies
        self._otherwise = otherwise
        self._fleet = fleet
        self._blocks = Blocks.of(model.weights)
        self.pipelines = Pipelines(
            clock,
            network,
            self._blocks,
            fabric.gpu_to_gpu,
            model.hidden_bytes_per_token,
            latencies.tokens_s,
            on_formed=lambda worker_id: fleet().serve_early(worker_id),
        )
        self._transfers: list[BlockTransfer] = []

    def start(self, loads: Mapping[str, Load], chunk_bytes: float) -> None:
        """See ``Transfers``, as the next."""
        plan, num_blocks = next(iter(loads.values())).plan, len(self._blocks)
        copies = self._fleet().whole(plan.model.model_hash)
        domains: dict[str, list[str]] = {}
        for name in loads:
            domains.setdefault(self._domain(name), []).append(name)
        warm: list[str] = []
        far: list[str] = []
        groups: list[Group] = []
        for domain, names in domains.items():
            near = self._sources([copy for copy in copies if self._domain(copy) == domain])
            if all(_is_at_host(loads[name]) for name in names) and self._is_memory_sooner(names, near, plan.role):
                warm += names
            elif near:
                groups += groups_of(near, names, num_blocks, self._domain)
            else:
                far += names
        if far and not copies:
            self._otherwise.start({name: loads[name] for name in far}, chunk_bytes)
        elif far:
            groups += groups_of(self._sources(copies), far, num_blocks, self._domain)
        for name in (*warm, *[receiver for group in groups for receiver in group.receivers]):
            loads[name].started(num_blocks)
            if plan.role in TAKES_PROMPTS:
                self.pipelines.add(name, self._fleet().instance_at(name))
        for number, name in enumerate(warm):
            self._begin(from_host(name, num_blocks, first_block=number * num_blocks // len(warm)), loads)
        for group in groups:
            self._begin(multicast(group, num_blocks), loads)

    def is_read(self, worker_id: str, loads: Iterable[Load]) -> bool:
        return (
            self._is_sending(worker_id) or self.pipelines.needs(worker_id) or self._otherwise.is_read(worker_id, loads)
        )

    def abort(self, load: Load) -> None:
        """See ``Transfers``, as the next."""
        raise RuntimeError(f"a worker that loads dies: {load.worker_id}; blocks are never sent anew")

    def lost(self, worker_id: str) -> None:
        raise RuntimeError(f"{worker_id} dies: pipelines are never formed anew")

    def _sources(self, copies: Sequence[str]) -> list[str]:
        """Of these: idle ones, and those whose links KV leaves by, only where there are no others."""
        idle = [one for one in copies if not self._is_sending(one)] or list(copies)
        return [one for one in idle if not self._sends_kv(one)] or idle

    def _sends_kv(self, worker_id: str) -> bool:
        return self._fleet().instance_at(worker_id).role == "prefill"

    def _is_memory_sooner(self, names: Sequence[str], near: Sequence[str], role: Role) -> bool:
        """Whether these receivers of one domain have all blocks between them sooner from their host's memory, or each
        has where they form no pipelines."""
        cluster = self._fabric.cluster
        num_readers = len(names) if role in TAKES_PROMPTS else 1
        share = KV_LEAVES if near and self._sends_kv(near[0]) else 1.0
        from_gpus = min(num_readers, len(near)) * share * (cluster.scale_up_gbps or 0.0)
        return num_readers * cluster.host_link_gbps >= from_gpus

    def _is_sending(self, worker_id: str) -> bool:
        self._transfers = [transfer for transfer in self._transfers if not transfer.over]
        return any(transfer.sends(worker_id) for transfer in self._transfers)

    def _begin(self, sends: Sequence[BlockSend], loads: Mapping[str, Load]) -> None:
        transfer = BlockTransfer(self._network, sends, loads, self._blocks, self._path, self._arrived)
        self._transfers.append(transfer)
        transfer.begin()

    def _arrived(self, load: Load, block: int) -> None:
        self.pipelines.has(load.worker_id, block)
        if load.stripe_ended():
            # As long as it takes other systems' instances to begin after their last byte.
            self._clock.after(self._latencies.serve_s, self.pipelines.whole, load.worker_id)

    def _path(self, send: BlockSend) -> Path:
        if send.source:
            return self._fabric.gpu_to_gpu(send.source, send.target)
        return self._fabric.host_to_gpu(self._fabric.gpus[send.target].host, send.target)

    def _domain(self, worker_id: str) -> str:
        gpu = self._fabric.gpus[worker_id]
        return gpu.domain or gpu.gpu_id


def _is_at_host(load: Load) -> bool:
    """Whether its host's memory has a copy, as its plan says."""
    upstream = load.part.stripes[0].upstreams[0]
    return upstream.kind == "local" or (upstream.kind == "host" and upstream.host == load.part.member.host)
