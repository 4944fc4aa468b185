"""Execution pipelines: receivers that together have all blocks of a model run it together while they load (λScale).

Each member takes requests and makes batches of them, as an instance that serves does; a batch runs through the stages
of the pipeline, each the blocks of one member, one after the other. So as many batches are under way as there are
members, and all of them compute. A member that has become whole runs its batches by itself from the next one on (mode
switching), and still runs its stage for those that have not; KV that others have of its requests it computes anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.sim.blocks import Blocks
from bench.sim.clock import Clock
from bench.sim.fabric import Path
from bench.sim.flows import BYTES_PER_GBIT, Network
from bench.sim.instance import SimInstance
from services.worker.core.scheduling.prompt_cost import num_pairs
from services.worker.core.scheduling.schedule import ScheduledBatch
from services.worker.core.scheduling.sequence import ActiveSequence


class Stage(NamedTuple):
    """Consecutive blocks that one member runs."""

    worker_id: str
    blocks: tuple[int, ...]


def cover(held: Mapping[str, set[int]], num_blocks: int) -> tuple[str, ...]:
    """Some of these workers that together hold all blocks, in the order given; none if they do not.

    One after another, each the one that adds most; then those that are not needed are left out.
    """
    chosen: list[str] = []
    missing = set(range(num_blocks))
    while missing:
        best = max(held, key=lambda name: len(held[name] & missing), default=None)
        if best is None or not held[best] & missing:
            return ()
        chosen.append(best)
        missing -= held[best]
    for name in list(chosen):
        others = [held[other] for other in chosen if other != name]
        if len(set[int]().union(*others)) == num_blocks:
            chosen.remove(name)
    return tuple([name for name in held if name in chosen])


def stages_of(held: Mapping[str, set[int]], num_blocks: int) -> tuple[Stage, ...]:
    """Which member runs which block: as even as what they hold allows, and in few stages."""
    even = -(-num_blocks // len(held))
    counts = dict.fromkeys(held, 0)
    stages: list[Stage] = []
    for block in range(num_blocks):
        holders = [name for name in held if block in held[name]]
        last = stages[-1] if stages else None
        if last is not None and last.worker_id in holders and counts[last.worker_id] < even:
            stages[-1] = Stage(last.worker_id, (*last.blocks, block))
        else:
            stages.append(Stage(min(holders, key=lambda name: counts[name]), (block,)))
        counts[stages[-1].worker_id] += 1
    return tuple(stages)


class Timeline:
    """What a GPU is taken for, from now on."""

    def __init__(self) -> None:
        self._begins_s: list[float] = []
        self._ends_s: list[float] = []

    @property
    def free_s(self) -> float:
        """From when on nothing is reserved."""
        return self._ends_s[-1] if self._ends_s else 0.0

    def reserve(self, now_s: float, from_s: float, seconds: float) -> float:
        """The first time from ``from_s`` on that is long enough; returns its end."""
        past = bisect_left(self._ends_s, now_s)
        del self._begins_s[:past], self._ends_s[:past]
        begin_s, place = from_s, bisect_left(self._ends_s, from_s)
        while place < len(self._begins_s) and self._begins_s[place] < begin_s + seconds:
            begin_s = max(begin_s, self._ends_s[place])
            place += 1
        self._begins_s.insert(place, begin_s)
        self._ends_s.insert(place, begin_s + seconds)
        return begin_s + seconds


@dataclass(eq=False, slots=True)
class Receiver:
    """An instance that loads, or that became whole in a pipeline whose other members load."""

    worker_id: str
    instance: SimInstance
    blocks: set[int] = field(default_factory=set)
    whole: bool = False
    pipeline: Pipeline | None = None
    timeline: Timeline = field(default_factory=Timeline)


class Pipelines:
    """All of one model."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        blocks: Blocks,
        path: Callable[[str, str], Path],
        hidden_bytes_per_token: int,
        message_s: float,
        on_formed: Callable[[str], None],
    ) -> None:
        """``path``: from a worker to another. ``message_s``: what hidden states take beside their bytes' time.
        ``on_formed``: a worker is in a pipeline from now on."""
        self.clock = clock
        self.blocks = blocks
        self._network = network
        self._path = path
        self._hidden_bytes_per_token = hidden_bytes_per_token
        self.message_s = message_s
        self._on_formed = on_formed
        self._receivers: dict[str, Receiver] = {}
        self.num_formed = 0

    def add(self, worker_id: str, instance: SimInstance) -> None:
        """It loads, and takes prompts."""
        self._receivers[worker_id] = Receiver(worker_id, instance)

    def has(self, worker_id: str, block: int) -> None:
        """A block is there."""
        receiver = self._receivers.get(worker_id)
        if receiver is None:
            return
        receiver.blocks.add(block)
        free = {
            name: one.blocks
            for name, one in self._receivers.items()
            if one.pipeline is None and len(one.blocks) < len(self.blocks)
        }
        members = cover(free, len(self.blocks))
        if members:
            self._form([self._receivers[name] for name in members])

    def _form(self, members: Sequence[Receiver]) -> None:
        self.num_formed += 1
        stages = stages_of({one.worker_id: one.blocks for one in members}, len(self.blocks))
        pipeline = Pipeline(self, {one.worker_id: one for one in members}, stages)
        for one in members:
            one.pipeline = pipeline
            one.instance.pipeline = PipelinedSteps(pipeline, one)
        for one in members:
            self._on_formed(one.worker_id)

    def whole(self, worker_id: str) -> None:
        """It needs the others no more."""
        receiver = self._receivers.pop(worker_id, None)
        if receiver is not None:
            receiver.whole = True

    def needs(self, worker_id: str) -> bool:
        """Whether others run through a worker's blocks."""
        pipelines = [one.pipeline for one in self._receivers.values() if one.pipeline is not None]
        return any(worker_id in pipeline.members for pipeline in pipelines)

    def send(self, source: str, target: str, num_tokens: int, at_s: float) -> float:
        """Hidden states go from one worker to the next then; returns when they are there. They are on the network, but
        wait for nothing there."""
        path, num_bytes = self._path(source, target), num_tokens * self._hidden_bytes_per_token

        def start() -> None:
            self._network.start(path, num_bytes, purpose="activations")

        self.clock.at(at_s, start)
        return at_s + self.message_s + num_bytes / (min([link.gbps for link in path]) * BYTES_PER_GBIT)


