"""What this gateway has at each instance: requests that are there, and those promised to a decode instance.

Rules
- A request is booked at one instance, and counts there until it is released or another instance takes it over.
- The promise to a decode instance lasts as long as the request is where it was sent: it ends with the booking, and
  when the request moves, wherever to.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from services.gateway.core.stream import StreamState

EXPECTED_OUTPUT_TOKENS = 256
"""``max_tokens`` says little about how long an answer becomes: it counts up to this."""


@dataclass(slots=True)
class InstanceLoad:
    """What this gateway has at one instance. Promised requests are still at the instance that computes their prompt."""

    inflight_requests: int = 0
    unstarted_requests: int = 0
    unstarted_tokens: int = 0
    outstanding_tokens: int = 0
    promised_requests: int = 0
    promised_tokens: int = 0
    suspended_until_s: float = -math.inf

    @property
    def decode_tokens(self) -> int:
        """Outstanding tokens, those promised included."""
        return self.outstanding_tokens + self.promised_tokens


@dataclass(slots=True)
class _Booking:
    instance_id: str
    known_tokens: int
    outstanding_tokens: int
    unstarted: bool
    decode_instance_id: str
    """Empty: nobody was promised the request."""


class Bookings:
    """The bookings by request, and the loads by instance that they add up to."""

    def __init__(self) -> None:
        self._loads: dict[str, InstanceLoad] = {}
        self._bookings: dict[str, _Booking] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._bookings

    def load_of(self, instance_id: str) -> InstanceLoad:
        """What we have at an instance."""
        return self._loads.setdefault(instance_id, InstanceLoad())

    def book(self, stream: StreamState, instance_id: str, *, decode_instance_id: str = "") -> None:
        """The request goes to that instance, and is promised to the decode instance if one is named."""
        known = stream.num_known_tokens
        remaining = stream.sampling.max_tokens - len(stream.output_token_ids)
        outstanding = known + min(remaining, EXPECTED_OUTPUT_TOKENS)
        booking = _Booking(instance_id, known, outstanding, unstarted=True, decode_instance_id=decode_instance_id)
        self._bookings[stream.request_id] = booking
        self._count(booking, 1)

    def started(self, request_id: str) -> None:
        """The request's prompt no longer waits at its instance. Unknown requests are ignored."""
        booking = self._bookings.get(request_id)
        if booking is not None and booking.unstarted:
            self._count(booking, -1)
            booking.unstarted = False
            self._count(booking, 1)

    def moved(self, request_id: str, instance_id: str) -> None:
        """Another instance took the request over. Unknown requests are ignored."""
        booking = self._bookings.get(request_id)
        if booking is not None:
            self._count(booking, -1)
            booking.instance_id = instance_id
            booking.decode_instance_id = ""
            self._count(booking, 1)

    def release(self, request_id: str) -> None:
        """The request holds nothing anywhere any more. Unknown requests are ignored."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            self._count(booking, -1)

    def prune(self, known: Set[str]) -> None:
        """Forget the loads of instances that are not ``known`` and neither hold nor were promised anything of ours."""
        self._loads = {
            instance_id: load
            for instance_id, load in self._loads.items()
            if instance_id in known or load.inflight_requests or load.promised_requests
        }

    def _count(self, booking: _Booking, sign: int) -> None:
        load = self.load_of(booking.instance_id)
        load.inflight_requests += sign
        load.outstanding_tokens += sign * booking.outstanding_tokens
        if booking.unstarted:
            load.unstarted_requests += sign
            load.unstarted_tokens += sign * booking.known_tokens
        if booking.decode_instance_id:
            promised = self.load_of(booking.decode_instance_id)
            promised.promised_requests += sign
            promised.promised_tokens += sign * booking.outstanding_tokens
