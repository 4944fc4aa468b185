"""The weights of one plan on their way: a flow for each stripe of each target, as the plan's chains say.

What a target gets from one that still loads, by this plan or by one before, it gets no sooner (``upstreams``): so a
chain forwards chunk by chunk, and the members of a hop give each other what each received (all-gather). Who loses what
it reads goes on with the rest from the next upstream that its plan names (``services.worker.core.upstreams``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bench.sim.clock import Clock
from bench.sim.fabric import Fabric, Path
from bench.sim.flows import Flow, Network
from services.worker.core.upstreams import PlanPart, Upstream
from shared.messages.plans import ScalePlan


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a copy, and where in it each layer ends. Embeddings come first, the head last."""

    num_bytes: int
    layer_ends: tuple[float, ...]
    """As shares of all bytes."""

    @classmethod
    def of(cls, num_bytes: int, num_layers: int, layers_share: float) -> Weights:
        """``layers_share``: of the bytes, that are of layers; embeddings and head have half of the rest each."""
        first = (1 - layers_share) / 2
        return cls(num_bytes, tuple([first + layers_share * (i + 1) / num_layers for i in range(num_layers)]))


@dataclass(eq=False, slots=True)
class Load:
    """What one target receives."""

    plan: ScalePlan
    part: PlanPart
    weights: Weights
    gpu_id: str
    on_layers: Callable[[int], None] | None
    """Told how many layers, from the first on, are there; None: nobody wants to know."""
    on_end: Callable[[], None]
    flows: list[Flow | None] = field(default_factory=list)
    """By stripe."""
    upstreams: list[int] = field(default_factory=list)
    """By stripe, which one of those that the plan names."""
    layers_ready: int = 0
    _layers: list[int] = field(default_factory=list)
    _left: int = 0

    @property
    def worker_id(self) -> str:
        return self.part.member.worker_id

    @property
    def running(self) -> tuple[Flow, ...]:
        """Flows that have not ended."""
        return tuple([flow for flow in self.flows if flow is not None and flow.state == "running"])

    def started(self, num_stripes: int) -> None:
        """Before its flows are added."""
        self.flows, self._layers, self._left = [None] * num_stripes, [0] * num_stripes, num_stripes
        self.upstreams = [0] * num_stripes

    def upstream(self, stripe: int) -> Upstream:
        """Where it comes from."""
        return self.part.stripes[stripe].upstreams[self.upstreams[stripe]]

    def passed(self, stripe: int, layers: int) -> None:
        """A stripe has brought its part of so many layers."""
        self._layers[stripe] = layers
        ready = min(self._layers)
        if ready > self.layers_ready:
            self.layers_ready = ready
            if self.on_layers is not None:
                self.on_layers(ready)

    def stripe_ended(self) -> bool:
        """Whether it was the last one."""
        self._left -= 1
        if not self._left:
            self.on_end()
        return not self._left


class Transfers(Protocol):
    """How the weights of plans get to their targets."""

    def start(self, loads: Mapping[str, Load], chunk_bytes: float) -> None:
        """All of one plan, by worker id in the order of chains and hops."""

    def is_read(self, worker_id: str, loads: Iterable[Load]) -> bool:
        """Whether a worker's copy is needed for any of these that have not ended."""

    def abort(self, load: Load) -> None:
        """Nothing more arrives."""

    def lost(self, worker_id: str) -> None:
        """What could be read from a worker is gone, with it."""


