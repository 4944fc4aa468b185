"""One scale-out, looked at closely, as the paper's Figure 21 does: a model serves under a queue of prompts that is too
long for it, and at one moment the planner is asked for so many more prefill instances.

Where they load, from whom, in which chains, and who scales live is what the services' planner decides; the monitor is
not asked. Prompts are alike and come evenly, a quarter more of them than all instances can compute in the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from bench.replay.plan import PlannedRequest
from bench.sim.compute import Compute
from bench.sim.fabric import LinkKind
from bench.sim.flows import BYTES_PER_GBIT
from bench.sim.run import simulate
from bench.sim.run_result import RunResult
from bench.sim.setup import Frame, Imposed, Setup
from bench.sim.watch import Watch
from bench.systems import Split, System
from services.worker.core.scheduling.prompt_cost import num_pairs
from shared.errors import BadRequest
from shared.messages.plans import Chain

DEFAULT = ("blitz", "blitz-nolive", "blitz-star", "overlap", "sllm", "allcache")
BEFORE = Split(1, 2)
MAX_WINDOW_S = 600.0
LEAD_S = 0.5
"""From the first prompt to the trigger."""
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 32
PRESSURE = 1.25
"""Prompts that come, of those that all instances can compute in the end."""
BIN_S = 0.1
FULL_SHARE = 0.95
"""Of what all instances can compute, in one bin: full throughput."""


@dataclass(frozen=True, slots=True)
class ScaleOut:
    """What is asked for, and what is there before."""

    num_more: int
    there: Split = BEFORE
    packed: bool = False
    """Those that are there fill one host after the other; else one of each host in turn."""
    window_s: float | None = None
    """For how long prompts come after the trigger. None: for one and a half times the slower of a load over a NIC and
    one over a host link, and a second."""

    def check(self, setup: Setup, systems: Sequence[System]) -> None:
        """Raises ``BadRequest`` for what cannot be."""
        if self.num_more < 1:
            raise BadRequest(f"--scale-out is a number of instances, 1 or more, not {self.num_more}", param="scale-out")
        if min(self.there) < 1:
            raise BadRequest(
                f"--from is one prefill and one decode instance at least, not {self.there.prefill},{self.there.decode}",
                param="from",
            )
        if self.window_s is not None and not 0 < self.window_s <= MAX_WINDOW_S:
            raise BadRequest(
                f"--window of a scale-out is at most {MAX_WINDOW_S:g} seconds, and more than 0, not {self.window_s!r}",
                param="window",
            )
        for system in systems:
            if not system.scales:
                raise BadRequest(f"{system.name} does not scale: --scale-out is of those that do", param="systems")
            if "prefill" not in system.roles:
                raise BadRequest(f"{system.name} has no prefill instances to scale out", param="systems")
        free = setup.num_workers - sum(self.there)
        if self.num_more > free:
            degree = setup.model.degree
            raise BadRequest(
                f"--scale-out {self.num_more}: cluster {setup.cluster.name!r} holds {setup.num_workers} instances of "
                f"{degree} GPU{'s' if degree > 1 else ''}, {sum(self.there)} are there before, and {max(0, free)} "
                f"{'is' if free == 1 else 'are'} left",
                param="scale-out",
            )

    @property
    def num_prefill(self) -> int:
        """In the end."""
        return self.there.prefill + self.num_more

    def seconds(self, setup: Setup) -> float:
        """From the trigger to the last prompt."""
        if self.window_s is not None:
            return self.window_s
        cluster = setup.cluster.joined(setup.model.degree)
        gbps = min(cluster.nic_gbps, cluster.host_link_gbps)
        return math.ceil(1.5 * setup.model.record.weights_bytes / (gbps * BYTES_PER_GBIT) + 1)

    def requests(self, setup: Setup) -> tuple[PlannedRequest, ...]:
        """From ``LEAD_S`` before the trigger on."""
        every_s = PROMPT_TOKENS / (PRESSURE * self.num_prefill * tokens_per_s(setup))
        count = math.ceil((LEAD_S + self.seconds(setup)) / every_s)
        return tuple([PlannedRequest(i, i * every_s, PROMPT_TOKENS, OUTPUT_TOKENS, False) for i in range(count)])


def tokens_per_s(setup: Setup) -> float:
    """Prompt tokens that an instance computes, in full batches."""
    compute = Compute(setup.model.profile, scale=setup.compute_scale, overhead_s=setup.step_overhead_s)
    prompts = max(1, setup.worker.max_batch_tokens // PROMPT_TOKENS)
    tokens = prompts * PROMPT_TOKENS
    return tokens / (compute.step_s(tokens, prompts * num_pairs(0, PROMPT_TOKENS), 0, 0) + compute.overhead_s)


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A chain of a plan."""

    sources: tuple[str, ...]
    """Of the first hop: GPUs, ``memory of`` a worker's host, or ``disk``."""
    hops: tuple[tuple[str, ...], ...]
    """Targets that load together, one hop behind the other."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What a system did. Seconds from the trigger; None: not before the end, or never."""

    first_layer_s: float | None
    """A target had its first layer."""
    first_token_s: float | None
    """First token of a prompt of which a new instance had computed all layers or some."""
    first_serving_s: float | None
    last_serving_s: float | None
    """The last of all that were asked for."""
    full_s: float | None
    """``FULL_SHARE`` of what all prefill instances can compute, in a bin."""
    first_tokens: int
    """Requests that had theirs by the end of the last bin."""
    loaded: int
    mutated: int
    """Instances that got the role instead of loading."""
    live_pairs: int
    """Of which the new instance computed something."""
    chains: tuple[Way, ...]
    """None of a system whose weights come in blocks."""
    explain: tuple[str, ...]
    """By the planner."""
    weights_bytes: dict[LinkKind, int]
    """Of loads that ended, by the links that they left through."""
    serving_s: tuple[float, ...]
    """When each new instance served."""
    tokens_per_s: tuple[float, ...]
    """Prompt tokens computed, in bins."""
    first_tokens_per_s: tuple[float, ...]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Systems side by side."""

    cluster: str
    model: str
    degree: int
    num_gpus: int
    weights_bytes: int
    seed: int
    compute_scale: float
    scale_out: int
    prefill_before: int
    decode_before: int
    packed: bool
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    requests: int
    requests_per_s: float
    instance_tokens_per_s: float
    """Prompt tokens that one instance can compute."""
    full_tokens_per_s: float
    """All of them."""
    bins_begin_s: float = -LEAD_S
    bin_s: float = BIN_S
    systems: dict[str, Row]
    interrupted: bool = False


def timeline(setup: Setup, asked: ScaleOut, rows: dict[str, Row], *, interrupted: bool) -> Timeline:
    """Of the systems that have run."""
    requests = asked.requests(setup)
    return Timeline(
        cluster=setup.cluster.name,
        model=setup.model.name,
        degree=setup.model.degree,
        num_gpus=setup.cluster.num_gpus,
        weights_bytes=setup.model.record.weights_bytes,
        seed=setup.seed,
        compute_scale=setup.compute_scale,
        scale_out=asked.num_more,
        prefill_before=asked.there.prefill,
        decode_before=asked.there.decode,
        packed=asked.packed,
        requests=len(requests),
        requests_per_s=len(requests) / (LEAD_S + asked.seconds(setup)),
        instance_tokens_per_s=tokens_per_s(setup),
        full_tokens_per_s=asked.num_prefill * tokens_per_s(setup),
        systems=rows,
        interrupted=interrupted,
    )


def run(setup: Setup, system: System, asked: ScaleOut) -> tuple[Row, RunResult]:
    """One system."""
    watch = Watch()
    frame = Frame(imposed=(Imposed(LEAD_S, "prefill", asked.num_prefill),), packed=asked.packed)
    result = simulate(setup, system, asked.requests(setup), split=asked.there, frame=frame, watch=watch)
    row = row_of(watch, asked, asked.seconds(setup), asked.num_prefill * tokens_per_s(setup))
    # Who sends blocks to whom is up to the receivers then, not to the plan.
    return msgspec.structs.replace(row, chains=(), explain=()) if system.pipelines else row, result


def row_of(watch: Watch, asked: ScaleOut, seconds: float, full_tokens_per_s: float) -> Row:
    """What was seen."""
    trigger_s = watch.zero_s + LEAD_S
    made = [r for r in watch.records if r.role == "prefill" and r.direction in ("out", "mutate")]

    def since_s(at_s: float) -> float:
        return at_s - trigger_s

    targets = [(since_s(r.triggered_at_s), target) for r in made for target in r.targets]
    layers_s = [from_s + t.layer_ready_ms[0] / 1000 for from_s, t in targets if t.layer_ready_ms]
    serving_s = sorted(from_s + t.serving_ms / 1000 for from_s, t in targets if t.serving_ms is not None)
    new = {target.worker_id for _, target in targets}
    firsts_s = [(since_s(s.times_s[0]), s.worker_id in new) for s in watch.served if s.times_s]
    pairs = [(since_s(r.triggered_at_s), pair) for r in made for pair in r.live]
    shared_s = [
        from_s + batch.first_token_ms / 1000 for from_s, pair in pairs for batch in pair.batches if batch.target_layers
    ]
    own_s = [at_s for at_s, is_new in firsts_s if is_new]
    computed = in_bins([(since_s(s.began_s), since_s(s.ended_s), s.num_tokens) for s in watch.steps], seconds)
    return Row(
        first_layer_s=min(layers_s, default=None),
        first_token_s=min([*own_s, *shared_s], default=None),
        first_serving_s=min(serving_s, default=None),
        last_serving_s=serving_s[asked.num_more - 1] if len(serving_s) >= asked.num_more else None,
        full_s=_full_s(computed, full_tokens_per_s),
        first_tokens=sum(at_s <= len(computed) * BIN_S - LEAD_S for at_s, _ in firsts_s),
        loaded=sum(t.serving_ms is not None for r in made if r.direction == "out" for t in r.targets),
        mutated=sum(t.serving_ms is not None for r in made if r.direction == "mutate" for t in r.targets),
        live_pairs=sum(any(batch.target_layers for batch in pair.batches) for _, pair in pairs),
        chains=tuple(_way(chain) for plan in watch.plans for chain in plan.chains),
        explain=tuple(line for plan in watch.plans for line in plan.explain),
        weights_bytes=dict(watch.weights_bytes),
        serving_s=tuple(serving_s),
        tokens_per_s=computed,
        first_tokens_per_s=in_bins([(at_s, at_s, 1.0) for at_s, _ in firsts_s], seconds),
    )


def in_bins(parts: Sequence[tuple[float, float, float]], seconds: float) -> tuple[float, ...]:
    """Per second, in bins of ``BIN_S`` from the lead on. ``parts``: begin, end, and how many, which came evenly."""
    bins = [0.0] * max(1, round((LEAD_S + seconds) / BIN_S))
    for began_s, ended_s, count in parts:
        begin, end = ((at_s + LEAD_S) / BIN_S for at_s in (began_s, ended_s))
        for i in range(max(0, math.floor(begin)), min(len(bins), math.floor(end) + 1)):
            inside = min(end, i + 1) - max(begin, i)
            bins[i] += count * (inside / (end - begin) if end > begin else 1.0) / BIN_S
    return tuple(bins)


def _full_s(computed: Sequence[float], full_tokens_per_s: float) -> float | None:
    """The end of the first bin after the trigger that is full."""
    for i, value in enumerate(computed):
        end_s = round((i + 1) * BIN_S - LEAD_S, 6)
        if end_s > 0 and value >= FULL_SHARE * full_tokens_per_s:
            return end_s
    return None


def _way(chain: Chain) -> Way:
    own = {target for hop in chain.hops for target in hop.targets}
    sources = [
        {"gpu": stripe.source, "host": f"memory of {stripe.source}", "disk": "disk"}[stripe.source_kind]
        for stripe in chain.hops[0].stripes
        if stripe.source_kind != "gpu" or stripe.source not in own
    ]
    return Way(sources=tuple(dict.fromkeys(sources)), hops=tuple(hop.targets for hop in chain.hops))
