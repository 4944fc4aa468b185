"""How many instances one model needs, from what its instances and the gateways report.

``services.monitor.core.need`` has the formulas, ``services.monitor.core.sizing`` says what becomes of their results.
This module decides what goes into them:

- Requests of instances that drain ask for nothing: they are finished where they are.
- New requests go to colocated and to prefill instances. For colocated ones only their share counts, of what gateways
  hold and of what arrives there, and nothing else of prefill and decode instances. A model that is served
  disaggregated gets its prefill instances for all of it.
- The slack is the model's TTFT objective, or the policy's if it has none.
- While there is any request for one, a model that is served disaggregated has a decode instance, however little it
  needs; and while there is any request at all, it keeps its last prefill instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from services.monitor.core.capability import Estimate
from services.monitor.core.decoding import Decoding
from services.monitor.core.give_back import idle_window_s
from services.monitor.core.need import Capability, ModelLoad, Need, need_of, shown_requests, worth_moving
from services.monitor.core.policy import DemandPolicy
from services.monitor.core.reported import ARRIVALS_S, Reported, serving, waiting_requests
from services.monitor.core.sizing import Size, Sizing, SizingInputs
from shared.messages.common import Role
from shared.messages.load import LoadReport, ModelQueue
from shared.profile import Profile

MIN_SLACK_S = 0.001
"""No backlog can be drained faster; this bound keeps an absurd objective from asking for any number of instances."""
MAX_SLACK_S = ARRIVALS_S


class DemandSettings(NamedTuple):
    """Of one model, and of this process, as far as verdicts depend on them."""

    slo_ttft_s: float = 0.0
    """Objectives of 0: none."""
    slo_tbt_s: float = 0.0
    keep_alive_s: float = 0.0
    """How long the last instance stays after the last request, if that is longer than it would by itself."""
    connected_since_s: float = -inf
    """When this process's own connection came up."""
    crowded: bool = False
    """Another model that was asked for lately has no instance, and no worker is spare."""


NO_SETTINGS = DemandSettings()


class Verdict(NamedTuple):
    """The number of instances that a model needs now, in one role."""

    desired: int
    needed: float
    """In instances, before rounding."""
    why: object
    """Says it in words when asked."""
    idle: int = 0
    """Instances that the load does not need at this moment, whatever is kept for later."""
    spare: int = 0
    """Of these, those that would not be missed if what was needed lately came again."""
    urgent: int = 0
    """Up to this number, prefill instances had better be decode instances at once, while others load in their place."""
    limit: object = ""
    """Says in words what made it another number than the load asks for; empty: nothing did."""

    @property
    def bound(self) -> str:
        """What limit holds, for people; empty: none."""
        return str(self.limit)

    @property
    def reason(self) -> str:
        """The load and the bound, for people. Put into words only on demand: hundreds of verdicts are made ten times a
        second, and nearly all of them are what is there."""
        return f"{self.why}; {self.limit}" if self.limit else str(self.why)


class _Prompts(NamedTuple):
    """Why colocated or prefill instances are needed."""

    load: ModelLoad
    need: Need
    tokens_per_s: float
    decodes: bool

    def __str__(self) -> str:
        load, need = self.load, self.need
        requests = shown_requests(load.requests)
        running = f", {load.running_requests} running" if self.decodes and load.requests else ""
        overdue = f", {load.overdue_tokens:.0f} of them overdue" if load.overdue_tokens else ""
        prompts = (
            f"prompts fill {need.prefill:.2f} instances ({load.arrived_tokens_per_s:.0f} tokens/s arrive, "
            f"{load.waiting_tokens:.0f} wait{overdue}; one computes {self.tokens_per_s:.0f} tokens/s)"
        )
        parts = [prompts] if load.arrived_tokens_per_s or load.waiting_tokens else []
        parts += [f"decoding {need.decode:.2f}"] if self.decodes and need.decode else []
        parts += [f"KV {need.memory:.2f}"] if self.decodes and need.memory else []
        return "; ".join([requests + running, *parts])


_NO_LOAD, _NO_NEED = ModelLoad(), Need(0.0, 0.0, 0.0, 0.0)