class Pipeline:
    """Some receivers, and who runs what."""

    def __init__(self, pipelines: Pipelines, members: Mapping[str, Receiver], stages: tuple[Stage, ...]) -> None:
        self.members = members
        self.stages = stages
        self._pipelines = pipelines

    @property
    def over(self) -> bool:
        """Whether all of its members are whole."""
        return all(one.whole for one in self.members.values())

    def run(self, head: Receiver, num_tokens: int, seconds: float) -> float:
        """A batch of ``head`` through all stages; returns when it is through."""
        now_s, message_s = self._pipelines.clock.now_s, self._pipelines.message_s
        layer_shares = self._pipelines.blocks.layer_shares
        # What it begins with are tokens, and what it ends with is told to the head.
        at_s, place = now_s, head.worker_id
        for number, stage in enumerate(self.stages):
            if stage.worker_id != place:
                at_s = self._pipelines.send(place, stage.worker_id, num_tokens, at_s) if number else at_s + message_s
            place = stage.worker_id
            share = sum([layer_shares[block] for block in stage.blocks])
            at_s = self.members[place].timeline.reserve(now_s, at_s, share * seconds)
        return at_s if place == head.worker_id else at_s + message_s


class PipelinedSteps:
    """What an instance's engine asks instead of a profile while a pipeline runs its batches."""

    def __init__(self, pipeline: Pipeline, receiver: Receiver) -> None:
        self._pipeline = pipeline
        self._receiver = receiver
        self._elsewhere: dict[tuple[str, int], ActiveSequence] = {}
        """Requests of which others have KV."""

    def batch_s(self, batch: ScheduledBatch, now_s: float) -> float:
        """How long a batch takes that begins now."""
        receiver, compute = self._receiver, self._receiver.instance.compute
        seconds = compute.batch_s(batch)
        if not receiver.whole:
            num_tokens = sum([piece.num_tokens for piece in batch.slices])
            self._elsewhere |= {piece.sequence.key: piece.sequence for piece in batch.slices}
            return self._pipeline.run(receiver, num_tokens, seconds) - now_s
        seconds += self._again_s(batch)
        end_s = receiver.timeline.reserve(now_s, now_s, seconds)
        if self._pipeline.over and not self._elsewhere and receiver.timeline.free_s <= end_s:
            receiver.instance.pipeline = None
        return end_s - now_s

    def _again_s(self, batch: ScheduledBatch) -> float:
        """For what the batch's requests have of KV elsewhere."""
        again = [piece.start for piece in batch.slices if self._elsewhere.pop(piece.sequence.key, None) and piece.start]
        self._elsewhere = {key: s for key, s in self._elsewhere.items() if not s.finished and not s.reserved}
        if not again:
            return 0.0
        return self._receiver.instance.compute.step_s(sum(again), sum([num_pairs(0, start) for start in again]), 0, 0)
