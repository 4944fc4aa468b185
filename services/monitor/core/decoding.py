"""What there is to decode of a model that is served disaggregated, as far as reports say; and pre-scaling.

``services.monitor.core.need`` has the formula, ``services.monitor.core.prescaling`` says when it is asked for ahead.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from services.monitor.core.need import Capability, DecodeLoad, Need, decode_need_of, shown_requests
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.prescaling import Rise
from services.monitor.core.reported import ARRIVALS_S, Reported, serving, waiting_requests

MAX_RESIDENCE_S = 3600.0
"""Arrivals are extrapolated no further."""


class DecodeNeed(NamedTuple):
    """What decode instances are needed for; in words when asked."""

    load: DecodeLoad
    need: Need
    now: float = 0.0
    """Instances that the requests whose prompts are computed need, each filled as far as objectives and memory let."""
    prefill: tuple[float, float] | None = None
    """What prefill needs and usually needed, if decode is asked for ahead."""

    def __str__(self) -> str:
        load, need = self.load, self.need
        ahead = ""
        if self.prefill is not None:
            ahead = (
                f"; pre-scaled: prefill needs {self.prefill[0]:.3g} instances instead of {self.prefill[1]:.3g}, and "
                f"lets {load.flow_per_s:.1f} requests/s come"
            )
        return (
            f"decoding fills {need.decode:.2f} instances, KV {need.memory:.2f} ({shown_requests(load.at_once)} "
            f"at once: {load.running:.0f} are, {load.coming:.0f} have prompts to compute){ahead}"
        )


_NOTHING = DecodeNeed(DecodeLoad(), Need(0.0, 0.0, 0.0, 0.0))


class Decoding:
    """Of one model. Times are of one clock."""

    def __init__(self, policy: DemandPolicy, reported: Reported) -> None:
        self._policy = policy
        self._reported = reported
        self._rise = Rise()

    def rest(self, now_s: float) -> DecodeNeed:
        """There is no request anywhere."""
        self._rise.follow(0.0, now_s, self._policy.rate_window_s)
        return _NOTHING

    def need(self, one: Capability, prefill_needed: float, load_s: float, now_s: float) -> DecodeNeed:
        """``one``: what an instance can do; ``prefill_needed``: prefill instances; ``load_s``: to bring one up."""
        policy, reported = self._policy, self._reported
        takers = [r for r in reported.instances("prefill") if r.state != "draining"]
        decoders = [r for r in reported.instances("decode") if r.state != "draining"]
        there = sum(r.queued_requests + r.running_requests for r in decoders)
        ready = sum(r.running_requests - min(r.prefilling_requests, r.running_requests) for r in takers)
        coming: float = reported.queued_requests + sum(waiting_requests(r) for r in takers)
        tokens = reported.queued_tokens + sum(r.queued_tokens + r.running_tokens for r in takers)
        prompt_tokens = tokens / (ready + coming) if ready + coming else reported.prompt_tokens
        # One that is handed on may be in two instances' reports. Gateways know how many there are.
        most = reported.open_requests or inf
        running = min(there + ready, max(there, most))
        coming = min(coming, max(0.0, most - running))
        on_one = one.max_decodes if one.max_decodes < inf else max(1.0, running / max(1, len(serving(decoders))))
        residence_s = reported.output_tokens * one.step_s(on_one)
        per_instance = one.tokens_per_s / max(1.0, prompt_tokens)
        flow_per_s, growth, ahead = len(serving(takers)) * per_instance, 0.0, None
        marked = self._rise.follow(prefill_needed, now_s, min(max(residence_s, policy.rate_window_s), ARRIVALS_S))
        if policy.prescale and marked:
            ahead = prefill_needed, self._rise.usual
            flow_per_s = max(flow_per_s, prefill_needed * per_instance)
            growth = max(0.0, self._arriving_per_s(now_s) - running / residence_s) * min(load_s, ARRIVALS_S)
        blocks = max((r.kv_blocks_total for r in serving(decoders) or takers), default=0) * policy.kv_upper_bound
        block_tokens = max((r.kv_block_tokens for r in [*decoders, *takers]), default=0)
        request_blocks = (prompt_tokens + reported.output_tokens) / block_tokens if block_tokens else 0.0
        load = DecodeLoad(
            running=running,
            there=there,
            coming=coming,
            growth=growth,
            arrived=self._arrived(now_s, residence_s),
            flow_per_s=flow_per_s,
            residence_s=residence_s,
            memory=sum(r.kv_blocks_used for r in decoders) / blocks if blocks else 0.0,
            request_memory=request_blocks / blocks if blocks else 0.0,
        )
        planned = replace(one, max_decodes=one.max_decodes * policy.utilisation)
        now = decode_need_of(replace(load, coming=0.0, growth=0.0, arrived=0.0), one)
        return DecodeNeed(load, decode_need_of(load, planned), now.instances, ahead)

    def _arriving_per_s(self, now_s: float) -> float:
        """Requests that came in two windows of the rate, one after the other: all of a burst is here already."""
        window_s = self._policy.rate_window_s
        lately = self._reported.arrived_requests(now_s, window_s)
        before = self._reported.arrived_requests(now_s, 2 * window_s) - lately
        return min(lately, before) / window_s

    def _arrived(self, now_s: float, within_s: float) -> float:
        """Requests within that time, if they came as they do now for all of it."""
        known_s = min(max(within_s, self._policy.rate_window_s), ARRIVALS_S)
        arrived = self._reported.arrived_requests(now_s, known_s)
        return arrived * min(within_s, MAX_RESIDENCE_S) / known_s
