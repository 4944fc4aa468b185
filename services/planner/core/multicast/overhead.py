"""What loads take beside their bytes: orders, connections, first requests, verification, what a hop adds.

    time of a load = overhead + hops before it · overhead of a hop + bytes / planned rate

The planner knows the rates of links. What the rest takes is learned from loads that ended, since for a small model it
is nearly everything: per model and kind of source, the last few operations, and of these the median, so that one that
met a stall says nothing, and what has changed shows after three. Operations at the same time may have met the same
stall: they count as one, with the lowest that they say. What is assumed counts as one of them until there are enough.
A model that has not been loaded is expected to start like the others; how long its verification takes is not known
beforehand, and a rate that it does not reach shows here too.

Pure: seconds come in.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import msgspec

from services.planner.core.multicast.chains import WorkerChains
from shared.messages.plans import Chain, Hop, SourceKind

NUM_RECENT = 5
"""Operations that are remembered."""
ASSUMED_START_S = 0.02
"""From a plan to its first byte, until loads have shown it: about what it takes on an idle machine."""
ASSUMED_HOP_S = 0.001
"""What a hop adds: a request over the bus, and its answer."""
MAX_OVERHEAD_S = 60.0
"""Reports that say more than that say no more than that: deadlines follow from what is predicted."""
MAX_KNOWN = 1000
"""Models and kinds that are remembered; beyond, those are forgotten that were not loaded for longest."""


class Way(NamedTuple):
    """How weights get to a target."""

    kind: SourceKind
    """Of the copy that its chain starts at."""
    hops: int
    """Other targets of the plan that forward to it, one behind the other."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a target took that has everything."""

    way: Way
    start_s: float
    """From the plan to its first byte."""
    overhead_s: float
    """From the plan to its last, less what its bytes take at the planned rate."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """What loads are expected to take beside their bytes."""

    whole_s: float
    start_s: float
    """Of that, before the first byte."""
    hop_s: float
    """What each hop before a target adds to both."""

    def before(self, hops: int) -> float:
        """Until the first byte comes, after so many."""
        return self.start_s + hops * self.hop_s

    def after(self, hops: int) -> float:
        """Until everything is there."""
        return self.whole_s + hops * self.hop_s


class Overheads:
    """Takes what loads took, gives what the next ones will."""

    def __init__(self) -> None:
        self._starts = _Recent()
        """Of all models: they do not depend on the size."""
        self._known: OrderedDict[tuple[str, SourceKind], _Known] = OrderedDict()

    def learn(self, model_hash: str, loads: Collection[Loaded], began_s: float, ended_s: float) -> None:
        """An operation ended: these are its targets. The moments are of any one clock."""
        for kind in dict.fromkeys(load.way.kind for load in loads):
            alike = [load for load in loads if load.way.kind == kind]
            first = [load for load in alike if not load.way.hops]
            if not first:
                continue
            start_s, whole_s = median([load.start_s for load in first]), median([load.overhead_s for load in first])
            known = self._known.setdefault((model_hash, kind), _Known())
            self._known.move_to_end((model_hash, kind))
            self._starts.add(start_s, began_s, ended_s)
            known.starts.add(start_s, began_s, ended_s)
            known.wholes.add(whole_s, began_s, ended_s)
            later = [(load.overhead_s - whole_s) / load.way.hops for load in alike if load.way.hops]
            if later:
                known.hops.add(median(later), began_s, ended_s)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def of(self, model_hash: str, kind: SourceKind) -> Overhead:
        """Of loads of that model from copies of that kind."""
        known = self._known.get((model_hash, kind)) or _Known()
        any_start_s = self._starts.median(ASSUMED_START_S)
        whole_s = known.wholes.median(any_start_s)
        start_s = min(whole_s, known.starts.median(any_start_s))
        return Overhead(whole_s, start_s, known.hops.median(ASSUMED_HOP_S))

    def added_to(self, planned: WorkerChains, model_hash: str) -> WorkerChains:
        """The chains with the overhead of each hop whose time is predicted, and what that comes to in words."""
        ways = ways_of(planned.chains)
        overheads = {kind: self.of(model_hash, kind) for kind in {way.kind for way in ways.values()}}

        def with_overhead(hop: Hop) -> Hop:
            if not hop.predicted_finish_s:
                return hop
            way = ways[hop.targets[0]]
            return msgspec.structs.replace(hop, overhead_s=overheads[way.kind].after(way.hops))

        chains = tuple(
            Chain(hops=tuple(map(with_overhead, chain.hops)), chunk_bytes=chain.chunk_bytes) for chain in planned.chains
        )
        return dataclasses.replace(planned, chains=chains, explain=(*planned.explain, *_in_words(chains)))


def ways_of(chains: Iterable[Chain]) -> dict[str, Way]:
    """By target."""
    ways: dict[str, Way] = {}
    for chain in chains:
        for hop in chain.hops:
            before = [ways[s.source] for s in hop.stripes if s.source_kind == "gpu" and s.source in ways]
            if before:
                longest = max(before, key=lambda way: way.hops)
                way = Way(longest.kind, longest.hops + 1)
            else:
                way = Way(next((s.source_kind for s in hop.stripes if s.source not in hop.targets), "host"), 0)
            ways.update(dict.fromkeys(hop.targets, way))
    return ways


def _in_words(chains: Iterable[Chain]) -> tuple[str, ...]:
    hops = [hop for chain in chains for hop in chain.hops]
    if not hops or not all(hop.predicted_finish_s for hop in hops):
        return ()
    last = max(hops, key=lambda hop: hop.predicted_finish_s + hop.overhead_s)
    whole_s = last.predicted_finish_s + last.overhead_s
    return (
        f"whole in about {whole_s:.3f} s: {last.predicted_finish_s:.3f} s at these rates, and {last.overhead_s:.3f} s "
        "beside them, as loads before took",
    )


class _Recent:
    """The last few of something."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=NUM_RECENT)
        self._ended_s = -math.inf
        """When the first operation ended of those that the newest one is of."""

    def add(self, time_s: float, began_s: float, ended_s: float) -> None:
        """What an operation took between these moments, in the order in which operations ended."""
        time_s = min(max(time_s, -MAX_OVERHEAD_S), MAX_OVERHEAD_S)
        if began_s < self._ended_s:
            self._times_s[-1] = min(self._times_s[-1], time_s)
        else:
            self._times_s.append(time_s)
            self._ended_s = ended_s

    def median(self, assumed_s: float) -> float:
        """The lower one of two. Not below 0, though a link may be faster than is known."""
        times_s = sorted([assumed_s, *self._times_s][-NUM_RECENT:])
        return max(0.0, times_s[(len(times_s) - 1) // 2])


@dataclass(frozen=True, slots=True)
class _Known:
    """Of a model from one kind of source."""

    starts: _Recent = field(default_factory=_Recent)
    wholes: _Recent = field(default_factory=_Recent)
    hops: _Recent = field(default_factory=_Recent)