class Loads:
    """Starts and ends the flows of loads, as the chains of their plans say."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        fabric: Fabric,
        gpu_of: Callable[[str], str],
        *,
        is_there: Callable[[Upstream, Load], bool] = lambda _upstream, _load: True,
        notice_s: float = 0.0,
    ) -> None:
        """``gpu_of``: the GPU's id by its worker's. ``is_there``: whether an upstream has its copy, or loads it.
        ``notice_s``: until one is noticed to have died."""
        self._clock = clock
        self._is_there = is_there
        self._notice_s = notice_s
        self._network = network
        self._fabric = fabric
        self._gpu_of = gpu_of
        self._newest: dict[str, Load] = {}
        """By worker id."""

    def start(self, loads: Mapping[str, Load], chunk_bytes: float) -> None:
        """See ``Transfers``, as the next."""
        for load in loads.values():
            load.started(len(load.part.stripes))
            self._newest[load.worker_id] = load
            for number in range(len(load.flows)):
                self._choose(load, number)
        # Those that come from members of the same hop forward what those receive themselves.
        for own in (True, False):
            for load in loads.values():
                for number in range(len(load.flows)):
                    upstream = load.upstream(number)
                    if (upstream.kind != "gpu" or not _same_hop(load, upstream.worker_id)) is own:
                        self._start(load, number, chunk_bytes)

    def _choose(self, load: Load, number: int) -> None:
        """The first upstream from the present one on that is there: the disk is, if no other."""
        while load.upstream(number).kind != "disk" and not self._is_there(load.upstream(number), load):
            load.upstreams[number] += 1

    def is_read(self, worker_id: str, loads: Iterable[Load]) -> bool:
        return any(
            load.upstream(number).kind == "gpu" and load.upstream(number).worker_id == worker_id
            for load in loads
            # Others may have started some of them, by other flows.
            if load.running and self._newest.get(load.worker_id) is load
            for number in range(len(load.flows))
        )

    def abort(self, load: Load) -> None:
        for flow in load.running:
            self._network.abort(flow)

    def lost(self, worker_id: str) -> None:
        for load in self._newest.values():
            for number, flow in enumerate(load.flows):
                if flow is not None and flow.state == "running" and load.upstream(number).worker_id == worker_id:
                    self._network.limit(flow, 0.0)
                    self._clock.after(self._notice_s, self._climb, load, number, flow)

    def _climb(self, load: Load, number: int, flow: Flow) -> None:
        if flow.state != "running":
            return  # its own worker is gone, too
        self._choose(load, number)
        self._network.reroute(flow, self._path(load, load.upstream(number)), self._forwarded(load, number))
        self._network.limit(flow, math.inf)

    def _forwarded(self, load: Load, number: int) -> tuple[Flow, ...]:
        """What its upstream still receives."""
        upstream = load.upstream(number)
        from_one = self._newest.get(upstream.worker_id) if upstream.kind == "gpu" else None
        if from_one is None:
            return ()
        theirs = [from_one.flows[number]] if _same_hop(load, upstream.worker_id) else from_one.flows
        return tuple([flow for flow in theirs if flow is not None and flow.state == "running"])

    def _start(self, load: Load, number: int, chunk_bytes: float) -> None:
        stripe, ends, is_planned = load.part.stripes[number], load.weights.layer_ends, not load.upstreams[number]
        num_bytes = stripe.share * load.weights.num_bytes
        marks = {stripe.share * end * load.weights.num_bytes: i + 1 for i, end in enumerate(ends)}

        def passed(_flow: Flow, mark: float) -> None:
            load.passed(number, marks[mark])

        load.flows[number] = self._network.start(
            self._path(load, load.upstream(number)),
            num_bytes,
            cap_gbps=(is_planned and stripe.cap_gbps) or math.inf,
            upstreams=self._forwarded(load, number),
            chunk_bytes=chunk_bytes,
            marks=marks if load.on_layers is not None else (),
            on_mark=passed,
            on_end=lambda _flow: load.stripe_ended(),
            purpose="weights",
        )

    def _path(self, load: Load, upstream: Upstream) -> Path:
        fabric = self._fabric
        if upstream.kind == "disk":
            return fabric.ssd_to_gpu(load.gpu_id)
        source = self._gpu_of(upstream.worker_id)
        if upstream.kind == "gpu":
            return fabric.gpu_to_gpu(source, load.gpu_id)
        return fabric.host_to_gpu(fabric.gpus[source].host, load.gpu_id)


def _same_hop(load: Load, worker_id: str) -> bool:
    hop = load.part.chain.hops[load.part.position]
    return worker_id in hop.targets
