"""Where the running requests of an instance that goes may continue, with their KV. Pure.

Each instance that goes is named those with the most free KV, at most ``MAX_DESTINATIONS``, and how much KV each of them
should get: what one is promised, others do not count on, so that no destination is flooded. These are estimates, by
reports that are up to a moment old; the destinations themselves accept or refuse each request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.messages.common import DECODES_FOR_OTHERS, TAKES_PROMPTS, Role
from shared.messages.destinations import Destination, SendBack
from shared.subjects import Process

MAX_DESTINATIONS = 4
"""Named to one instance."""
SPARE_SHARE = 0.1
"""Of a destination's free KV, left to the requests that it has."""
DECODERS: dict[Role, tuple[Role, ...]] = {
    "colocated": ("colocated", "decode"),
    "prefill": ("decode", "colocated"),
    "decode": ("decode", "colocated"),
}
"""Who continues requests that an instance of that role decodes: the first of these roles that there are any of."""


@dataclass(frozen=True, slots=True)
class Goes:
    """An instance that goes."""

    instance_id: str
    role: Role
    kv_tokens: int
    """Of the KV that it holds."""
    context_tokens: int
    """Longest prompt plus output that its requests were promised."""


@dataclass(frozen=True, slots=True)
class Stays:
    """An instance of the same weights that serves on."""

    worker: Process
    instance_id: str
    role: Role
    free_kv_tokens: int
    free_slots: int
    context_tokens: int


class DestinationPicker:
    """For several instances of one model that go at the same time, one after the other."""

    def __init__(self, staying: Iterable[Stays]) -> None:
        self._free = {stays: int((1 - SPARE_SHARE) * stays.free_kv_tokens) for stays in staying}

    def of(self, goes: Goes) -> tuple[Destination, ...]:
        """Those with the most free KV first."""
        suitable: list[Stays] = []
        for role in DECODERS[goes.role]:
            suitable = suitable or [
                stays
                for stays, free in self._free.items()
                if stays.role == role and free > 0 < stays.free_slots and stays.context_tokens >= goes.context_tokens
            ]
        suitable.sort(key=lambda stays: (-self._free[stays], stays.instance_id))
        named = {stays: self._free[stays] for stays in suitable[:MAX_DESTINATIONS]}
        total = sum(named.values())
        for stays, free in named.items():
            self._free[stays] -= min(free, goes.kv_tokens * free // total)
        return tuple(
            Destination(
                worker_id=stays.worker.id,
                incarnation=stays.worker.incarnation,
                instance_id=stays.instance_id,
                kv_tokens=free,
            )
            for stays, free in named.items()
        )

    def send_back(self, goes: Goes, *, at_once: bool) -> SendBack:
        """What it gives back to gateways beside that. ``at_once``: another model waits for its worker, and nobody else
        gets what it has."""
        if self._taken_elsewhere(goes):
            return "waiting"
        decoded_elsewhere = any(stays.role in DECODES_FOR_OTHERS for stays in self._free)
        return "all" if at_once and not decoded_elsewhere else "none"

    def send_all_back(self, goes: Goes, *, at_once: bool) -> SendBack:
        """The same where KV stays where it is: what runs goes back as what waits does, unless nobody else takes it."""
        return "all" if at_once or self._taken_elsewhere(goes) else "none"

    def _taken_elsewhere(self, goes: Goes) -> bool:
        return any(stays.role in TAKES_PROMPTS and stays.instance_id != goes.instance_id for stays in self._free)
