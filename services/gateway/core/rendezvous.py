"""Two instances for each of many places, by rendezvous hashing: every gateway names the same ones without a word.

Each place has a number for each instance, and the two with the highest are its own. So an instance that comes takes its
share of places from all others, and one that goes leaves its places to their next ones: nothing else moves. That the
second is of the same numbers as the first makes them two, always.

A place is looked at when it is asked for: at the first time all instances are, later only those that came since. The
cost of an answer does not grow with the number of instances but once per place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

NUM_PLACES = 4096
"""Many beside the instances of a model, so that each has about as many."""
CHOICES = 2


@dataclass(slots=True)
class _Place:
    best: list[tuple[int, str]] = field(default_factory=list)
    """The highest numbers, and whose they are."""
    num_seen: int = 0
    """Of the instances that came, in their order."""


class Rendezvous:
    """The places of one model. ``secret``: without it nobody can say which prompts meet at an instance."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret
        self._there: set[str] = set()
        self._came: list[str] = []
        """Those that are there, in the order in which they came."""
        self._places: dict[int, _Place] = {}

    def keep(self, instance_ids: Iterable[str]) -> None:
        """These instances are there, and no others."""
        there = set(instance_ids)
        if there == self._there:
            return
        gone = self._there - there
        if gone:
            self._came = [instance_id for instance_id in self._came if instance_id not in gone]
            self._places = {}
        self._came += sorted(there - self._there)
        self._there = there

    def of(self, number: int) -> list[str]:
        """Of the place of anything with that number, the first one first; one or none where there are no more."""
        return self._at(number % NUM_PLACES)

    def _at(self, place: int) -> list[str]:
        found = self._places.get(place)
        if found is None:
            found = self._places[place] = _Place()
        if found.num_seen < len(self._came):
            new = [(self._number(place, instance_id), instance_id) for instance_id in self._came[found.num_seen :]]
            found.best = sorted([*found.best, *new], reverse=True)[:CHOICES]
            found.num_seen = len(self._came)
        return [instance_id for _, instance_id in found.best]

    def _number(self, place: int, instance_id: str) -> int:
        about = f"{place} {instance_id}".encode()
        return int.from_bytes(hashlib.blake2b(about, digest_size=8, key=self._secret).digest())
