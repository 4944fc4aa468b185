"""Transfers as flows that share a network, on a clock.

A flow that forwards another's bytes names it as its upstream. It sends a chunk once it has it whole: it stays a chunk
behind, and once it has caught up it is as fast as its upstream at most. That keeps a chain to one rate per hop and no
events per chunk. Against sending chunk by chunk nothing is early; it is exact where a hop is at most as fast as those
before, and otherwise late by less than a chunk's time per hop.

A flow may forward several others (stripes): it is then behind each of them, as a share of the bytes, as every
layer is cut in the same proportions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from bench.sim.clock import Clock, Event
from bench.sim.sharing import Demand, Resource, fair_rates
from shared.errors import BadRequest

BYTES_PER_GBIT = 1e9 / 8
_CAUGHT_UP = 1e-4
"""Share of a chunk: nearer than this, a flow has caught up. Above what rounding moves in a day of virtual time."""

FlowState = Literal["running", "ended", "aborted"]
Path = tuple[Resource, ...]


class _Use:
    """A resource's flows, and whether they can fill it.

    One that they cannot fill joins nobody's rates. Most are so, as the uplinks of leaves, and what has to be computed
    together stays small.
    """

    __slots__ = ("flows", "gbps", "wanted_gbps")

    def __init__(self, gbps: float) -> None:
        self.gbps = gbps
        self.flows: dict[int, Flow] = {}
        self.wanted_gbps = 0.0
        """What the flows' paths let through without each other."""

    @property
    def binds(self) -> bool:
        # More than the dust that sums leave.
        return self.wanted_gbps > self.gbps * (1 + 1e-9)


class Flow:
    """One transfer. Read it; ``Network`` changes it."""

    __slots__ = (
        "cap_gbps", "chunk_bytes", "delivered_bytes", "downstreams", "event", "hop", "marks", "num_bytes", "on_end",
        "on_mark", "path", "path_gbps", "purpose", "rate_gbps", "sequence", "since_s", "state", "upstreams", "weight",
    )  # fmt: skip

    def __init__(self, sequence: int, num_bytes: float, chunk_bytes: float, weight: float) -> None:
        self.sequence = sequence
        self.num_bytes = num_bytes
        self.chunk_bytes = chunk_bytes
        self.weight = weight
        self.purpose = ""
        self.cap_gbps = math.inf
        self.path: Path = ()
        self.path_gbps = math.inf
        """Of the narrowest resource on it."""
        self.state: FlowState = "running"
        self.rate_gbps = 0.0
        """Since ``since_s``; ``Network.rate_gbps`` also counts what happened in this instant."""
        self.delivered_bytes = 0.0
        """At ``since_s``; ``Network.delivered_bytes`` tells it for now."""
        self.since_s = 0.0
        self.upstreams: tuple[Flow, ...] = ()
        self.downstreams: dict[int, Flow] = {}
        self.hop = 1
        """In its chain: one more than any of its upstreams."""
        self.marks: list[float] = []
        """Bytes still to be told of, the next one last."""
        self.on_mark: Callable[[Flow, float], object] | None = None
        self.on_end: Callable[[Flow], object] | None = None
        self.event: Event | None = None
        """When this flow next ends, passes a mark, or catches up."""

    def __repr__(self) -> str:
        return f"Flow({self.sequence}, {self.state}, {self.delivered_bytes:.0f} of {self.num_bytes:.0f} bytes)"


