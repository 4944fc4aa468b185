"""A batch of prompts, as both members of a pair see it; and how requests share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from services.worker.core.live.life import IllegalPairMove

Key = tuple[str, int]
"""Of a request: its id and attempt."""


class Request(msgspec.Struct, frozen=True, gc=False):
    """One that waits to be computed."""

    key: Key
    num_tokens: int
    """Prompt, and output of earlier attempts. It grows only once its batch is done."""


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One or more whole prefixes, computed together."""

    batch_id: str
    requests: tuple[Request, ...]
    layer_s: float
    """Expected seconds of one of its layers."""

    @property
    def num_tokens(self) -> int:
        return sum([r.num_tokens for r in self.requests])

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple([r.num_tokens for r in self.requests])

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple([r.key for r in self.requests])


def part_from(begin: int, num_tokens: int, most_tokens: int) -> int:
    """Where the part of a layer of so many tokens ends that is run next: parts are about equal, and of at most so many
    tokens."""
    left = num_tokens - begin
    return begin + -(-left // -(-left // most_tokens))


def packed(requests: Iterable[Request], most_tokens: int, most_requests: int) -> Iterator[tuple[Request, ...]]:
    """Requests in first-come order as batches of up to so many tokens and requests; a longer prefix is one by itself.

    Short prompts cost mostly the reading of the weights: together they cost it once.
    """
    pack: list[Request] = []
    num_tokens = 0
    for request in requests:
        if pack and (num_tokens + request.num_tokens > most_tokens or len(pack) == most_requests):
            yield tuple(pack)
            pack, num_tokens = [], 0
        pack.append(request)
        num_tokens += request.num_tokens
    if pack:
        yield tuple(pack)


class Place(StrEnum):
    """Whose a batch is, as its source knows."""

    WAITING = "waiting"
    HANDED_OVER = "handed over"
    PULLED = "pulled"
    BEGUN = "begun"
    TAKEN = "taken"
    BACK = "back"
    IN_DOUBT = "in doubt"
    UNWANTED = "unwanted"


MOVES: dict[Place, dict[Place, str]] = {
    Place.WAITING: {
        Place.HANDED_OVER: "the target is asked to take it, and may have it from now on",
        Place.BEGUN: "the target has no capacity, or no use for it",
        Place.BACK: "the pair ends",
    },
    Place.HANDED_OVER: {
        Place.WAITING: "the target refuses it",
        Place.PULLED: "the target gives it",
        Place.TAKEN: "the target finished it, or keeps it at the end",
        Place.BACK: "the pair ends, and the target does not own it",
        Place.IN_DOUBT: "the target is lost, and may own it: its requests end with an error",
        Place.UNWANTED: "all of its requests were cancelled before the target was asked",
    },
    Place.PULLED: {
        Place.BEGUN: "it has slots and blocks at the source",
        Place.BACK: "the pair ends before that",
    },
    Place.BEGUN: {},
    Place.TAKEN: {},
    Place.BACK: {},
    Place.IN_DOUBT: {},
    Place.UNWANTED: {},
}
"""All moves that there are, and when."""


class SourceBatch:
    """A batch of a pair, as its source knows it."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.batch_id = batch.batch_id
        self.place = Place.WAITING

    def move_to(self, place: Place) -> None:
        """Raises ``IllegalPairMove`` for what ``MOVES`` does not have."""
        if place not in MOVES[self.place]:
            raise IllegalPairMove(f"batch {self.batch_id} is {self.place} and cannot be {place}")
        self.place = place
