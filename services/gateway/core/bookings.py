"""What each instance holds: this gateway's requests, those promised to a decode instance, and other gateways' by its
reports; and what those gateways want from a model's instances, by theirs.

Rules
- A request is booked at one instance, and counts there until it is released or another instance takes it over.
- The promise to a decode instance lasts as long as the request stays where it was sent: it ends with the booking, and
  when the request moves to any other instance.
- An instance's report counts the requests of all gateways. Requests in it beyond those of ours that the instance had
  accepted by then belong to other gateways. A request of ours that it has accepted, and whose acceptance is still on
  its way here, counts as theirs until the next report: this overestimates rather than underestimates.
- Each gateway places requests by itself. While others have requests for a model too, it counts their load at the
  instances, and leaves them their share of what waits there; alone, it takes everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from services.gateway.core.stream import StreamState
from shared.messages.load import LoadReport, ModelQueue, QueueReport

EXPECTED_OUTPUT_TOKENS = 256
"""``max_tokens`` says little about how long an answer will be, so it counts only up to this."""
FRESH_S = 3.0
"""An older report says nothing about the present."""


def outstanding_tokens(stream: StreamState) -> int:
    """What a request counts where it is booked."""
    remaining = stream.sampling.max_tokens - len(stream.output_token_ids)
    return stream.num_known_tokens + min(remaining, EXPECTED_OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True)
class ForeignLoad:
    """What other gateways have at one instance."""

    requests: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0
    outstanding_tokens: int = 0


NOTHING = ForeignLoad()


@dataclass(slots=True)
class InstanceLoad:
    """What is at one instance. Promised requests are still at the instance that computes their prompt."""

    inflight_requests: int = 0
    unstarted_requests: int = 0
    unstarted_tokens: int = 0
    outstanding_tokens: int = 0
    promised_requests: int = 0
    promised_tokens: int = 0
    suspended_until_s: float = -math.inf
    refusals: int = 0
    """How many times in a row it has refused as full."""
    accepted_requests: int = 0
    """Of those in flight: the instance's reports count them."""
    accepted_unstarted_requests: int = 0
    accepted_unstarted_tokens: int = 0
    slots_taken_at_s: float = -math.inf
    """When it refused a request for lack of a free slot, if it has not reported since."""
    foreign: ForeignLoad = NOTHING
    foreign_at_s: float = -math.inf

    @property
    def slots_taken(self) -> bool:
        """Whether it has no free slot, whatever else is known of it."""
        return self.slots_taken_at_s > -math.inf

    @property
    def decode_tokens(self) -> int:
        """Outstanding tokens of ours, those promised included."""
        return self.outstanding_tokens + self.promised_tokens

    def foreign_in(self, report: LoadReport) -> ForeignLoad:
        """The part of a report that belongs to other gateways."""
        reported = report.queued_requests + report.running_requests
        requests = max(0, reported - self.accepted_requests)
        if not requests:
            return NOTHING
        tokens = requests * (report.queued_tokens + report.running_tokens) // reported
        return ForeignLoad(
            requests=requests,
            queued_requests=max(0, report.queued_requests - self.accepted_unstarted_requests),
            queued_tokens=max(0, report.queued_tokens - self.accepted_unstarted_tokens),
            outstanding_tokens=tokens + requests * EXPECTED_OUTPUT_TOKENS,
        )


@dataclass(slots=True)
class _Booking:
    instance_id: str
    known_tokens: int
    outstanding_tokens: int
    unstarted: bool
    decode_instance_id: str
    """Empty if the request was promised to no instance."""
    accepted: bool = False