class Network:
    """The flows under way. What is changed in one instant is shared out once, at its end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._uses: dict[Resource, _Use] = {}
        self._changed: dict[int, Flow] = {}
        """Flows around which rates must be computed anew."""
        self.carried: Counter[tuple[str, Resource]] = Counter()
        """Bytes of flows that run no more, by purpose and the first resource of their last path."""
        self._settling: Event | None = None
        self._sequence = 0

    def start(
        self,
        path: Sequence[Resource],
        num_bytes: float,
        *,
        cap_gbps: float = math.inf,
        weight: float = 1.0,
        upstreams: Iterable[Flow] = (),
        chunk_bytes: float = 0,
        marks: Iterable[float] = (),
        on_mark: Callable[[Flow, float], object] | None = None,
        on_end: Callable[[Flow], object] | None = None,
        purpose: str = "",
    ) -> Flow:
        """Begin a transfer now.

        ``num_bytes``: ``math.inf`` for traffic that goes on until it is aborted. ``marks``: byte counts, as of layers,
        at whose delivery ``on_mark(flow, mark)`` is called; one at the very end comes before ``on_end(flow)``.
        ``upstreams``: flows whose bytes this one forwards, in chunks of ``chunk_bytes`` of its own.
        Raises ``BadRequest`` for what makes no transfer.
        """
        if not num_bytes > 0:
            raise BadRequest(f"a flow has bytes, not {num_bytes!r}", param="num_bytes")
        if not 0 < weight < math.inf:
            raise BadRequest(f"a flow's weight is positive and finite, not {weight!r}", param="weight")
        told = sorted(set(marks), reverse=True)
        if told and not 0 < told[-1] <= told[0] <= num_bytes:
            raise BadRequest(f"marks lie within a flow's {num_bytes!r} bytes, not at {told!r}", param="marks")
        flow = Flow(self._sequence, num_bytes, chunk_bytes, weight)
        _check_cap(cap_gbps)
        flow.cap_gbps = cap_gbps
        flow.marks, flow.on_mark, flow.on_end = told, on_mark, on_end
        flow.since_s, flow.purpose = self._clock.now_s, purpose
        its_path, its_upstreams = tuple(path), tuple(upstreams)
        _check_path(flow, its_path, its_upstreams)
        self._sequence += 1
        self._attach(flow, its_path, its_upstreams)
        return flow

    def reroute(self, flow: Flow, path: Sequence[Resource], upstreams: Iterable[Flow] = ()) -> None:
        """The rest of its bytes come another way: as when the sender is gone and the target asks somebody else.

        Flows that forward this one stay behind it. Raises ``BadRequest`` for a flow that runs no more, or one that
        would come to forward itself.
        """
        _check_running(flow)
        new_path, new_upstreams = tuple(path), tuple(upstreams)
        _check_path(flow, new_path, new_upstreams)
        self._bring_up(flow)
        self._detach(flow)
        self._attach(flow, new_path, new_upstreams)

    def limit(self, flow: Flow, cap_gbps: float) -> None:
        """Let it get no more than this from now on; 0 halts it. Raises ``BadRequest``."""
        _check_running(flow)
        _check_cap(cap_gbps)
        flow.cap_gbps = cap_gbps
        self._touch(flow)

    def abort(self, flow: Flow) -> None:
        """End it where it is. Who forwards it gets no further until it is rerouted. Nothing is called.

        Without effect on one that runs no more.
        """
        if flow.state == "running":
            self._bring_up(flow)
            self._finish(flow, "aborted")

    def delivered_bytes(self, flow: Flow) -> float:
        """So far."""
        if flow.state != "running":
            return flow.delivered_bytes
        passed_s = self._clock.now_s - flow.since_s
        return min(flow.delivered_bytes + flow.rate_gbps * BYTES_PER_GBIT * passed_s, flow.num_bytes)

    def rate_gbps(self, flow: Flow) -> float:
        """From now on, until something changes."""
        self._settle_early()
        return flow.rate_gbps

    def running(self) -> Counter[str]:
        """How many flows are under way, by purpose."""
        flows = {flow.sequence: flow for use in self._uses.values() for flow in use.flows.values()}
        return Counter([flow.purpose for flow in flows.values()])

    def used_gbps(self, resource: Resource) -> float:
        """By all its flows, from now on, until something changes."""
        self._settle_early()
        use = self._uses.get(resource)
        return sum([flow.rate_gbps for flow in use.flows.values()]) if use is not None else 0.0

    # --- who is where ------------------------------------------------------------------------

    def _attach(self, flow: Flow, path: Path, upstreams: tuple[Flow, ...]) -> None:
        flow.path, flow.upstreams = path, upstreams
        flow.path_gbps = min([resource.gbps for resource in path])
        for resource in path:
            use = self._uses.get(resource)
            if use is None:
                use = self._uses[resource] = _Use(resource.gbps)
            use.flows[flow.sequence] = flow
            use.wanted_gbps += flow.path_gbps
        for upstream in upstreams:
            upstream.downstreams[flow.sequence] = flow
        _number_hops(flow)
        self._touch(flow)

    def _detach(self, flow: Flow) -> None:
        """Off its path and its upstreams; those who shared with it are shared out anew."""
        for resource in flow.path:
            use = self._uses[resource]
            del use.flows[flow.sequence]
            if use.binds:
                self._changed.update(use.flows)
            use.wanted_gbps -= flow.path_gbps
            if not use.flows:
                del self._uses[resource]
        for upstream in flow.upstreams:
            del upstream.downstreams[flow.sequence]
        flow.upstreams = ()

    def _finish(self, flow: Flow, state: FlowState) -> None:
        flow.state, flow.rate_gbps = state, 0.0
        self.carried[flow.purpose, flow.path[0]] += round(flow.delivered_bytes)
        self._touch(flow)
        self._detach(flow)
        self._changed.update(flow.downstreams)
        del self._changed[flow.sequence]
        if flow.event is not None:
            self._clock.cancel(flow.event)
            flow.event = None

    # --- rates -------------------------------------------------------------------------------

    def _touch(self, flow: Flow) -> None:
        self._changed[flow.sequence] = flow
        if self._settling is None:
            self._settling = self._clock.at(self._clock.now_s, self._settle)

    def _settle_early(self) -> None:
        if self._settling is not None:
            self._clock.cancel(self._settling)
            self._settle()

    def _settle(self) -> None:
        """New rates for all whom the changes of this instant can reach."""
        changed, self._changed, self._settling = self._changed, {}, None
        flows = self._reached_from(changed.values())
        for flow in flows:
            self._bring_up(flow)
        moved = set(changed)
        for flow, gbps in zip(flows, fair_rates(self._demands(flows)), strict=True):
            if gbps != flow.rate_gbps:
                flow.rate_gbps = gbps
                moved.add(flow.sequence)
        for flow in flows:
            if flow.sequence in moved or any(upstream.sequence in moved for upstream in flow.upstreams):
                self._foresee(flow)

    def _reached_from(self, changed: Iterable[Flow]) -> list[Flow]:
        """The running flows connected to these by resources that can be full or by chains; upstreams first."""
        reached: dict[int, Flow] = {}
        seen: set[Resource] = set()
        front = list(changed)
        while front:
            flow = front.pop()
            if flow.sequence in reached or flow.state != "running":
                continue
            reached[flow.sequence] = flow
            for resource in flow.path:
                if resource not in seen:
                    seen.add(resource)
                    if self._uses[resource].binds:
                        front += self._uses[resource].flows.values()
            front += flow.upstreams
            front += flow.downstreams.values()
        return sorted(reached.values(), key=lambda flow: (flow.hop, flow.sequence))

    def _demands(self, flows: Sequence[Flow]) -> list[Demand]:
        """Of flows that are brought up to one time, upstreams first."""
        places = {flow.sequence: place for place, flow in enumerate(flows)}
        demands: list[Demand] = []
        for flow in flows:
            path = tuple([resource for resource in flow.path if self._uses[resource].binds])
            demand = Demand(path, min(flow.cap_gbps, flow.path_gbps), flow.weight)
            for upstream in flow.upstreams:
                if upstream.state == "ended":
                    continue
                room = _room_bytes(flow, upstream, flow.delivered_bytes, upstream.delivered_bytes)
                near = _CAUGHT_UP * flow.chunk_bytes
                if room < -near or (room <= near and upstream.state == "aborted"):
                    demand.cap_gbps = 0.0
                elif room <= near:
                    demand.behind.append((places[upstream.sequence], flow.num_bytes / upstream.num_bytes))
            demands.append(demand)
        return demands

    def _bring_up(self, flow: Flow) -> None:
        """Count what was delivered until now."""
        flow.delivered_bytes = self.delivered_bytes(flow)
        flow.since_s = self._clock.now_s

    # --- what happens to a flow next ---------------------------------------------------------

    def _foresee(self, flow: Flow) -> None:
        """Schedule it. Flows and their upstreams are brought up to now, or keep their rates since."""
        if flow.event is not None:
            self._clock.cancel(flow.event)
            flow.event = None
        delivered, bytes_per_s = self.delivered_bytes(flow), flow.rate_gbps * BYTES_PER_GBIT
        in_s, what, reaches = math.inf, self._end, None
        if bytes_per_s > 0:
            in_s = (flow.num_bytes - delivered) / bytes_per_s
            if flow.marks and flow.marks[-1] < flow.num_bytes:
                mark_s = (flow.marks[-1] - delivered) / bytes_per_s
                if mark_s < in_s:
                    in_s, what = mark_s, self._pass_mark
        for upstream in flow.upstreams:
            if upstream.state == "ended":
                continue
            ratio = flow.num_bytes / upstream.num_bytes
            room = _room_bytes(flow, upstream, delivered, self.delivered_bytes(upstream))
            closing = bytes_per_s - ratio * upstream.rate_gbps * BYTES_PER_GBIT
            if abs(room) > _CAUGHT_UP * flow.chunk_bytes and room * closing > 0 and room / closing < in_s:
                in_s, reaches = room / closing, upstream
        if reaches is not None:
            flow.event = self._clock.after(in_s, self._catch_up, flow, reaches)
        elif in_s < math.inf:
            flow.event = self._clock.after(max(0.0, in_s), what, flow)

    def _end(self, flow: Flow) -> None:
        flow.event = None
        # To the byte, whatever rounding made of it.
        flow.delivered_bytes, flow.since_s = flow.num_bytes, self._clock.now_s
        self._finish(flow, "ended")
        while flow.marks:
            mark = flow.marks.pop()
            if flow.on_mark is not None:
                flow.on_mark(flow, mark)
        if flow.on_end is not None:
            flow.on_end(flow)

    def _pass_mark(self, flow: Flow) -> None:
        flow.event = None
        mark = flow.marks.pop()
        self._foresee(flow)
        if flow.on_mark is not None:
            flow.on_mark(flow, mark)

    def _catch_up(self, flow: Flow, upstream: Flow) -> None:
        """It has sent on all that it may, or its first chunk is there."""
        flow.event = None
        self._touch(flow)
        if upstream.state == "ended":
            return
        self._bring_up(flow)
        # Exactly there, whatever rounding made of it: near it, the next catching up would be foreseen again and again.
        room = _room_bytes(flow, upstream, flow.delivered_bytes, self.delivered_bytes(upstream))
        flow.delivered_bytes = max(0.0, flow.delivered_bytes + room)


def _room_bytes(flow: Flow, upstream: Flow, delivered: float, received: float) -> float:
    """What ``flow`` could send on at once of what its upstream delivered; below 0 before the first chunk is whole."""
    return received * (flow.num_bytes / upstream.num_bytes) - flow.chunk_bytes - delivered


def _number_hops(flow: Flow) -> None:
    front = [flow]
    while front:
        flow = front.pop()
        hop = 1 + max([upstream.hop for upstream in flow.upstreams], default=0)
        if hop != flow.hop:
            flow.hop = hop
            front += flow.downstreams.values()


def _check_running(flow: Flow) -> None:
    if flow.state != "running":
        raise BadRequest(f"{flow!r} runs no more", param="flow")


def _check_cap(cap_gbps: float) -> None:
    if not cap_gbps >= 0:
        raise BadRequest(f"a flow's cap is not negative, not {cap_gbps!r} Gbit/s", param="cap_gbps")


def _check_path(flow: Flow, path: Path, upstreams: tuple[Flow, ...]) -> None:
    """Raises ``BadRequest``."""
    if not path:
        raise BadRequest("a flow passes at least one resource", param="path")
    if len(set(path)) < len(path):
        raise BadRequest(f"a flow passes a resource once, not {[r.name for r in path]}", param="path")
    if not upstreams:
        return
    if not 0 < flow.chunk_bytes < math.inf:
        raise BadRequest(f"a flow that forwards has chunks, not of {flow.chunk_bytes!r} bytes", param="chunk_bytes")
    if math.isinf(flow.num_bytes) or any(math.isinf(upstream.num_bytes) for upstream in upstreams):
        raise BadRequest("a flow that forwards, or is forwarded, has an end", param="num_bytes")
    front = list(upstreams)
    while front:
        upstream = front.pop()
        if upstream is flow:
            raise BadRequest(f"{flow!r} would come to forward itself", param="upstreams")
        front += upstream.upstreams
