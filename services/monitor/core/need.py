"""How many colocated instances a load needs (paper section 5.3), in units of one instance:

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


@dataclass(frozen=True, slots=True)
class Load:
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


def need_of(load: Load, one: Capability, *, slack_s: float) -> Need:
    """The formula above. It never falls when any part of the load grows."""
    rate = max(load.arrived_tokens_per_s, min(load.burst_tokens, load.waiting_tokens) / slack_s)
    overdue = min(1.0, load.overdue_tokens / (one.tokens_per_s * slack_s))
    prefill = min(rate / one.tokens_per_s + overdue, load.prompts)
    decode = load.decoding_requests / one.max_decodes
    most = max(prefill + decode, load.memory, load.running_requests / one.running_limit)
    return Need(min(most, load.requests), prefill, decode, load.memory)


def max_decodes(base_s: float, request_s: float, slo_tbt_s: float) -> float:
    """Requests that one instance can decode at once, each step within the objective; infinite where no number of
    instances would help.

    A step of ``n`` takes ``base_s + n * request_s``. If it takes too long however few requests there are, more
    instances do not make it shorter.
    """
    if not (0 <= base_s < slo_tbt_s and request_s > 0):
        return inf
    return max(1.0, (slo_tbt_s - base_s) / request_s)