class Bookings:
    """The bookings by request, and the loads by instance that they add up to."""

    def __init__(self, changed: Callable[[str], None] | None = None) -> None:
        """``changed`` is called with each instance whose load changes."""
        self._changed = changed if changed is not None else lambda _: None
        self._loads: dict[str, InstanceLoad] = {}
        self._bookings: dict[str, _Booking] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._bookings

    def load_of(self, instance_id: str) -> InstanceLoad:
        """What is at an instance."""
        load = self._loads.get(instance_id)
        if load is None:
            load = self._loads[instance_id] = InstanceLoad()
        return load

    def book(self, stream: StreamState, instance_id: str, *, decode_instance_id: str = "") -> None:
        """The request goes to that instance, and is promised to the decode instance if one is named."""
        booking = _Booking(
            instance_id,
            stream.num_known_tokens,
            outstanding_tokens(stream),
            unstarted=True,
            decode_instance_id=decode_instance_id,
        )
        self._bookings[stream.request_id] = booking
        self._count(booking, 1)

    def accepted(self, request_id: str) -> None:
        """The instance has the request. Unknown requests are ignored."""
        booking = self._bookings.get(request_id)
        if booking is not None:
            self.load_of(booking.instance_id).refusals = 0
            if not booking.accepted:
                self._count(booking, -1)
                booking.accepted = True
                self._count(booking, 1)

    def started(self, request_id: str) -> None:
        """The request's prompt no longer waits at its instance. Unknown requests are ignored."""
        self.accepted(request_id)
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
            booking.accepted = True
            self._count(booking, 1)

    def release(self, request_id: str) -> None:
        """The request no longer holds anything anywhere. Unknown requests are ignored."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            self._count(booking, -1)

    def reported(self, report: LoadReport, now_s: float) -> None:
        """Take an instance's load report, which counts the requests of all gateways."""
        load = self.load_of(report.instance_id)
        load.foreign_at_s = now_s
        foreign = load.foreign_in(report)
        if foreign != load.foreign or load.slots_taken:
            load.foreign, load.slots_taken_at_s = foreign, -math.inf
            self._changed(report.instance_id)

    def prune(self, known: Set[str], now_s: float) -> None:
        """Forget the loads of instances that are not ``known`` and neither hold nor were promised anything of ours, and
        what was reported too long ago."""
        for instance_id, load in self._loads.items():
            at_s = max(load.foreign_at_s, load.slots_taken_at_s)
            if (load.foreign is not NOTHING or load.slots_taken) and now_s - at_s > FRESH_S:
                load.foreign, load.slots_taken_at_s = NOTHING, -math.inf
                self._changed(instance_id)
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
        if booking.accepted:
            load.accepted_requests += sign
            if booking.unstarted:
                load.accepted_unstarted_requests += sign
                load.accepted_unstarted_tokens += sign * booking.known_tokens
        self._changed(booking.instance_id)
        if booking.decode_instance_id:
            promised = self.load_of(booking.decode_instance_id)
            promised.promised_requests += sign
            promised.promised_tokens += sign * booking.outstanding_tokens
            self._changed(booking.decode_instance_id)


FRESH_QUEUES_S = 2.0
"""A gateway that has not reported for longer (it does every 0.1 s) wants nothing."""


@dataclass(frozen=True, slots=True)
class Contention:
    """Of one model."""

    num_gateways: int = 1
    """Those with requests for the model, this one included."""
    head_tokens: int = 0
    """The largest prompt that is next in another gateway's queue."""
    waiting: bool = False
    """Whether another gateway has requests that wait."""


ALONE = Contention()


class OtherGateways:
    """The latest reports by gateway."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._heard: dict[str, tuple[float, frozenset[str]]] = {}
        """When each gateway reported last, and the models that it had requests for."""
        self._wanted: dict[str, dict[str, ModelQueue]] = {}
        """By model, then by gateway."""

    def take(self, report: QueueReport, now_s: float) -> Set[str]:
        """Keep a report; one of this gateway's own is ignored. Returns the models that it says something new about, or
        nothing any more."""
        gateway_id = report.gateway_id
        if gateway_id == self._gateway_id:
            return frozenset()
        wanted = {queue.model: queue for queue in report.models if queue.queued_requests or queue.inflight_requests}
        _, before = self._heard.get(gateway_id, (now_s, frozenset[str]()))
        self._heard[gateway_id] = (now_s, frozenset(wanted))
        for model, queue in wanted.items():
            self._wanted.setdefault(model, {})[gateway_id] = queue
        self._withdraw(gateway_id, before - wanted.keys())
        return before | wanted.keys()

    def expire(self, now_s: float) -> Set[str]:
        """Forget the gateways that fell silent. Returns the models that they had requests for."""
        silent = [name for name, (at_s, _) in self._heard.items() if now_s - at_s > FRESH_QUEUES_S]
        models: set[str] = set()
        for gateway_id in silent:
            _, wanted = self._heard.pop(gateway_id)
            self._withdraw(gateway_id, wanted)
            models |= wanted
        return models

    def _withdraw(self, gateway_id: str, models: Iterable[str]) -> None:
        for model in models:
            queues = self._wanted[model]
            del queues[gateway_id]
            if not queues:
                del self._wanted[model]

    def queued(self, model: str) -> int:
        """Requests that wait in the others' queues."""
        return sum(queue.queued_requests for queue in self._wanted.get(model, {}).values())

    def about(self, model: str) -> Contention:
        """What the others want of that model."""
        wanted = self._wanted.get(model, {}).values()
        if not wanted:
            return ALONE
        return Contention(
            num_gateways=1 + len(wanted),
            head_tokens=max(queue.head_tokens for queue in wanted),
            waiting=any(queue.queued_requests for queue in wanted),
        )