class ModelDemand:
    """The load of one model. Times are of one clock."""

    def __init__(self, policy: DemandPolicy) -> None:
        self._policy = policy
        self._reported = Reported(policy)
        self._estimate = Estimate(policy)
        self._sizing: Mapping[Role, Sizing] = {
            "colocated": Sizing(policy),
            "prefill": Sizing(policy),
            "decode": Sizing(policy),
        }
        self._decoding = Decoding(policy, self._reported)
        self._idle_since_s: float | None = None
        """Since when there is no request anywhere, and none came."""
        self._was_asked = False

    @property
    def profile(self) -> Profile | None:
        """What one of its instances can do, if that was measured beforehand."""
        return self._estimate.profile

    @profile.setter
    def profile(self, profile: Profile | None) -> None:
        self._estimate.profile = profile

    def on_load(self, report: LoadReport, now_s: float) -> None:
        """An instance reports."""
        self._reported.on_load(report, now_s)

    def on_queue(self, gateway_id: str, queue: ModelQueue, now_s: float) -> None:
        """A gateway reports."""
        if self._reported.on_queue(gateway_id, queue, now_s):
            self._was_asked, self._idle_since_s = True, None

    def on_role(self, instance_id: str, role: Role) -> None:
        """An instance has another role now."""
        self._reported.on_role(instance_id, role)

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second of one instance: the best figure available."""
        return self._estimate.tokens_per_s(self._prompt_tokens)

    @property
    def _prompt_tokens(self) -> float:
        """Of one of the prompts that arrive, if it matters."""
        return self._reported.prompt_tokens if self.profile is not None else 0.0

    def hears(self, now_s: float, settings: DemandSettings) -> bool:
        """Whether the connection has been up for so long that silence says that there are no requests."""
        return now_s - settings.connected_since_s >= self._policy.report_ttl_s

    def is_awake(self, now_s: float, settings: DemandSettings) -> bool:
        """Whether requests came so lately that a last instance stays for others."""
        idle_s = now_s - self._idle_since_s if self._idle_since_s is not None else 0.0
        return idle_s < max(self._policy.down_window_s or idle_window_s(self._load_s), settings.keep_alive_s)

    def was_asked_lately(self, now_s: float) -> bool:
        """Whether requests came within as long as a last instance stays without a keep-alive."""
        return self._was_asked and self.is_awake(now_s, NO_SETTINGS)

    def colocated(
        self, now_s: float, observed: int, settings: DemandSettings = NO_SETTINGS, *, alone: bool = False
    ) -> Verdict:
        """The verdict on colocated instances when ``observed`` of them serve or are on their way. ``alone``: all
        prompts are theirs, whoever else takes some now."""
        reported, slack_s = self._reported, self._slack_s(settings)
        reported.forget(now_s)
        reports = reported.instances("colocated")
        here = serving(reports)
        capability = self._capability(here, here, settings)
        load, need = _NO_LOAD, _NO_NEED
        # Of hundreds of models nearly all are idle, nearly always.
        if not reported.is_idle(reports):
            share = 1.0
            if not alone and (others := len(serving(reported.instances("prefill")))):
                share = len(here) / (len(here) + others)
            load = self._load(reports, now_s, slack_s, share)
            need = need_of(load, capability, slack_s=slack_s)
        busy = bool(load.requests or load.waiting_tokens)
        size = self._sizing["colocated"].size(
            need.instances,
            self._sizing_inputs(observed, len(here), busy, now_s, settings),
            now_s,
            most=load.requests,
            # What decodes may need next to nothing, but it needs the instance where it does.
            least=min(observed, 1 if load.running_requests else 0),
            overdue_tokens=load.overdue_tokens,
        )
        return _verdict(size, _Prompts(load, need, self.tokens_per_s, decodes=True))

    def disaggregated(
        self, now_s: float, observed: Mapping[Role, int], settings: DemandSettings = NO_SETTINGS
    ) -> Mapping[Role, Verdict]:
        """The verdicts on prefill and decode instances when so many serve or are on their way."""
        reported, slack_s = self._reported, self._slack_s(settings)
        reported.forget(now_s)
        takers, decoders = serving(reported.instances("prefill")), serving(reported.instances("decode"))
        # Without a decode instance, and for requests that none takes, prefill instances decode by themselves.
        one = self._capability(takers, decoders or takers, settings)
        load, prefill = _NO_LOAD, _NO_NEED
        if not reported.is_idle(reported.instances()):
            load = self._prompts(now_s, slack_s)
            prefill = need_of(load, Capability(one.tokens_per_s), slack_s=slack_s)
        busy = bool(load.requests or load.waiting_tokens)
        inputs = self._sizing_inputs(observed["prefill"], len(takers), busy, now_s, settings)
        prefill_size = self._sizing["prefill"].size(
            prefill.instances,
            inputs,
            now_s,
            most=min(load.requests, load.prompts),
            least=min(observed["prefill"], 1 if load.running_requests else 0),
            overdue_tokens=load.overdue_tokens,
        )
        decoding = self._decoding
        decode = decoding.need(one, prefill_size.needed, inputs.load_s, now_s) if busy else decoding.rest(now_s)
        decode_size = self._sizing["decode"].size(
            decode.need.instances,
            inputs._replace(observed=observed["decode"], num_serving=len(decoders)),
            now_s,
            most=decode.need.instances,
            least=1 if decode.load.running or decode.load.coming else 0,
        )
        moving = worth_moving(decode.now - len(decoders), prefill_size.needed, len(takers))
        return {
            "prefill": _verdict(prefill_size, _Prompts(load, prefill, self.tokens_per_s, decodes=False)),
            "decode": _verdict(decode_size, decode, urgent=observed["decode"] + moving),
        }

    # --- what goes into the formulas ---------------------------------------------------------

    def _load(self, reports: Sequence[LoadReport], now_s: float, slack_s: float, share: float) -> ModelLoad:
        """Of instances that take prompts, to which ``share`` of the new requests goes."""
        policy, reported = self._policy, self._reported
        at_instances = sum(r.queued_requests + r.running_requests for r in reports)
        # What drains finishes what it has, wherever the other instances are.
        reports = [r for r in reports if r.state != "draining"]
        # Whole prompts are what is said; that is more than what there will be to compute.
        to_compute = reported.computed_share
        waiting = to_compute * (sum(r.queued_tokens for r in reports) + share * reported.queued_tokens)
        waits = sum(waiting_requests(r) for r in reports) + share * reported.queued_requests
        burst = to_compute * share * reported.arrived_tokens(now_s, slack_s)
        arrived = to_compute * share * reported.arrived_tokens(now_s, policy.rate_window_s)
        running = sum(r.running_requests for r in reports)
        blocks = max((r.kv_blocks_total for r in reports if r.state == "serving"), default=0)
        used = sum(r.kv_blocks_used for r in reports)
        return ModelLoad(
            arrived_tokens_per_s=arrived / policy.rate_window_s,
            burst_tokens=burst,
            waiting_tokens=waiting,
            overdue_tokens=max(0.0, waiting - burst),
            prompts=max(waits, share * reported.arrived_requests(now_s, policy.rate_window_s)),
            running_requests=running,
            decoding_requests=running - sum(r.prefilling_requests for r in reports),
            memory=used / (blocks * policy.kv_upper_bound) if blocks else 0.0,
            # Either side may know of one a moment earlier. Not the sum: one on its way would be two.
            requests=max(reported.open_requests, at_instances),
        )

    def _prompts(self, now_s: float, slack_s: float) -> ModelLoad:
        """For prefill instances: KV of what they hold for decode is not theirs to need more instances for."""
        reported = self._reported
        every = sum(r.queued_requests + r.running_requests for r in reported.instances())
        load = self._load(reported.instances("prefill"), now_s, slack_s, 1.0)
        return replace(load, memory=0.0, requests=max(load.requests, every))

    # --- what becomes of the result ----------------------------------------------------------

    def _sizing_inputs(
        self, observed: int, num_serving: int, busy: bool, now_s: float, settings: DemandSettings
    ) -> SizingInputs:
        """``busy``: whether there are requests anywhere."""
        if busy:
            self._was_asked, self._idle_since_s = True, None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        return SizingInputs(
            observed,
            num_serving,
            self._load_s,
            settings.keep_alive_s,
            now_s - settings.connected_since_s,
            now_s - self._idle_since_s if self._idle_since_s is not None else 0.0,
            settings.crowded,
        )

    @property
    def _load_s(self) -> float:
        return self._reported.load_s or self._estimate.load_s or self._policy.assumed_load_s

    def _slack_s(self, settings: DemandSettings) -> float:
        ttft_s = settings.slo_ttft_s
        return min(max(ttft_s, MIN_SLACK_S), MAX_SLACK_S) if ttft_s > 0 else self._policy.slack_s

    def _capability(
        self, prefilling: Sequence[LoadReport], decoding: Sequence[LoadReport], settings: DemandSettings
    ) -> Capability:
        return self._estimate.capability(
            prefilling, decoding, prompt_tokens=self._prompt_tokens, slo_tbt_s=settings.slo_tbt_s
        )


class _GivenBack(NamedTuple):
    """Why it is fewer."""

    why: object
    fewer_for_s: float

    def __str__(self) -> str:
        return f"{self.why}; the last {self.fewer_for_s:.3g} s needed no more"


class _Kept(NamedTuple):
    """Why it is no fewer."""

    why: object
    kept_for_s: float
    keep_alive_s: float

    def __str__(self) -> str:
        kept = f"what the last {self.kept_for_s:.3g} s needed is kept"
        return f"{self.why}; {kept if self.kept_for_s else f'the last one has a keep-alive of {self.keep_alive_s:g} s'}"


def _verdict(size: Size, why: object, urgent: int = 0) -> Verdict:
    if size.fewer_for_s:
        why = _GivenBack(why, size.fewer_for_s)
    elif size.kept_for_s or size.keep_alive_s:
        why = _Kept(why, size.kept_for_s, size.keep_alive_s)
    return Verdict(size.desired, size.needed, why, size.idle, size.spare, urgent)
