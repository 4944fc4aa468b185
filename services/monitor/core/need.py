"""How many instances a load needs (paper section 5.3), in units of one instance. Colocated ones:

    rate    = max(arrived / window, min(arrived within the slack, waiting) / slack)
    overdue = waiting - arrived within the slack
    prefill = min(rate / capacity + min(1, overdue / (capacity · slack)), prompts)
    decode  = decoding requests / requests that one instance can decode within the TBT objective
    memory  = KV blocks used / (KV blocks of one instance · upper bound)
    needed  = min(max(prefill + decode, memory, running requests / running limit), requests)

``arrived`` and ``waiting`` are prompt tokens; ``capacity`` is prompt tokens per second of one instance, times the
utilisation to plan with. An instance's time is shared by prefill and decode, so they add up; memory is used beside it.

A prompt counts once. What arrives steadily is asked for by its rate, whether it waits or not; a burst by the slack in
which it should be computed, if that is more. What waits for longer than that adds one instance at most, which works it
off: most of it waits because instances are on their way, and those were asked for when it came.

A request runs on one instance. So prompts never ask for more instances than there are ``prompts`` that arrived lately
or wait, and nothing asks for more than there are ``requests``.

Of a model that is served disaggregated, prefill instances are needed for ``prefill`` alone, and decode instances for

    at once = max(running, min(running + coming + growth, flow · residence))
    decode  = max(at once, min(arrived, flow · residence)) / (requests that one instance can decode within the TBT
              objective · utilisation)
    memory  = KV blocks used + (at once - there) · KV blocks of a request and its expected output
    needed  = min(max(decode, memory, at once / running limit), at once)

``running`` are the requests whose prompts are computed, those included that are not ``there`` (at decode instances)
yet; ``coming`` the ones whose prompts wait or are being computed. These do not all decode at once: each decodes for its
``residence``, and no more come in that time than prefill lets ``flow`` (Little's law). What ``arrived`` within a
residence counts, too: more instances decode faster, so there are fewer requests at once, and by these alone the
instances would not seem to be needed. ``growth`` is 0, but for pre-scaling (``services.monitor.core.prescaling``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Capability:
    """What one instance can do."""

    tokens_per_s: float
    """Prompt tokens, as planned with."""
    max_decodes: float = inf
    """Running requests at which a decode step takes as long as the TBT objective allows."""
    running_limit: float = inf
    """Running requests that it should have at most, whatever they do."""
    decode_base_s: float = 0.0
    """A decode step of n requests takes ``decode_base_s + n * decode_request_s``; both 0: not known."""
    decode_request_s: float = 0.0

    def step_s(self, num_requests: float) -> float:
        """Seconds of a decode step; infinite if not known."""
        return self.decode_base_s + num_requests * self.decode_request_s or inf


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """What there is to do for one model."""

    arrived_tokens_per_s: float = 0.0
    """Over the window."""
    burst_tokens: float = 0.0
    """Arrived within the slack."""
    waiting_tokens: float = 0.0
    overdue_tokens: float = 0.0
    """Of these, the ones that arrived before that."""
    prompts: float = 0.0
    """Requests that wait or have arrived within the window, whichever is more."""
    running_requests: int = 0
    decoding_requests: int = 0
    """Of the running ones, those whose prompt is computed."""
    memory: float = 0.0
    """KV blocks used, in instances filled up to the upper bound."""
    requests: int = 0
    """In the system."""


@dataclass(frozen=True, slots=True)
class Need:
    """Instances, before rounding: in all, and the parts that an operator is told."""

    instances: float
    prefill: float
    decode: float
    memory: float


def shown_requests(number: float) -> str:
    """In words."""
    return "no request" if round(number) == 0 else "1 request" if round(number) == 1 else f"{number:.0f} requests"


def need_of(load: ModelLoad, one: Capability, *, slack_s: float) -> Need:
    """The formula above. It never falls when any part of the load grows."""
    rate = max(load.arrived_tokens_per_s, min(load.burst_tokens, load.waiting_tokens) / slack_s)
    overdue = min(1.0, load.overdue_tokens / (one.tokens_per_s * slack_s))
    prefill = min(rate / one.tokens_per_s + overdue, load.prompts)
    decode = load.decoding_requests / one.max_decodes
    most = max(prefill + decode, load.memory, load.running_requests / one.running_limit)
    return Need(min(most, load.requests), prefill, decode, load.memory)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What there is to decode, and will be, for one model that is served disaggregated."""

    running: float = 0.0
    """Requests whose prompts are computed, wherever they are."""
    there: float = 0.0
    """Of these, at decode instances."""
    coming: float = 0.0
    """Requests whose prompts are not computed."""
    growth: float = 0.0
    """Requests that are expected beyond these."""
    arrived: float = 0.0
    """Requests, within as long as a request decodes."""
    flow_per_s: float = 0.0
    """Requests whose prompts are computed per second."""
    residence_s: float = inf
    """For which a request decodes, in steps as long as the TBT objective allows."""
    memory: float = 0.0
    """KV blocks used by those there, in instances filled up to the upper bound."""
    request_memory: float = 0.0
    """Of one of the others, with its expected output."""

    @property
    def let(self) -> float:
        """Requests whose prompts are computed within a residence."""
        return self.flow_per_s * self.residence_s if self.flow_per_s else 0.0

    @property
    def at_once(self) -> float:
        """Requests that decode at the same time."""
        return max(self.running, min(self.running + self.coming + self.growth, self.let))


def decode_need_of(load: DecodeLoad, one: Capability) -> Need:
    """The formula above. It never falls when any part of the load grows."""
    at_once = load.at_once
    decode = max(at_once, min(load.arrived, load.let)) / one.max_decodes
    memory = load.memory + (at_once - load.there) * load.request_memory
    return Need(min(max(decode, memory, at_once / one.running_limit), at_once), 0.0, decode, memory)


def worth_moving(decode_lacks: float, prefill_needed: float, num_prefill: int) -> int:
    """How many of ``num_prefill`` instances that serve had better decode at once, while others load in their place.

    An instance has to load either way, and meanwhile one of the roles lacks it. What that costs is how long the load
    takes, times what the role lacks of it; the time is the same for both. ``decode_lacks``: instances, now;
    ``prefill_needed``: instances.
    """
    moved = 0
    while moved < num_prefill - 1:
        decode_loses = min(1.0, decode_lacks - moved)
        prefill_loses = min(1.0, max(0.0, prefill_needed - (num_prefill - moved - 1)))
        if decode_loses <= prefill_loses:
            break
        moved += 1
    return moved


def max_decodes(base_s: float, request_s: float, slo_tbt_s: float) -> float:
    """Requests that one instance can decode at once, each step within the objective; infinite where no number of
    instances would help.

    A step of ``n`` takes ``base_s + n * request_s``. If it takes too long however few requests there are, more
    instances do not make it shorter.
    """
    if not (0 <= base_s < slo_tbt_s and request_s > 0):
        return inf
    return max(1.0, (slo_tbt_s - base_s) / request_s)
