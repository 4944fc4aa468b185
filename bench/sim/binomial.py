"""Blocks from one source to many receivers, in as few steps as there can be: the binomial pipeline (Ganesan and
Seshadri, 2005; RDMC, DSN'18; λScale's λPipe multicasts with it).

In a step everyone sends at most one block and receives at most one. The members are the corners of a hypercube, the
source alone at one; in step ``t`` corners exchange along dimension ``t`` modulo their number: the source gives its
``t``-th block, the others the latest that they have and their neighbour has not. Where the members are no power of two,
some corners have two, which share a corner's work: one sends what leaves it and the other takes what comes, and gives
its fellow what that lacks. So each lacks one block at most when all corners are whole, and a last step exchanges these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Send(NamedTuple):
    """A block, from one member to another. Member 0 is the source, the receivers count from 1."""

    source: int
    target: int
    block: int


Step = tuple[Send, ...]


def binomial_pipeline(num_receivers: int, num_blocks: int, *, first_block: int = 0) -> tuple[Step, ...]:
    """⌈log2(receivers + 1)⌉ + blocks - 1 steps after which every receiver has every block.

    ``first_block``: the source gives the blocks in the order from this one on, round to the one before it.
    Raises ``ValueError`` without receivers or blocks.
    """
    if num_receivers < 1 or num_blocks < 1:
        raise ValueError(f"there is nothing to send: {num_blocks} blocks to {num_receivers} receivers")
    num_dimensions = (num_receivers + 1).bit_length() - 1
    corners = [_Corner((0,), num_blocks), *[_Corner((), 0) for _ in range((1 << num_dimensions) - 1)]]
    for receiver in range(1, num_receivers + 1):
        corner = corners[1 + (receiver - 1) % (len(corners) - 1)]
        corner.members = (*corner.members, receiver)
        corner.held[receiver] = set()
    steps = [
        _exchange(corners, 1 << (number % num_dimensions), min(number, num_blocks - 1))
        for number in range(num_dimensions + num_blocks - 1)
    ]
    last = [send for corner in corners for send in corner.inside(None, None)]
    if last:
        steps.append(last)
    return tuple([tuple([send._replace(block=(send.block + first_block) % num_blocks) for send in s]) for s in steps])


class _Corner:
    """One or two members, and what they have."""

    def __init__(self, members: tuple[int, ...], num_blocks: int) -> None:
        self.members = members
        self.held = {member: set(range(num_blocks)) for member in members}

    @property
    def blocks(self) -> set[int]:
        return set().union(*self.held.values())

    def sender(self, block: int) -> int:
        """Who sends it: one that has it, and of these the one that lacks something, which it can then be given."""
        return min([m for m in self.members if block in self.held[m]], key=lambda m: (len(self.held[m]), m))

    def receiver(self, sender: int | None) -> int:
        """Who takes what comes: not the one that sends; else the one that has most."""
        others = [member for member in self.members if member != sender] or list(self.members)
        return max(others, key=lambda m: (len(self.held[m]), -m))

    def inside(self, sender: int | None, receiver: int | None) -> list[Send]:
        """What the two give each other beside that."""
        return [
            Send(one, other, max(self.held[one] - self.held[other]))
            for one in self.members
            for other in self.members
            if one not in (other, sender) and other != receiver and self.held[one] - self.held[other]
        ]


def _exchange(corners: Sequence[_Corner], dimension: int, from_source: int) -> list[Send]:
    """One step; what the corners have is brought up to date."""
    leaving: list[int | None] = []
    for place, corner in enumerate(corners):
        lacking = corner.blocks - corners[place ^ dimension].blocks
        if place == 0:
            lacking &= {from_source}
        leaving.append(max(lacking, default=None))
    senders = [None if b is None else c.sender(b) for c, b in zip(corners, leaving, strict=True)]
    sends: list[Send] = []
    for place, corner in enumerate(corners):
        block, sender = leaving[place ^ dimension], senders[place ^ dimension]
        receiver = None
        if block is not None and sender is not None:
            receiver = corner.receiver(senders[place])
            sends.append(Send(sender, receiver, block))
        sends += corner.inside(senders[place], receiver)
    for send in sends:
        next(corner for corner in corners if send.target in corner.held).held[send.target].add(send.block)
    return sends
