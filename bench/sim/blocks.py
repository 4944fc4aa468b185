"""A model cut into blocks, and copies of it that come block by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.sim.binomial import binomial_pipeline
from bench.sim.fabric import Path
from bench.sim.flows import Network
from bench.sim.loading import Load, Weights

NUM_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Blocks:
    """A model cut into equal parts, between tensors: a layer may lie in two."""

    num_bytes: float
    """Of each."""
    layer_shares: tuple[float, ...]
    """Of all layers' bytes, that are in each block: embeddings and head are nothing to compute."""

    @classmethod
    def of(cls, weights: Weights, number: int = NUM_BLOCKS) -> Blocks:
        """``number`` blocks."""
        ends = weights.layer_ends
        last = ends[-1]
        first = ends[0] - (last - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 1 - last
        parts = [
            max(0.0, min(last, (block + 1) / number) - max(first, block / number)) / (last - first)
            for block in range(number)
        ]
        return cls(weights.num_bytes / number, tuple(parts))

    def __len__(self) -> int:
        return len(self.layer_shares)


@dataclass(frozen=True, slots=True)
class Group:
    """A source and its receivers, by worker id, and the block that it begins with."""

    source: str
    receivers: tuple[str, ...]
    first_block: int


def groups_of(
    sources: Sequence[str], receivers: Sequence[str], num_blocks: int, domain: Callable[[str], str]
) -> tuple[Group, ...]:
    """A group for each source, as even as they come: receivers go to a source of their own domain while one has room.
    The sources' orders of blocks are shifted against each other. ``sources``: the first are preferred."""
    if not receivers:
        return ()
    room = -(-len(receivers) // len(sources))
    found: dict[str, list[str]] = {}
    for receiver in receivers:
        source = min(
            [one for one in sources if len(found.get(one, ())) < room],
            key=lambda one: (domain(one) != domain(receiver), len(found.get(one, ())), sources.index(one)),
        )
        found.setdefault(source, []).append(receiver)
    return tuple(
        [
            Group(source, tuple(theirs), number * num_blocks // len(found))
            for number, (source, theirs) in enumerate(found.items())
        ]
    )


class BlockSend(NamedTuple):
    """A block, between workers."""

    source: str
    """"": the memory of the target's host."""
    target: str
    block: int


def multicast(group: Group, num_blocks: int) -> list[BlockSend]:
    """A binomial pipeline from the source to its receivers."""
    members = (group.source, *group.receivers)
    steps = binomial_pipeline(len(group.receivers), num_blocks, first_block=group.first_block)
    return [BlockSend(members[send.source], members[send.target], send.block) for step in steps for send in step]


def from_host(target: str, num_blocks: int, *, first_block: int) -> list[BlockSend]:
    """All blocks out of the own host's memory."""
    return [BlockSend("", target, (first_block + i) % num_blocks) for i in range(num_blocks)]


class BlockTransfer:
    """Sends in a fixed order, each as soon as its sender has the block and both are through with what came before.

    One at a time into a member and out of it; no step waits for members that have nothing to do with it.
    """

    def __init__(
        self,
        network: Network,
        sends: Iterable[BlockSend],
        loads: Mapping[str, Load],
        blocks: Blocks,
        path: Callable[[BlockSend], Path],
        on_block: Callable[[Load, int], None],
    ) -> None:
        """``loads``: of the targets. ``on_block``: a load has a block now."""
        self._network = network
        self._loads = loads
        self._blocks = blocks
        self._path = path
        self._on_block = on_block
        self._out: dict[str, deque[BlockSend]] = {}
        self._into: dict[str, deque[BlockSend]] = {}
        for send in sends:
            self._out.setdefault(send.source, deque()).append(send)
            self._into.setdefault(send.target, deque()).append(send)
        self._held: dict[str, set[int]] = {target: set() for target in self._into}
        self._running: set[BlockSend] = set()

    def begin(self) -> None:
        """Start what can start."""
        for member in list(self._out):
            self._look(member)

    @property
    def over(self) -> bool:
        """Whether everything is there."""
        return not any(self._out.values())

    def sends(self, worker_id: str) -> bool:
        """Whether it has something still to send."""
        return bool(self._out.get(worker_id))

    def _look(self, member: str) -> None:
        """Its next block, if it can go."""
        queue = self._out.get(member)
        if not queue or queue[0] in self._running:
            return
        send = queue[0]
        is_there = member not in self._held or send.block in self._held[member]
        if not is_there or self._into[send.target][0] != send:
            return
        self._running.add(send)
        load = self._loads[send.target]
        load.flows[send.block] = self._network.start(
            self._path(send),
            self._blocks.num_bytes,
            on_end=lambda _flow: self._ended(send),
            purpose="weights",
        )

    def _ended(self, send: BlockSend) -> None:
        self._running.remove(send)
        self._out[send.source].popleft()
        coming = self._into[send.target]
        coming.popleft()
        self._held[send.target].add(send.block)
        self._on_block(self._loads[send.target], send.block)
        next_senders = [coming[0].source] if coming else []
        for member in (send.source, send.target, *next_senders):
            self._look(member)
