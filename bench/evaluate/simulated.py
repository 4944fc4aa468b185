"""The lab on paper: the simulator with the model, the links and the settings that a run in the lab has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from bench.evaluate.models import Model
from bench.evaluate.run import CONTEXT_TOKENS, GPU, LEAD_IN_S, MIB, PATIENCE_S, SETTLE_S, kv_mib
from bench.evaluate.saved_run import Placed, Plan
from bench.evaluate.windows import count
from bench.lab.played import Played
from bench.replay.document import About, Document
from bench.replay.objectives import Slo
from bench.replay.plan import PlannedRequest, Shape, plan_requests
from bench.sim.cluster import Cluster
from bench.sim.gateway import GatewaySettings
from bench.sim.latencies import Latencies
from bench.sim.models import sim_model
from bench.sim.run import simulate
from bench.sim.run_result import RunResult
from bench.sim.setup import Frame, Imposed, Setup
from bench.systems import Split, System
from bench.traces.request import Trace

LATENCIES = Latencies(submit_s=0.004)
"""Of messages, and of the steps of a load, in the lab. From a client to an engine a request takes 3 to 5 ms there:
HTTP, a prompt's tokens as JSON, NATS, eight workers on two cores."""
STEP_OVERHEAD_S = 0.0004
"""Of a step in the lab, beside its layers: the engine's loop, and timers. Both are what idle instances took in the
tuning windows."""


@dataclass(frozen=True, slots=True)
class SimulatedLab:
    """The same runs as in the lab, in virtual time."""

    setup: Setup

    @classmethod
    def of(cls, model: Model, cluster: Cluster, *, workers: int, seed: int = 0) -> SimulatedLab:
        """``cluster``: of the lab's links."""
        profile = model.profile()
        played = Played.of(profile, hidden_size=model.hidden_size, num_gpus=model.num_gpus, nic_gbps=cluster.nic_gbps)
        spec = played.spec(CONTEXT_TOKENS)
        shown = sim_model(
            model.name,
            spec,
            msgspec.structs.replace(profile, num_layers=spec.num_layers, kv_bytes_per_token=spec.kv_bytes_per_token),
            # An instance on several GPUs is one worker with one link here.
            degree=1,
            slo_ttft_s=model.slo.ttft_s or 0.0,
            slo_tbt_s=model.slo.tbt_s or 0.0,
        )
        return cls(
            Setup(
                cluster=msgspec.structs.replace(cluster, hosts=workers, hosts_per_leaf=workers),
                model=shown,
                seed=seed,
                step_overhead_s=STEP_OVERHEAD_S,
                worker=replace(GPU, kv_bytes=kv_mib(played.kv_pool_bytes) * MIB),
                gateway=GatewaySettings(queue_timeout_s=PATIENCE_S),
                latencies=LATENCIES,
                patience_s=PATIENCE_S,
            )
        )

    def run(
        self,
        system: System,
        plan: Plan,
        trace: Trace,
        *,
        placed: Placed | None = None,
        looks_after_s: float = 0.0,
        imposed: Sequence[Imposed] | None = None,
    ) -> RunResult:
        """What a plan comes to. ``trace``: scaled. ``placed``: where instances and copies are at the beginning.
        ``looks_after_s``: of the monitor, which looks at intervals. ``imposed``: instead of what it asks for."""
        window = plan.window
        frame = Frame(
            lead_in=_lead_in(trace, plan),
            lead_in_s=LEAD_IN_S,
            counted_s=window.seconds + SETTLE_S,
            placed=None if placed is None else tuple(placed.instances.items()),
            copies=() if placed is None else tuple(placed.copies.items()),
            looks_after_s=looks_after_s,
            imposed=None if imposed is None else tuple(imposed),
        )
        split = colocated = None
        if not system.scales:
            colocated = plan.instances.get("colocated")
            split = None if colocated else Split(plan.instances["prefill"], plan.instances["decode"])
        # As the services were told, and not as they would be now.
        setup = replace(self.setup, give_back_s=plan.give_back_s)
        return simulate(setup, system, _requests(trace, plan), split=split, colocated=colocated, frame=frame)

    def document(self, system: System, plan: Plan, trace: Trace) -> Document:
        """The same in the terms of a replay."""
        about = About(
            trace=trace.name,
            url="",
            model=self.setup.model.name,
            seed=plan.seed,
            speed=1.0,
            scale_rate=plan.scale_rate,
            spread_seconds=plan.spread_seconds,
            skipped_rows=trace.skipped_rows,
            unsorted_rows=trace.unsorted_rows,
            started_at_s=0.0,
        )
        return self.run(system, plan, trace).document(about, Slo(plan.slo_ttft_s, plan.slo_tbt_s))


def _requests(trace: Trace, plan: Plan) -> tuple[PlannedRequest, ...]:
    shape = Shape(start_at_s=plan.window.start_s, window_s=plan.window.seconds, context_tokens=CONTEXT_TOKENS)
    return plan_requests(trace, shape)


def _lead_in(trace: Trace, plan: Plan) -> tuple[PlannedRequest, ...]:
    """As the lab sends it: of a window that begins earlier than it is long, what there is."""
    start_s = plan.window.start_s
    begin_s = max(0.0, start_s - LEAD_IN_S)
    if not count(trace, begin_s, start_s):
        return ()
    shape = Shape(start_at_s=begin_s, window_s=start_s - begin_s, context_tokens=CONTEXT_TOKENS)
    late_s = LEAD_IN_S - (start_s - begin_s)
    return tuple(replace(request, due_s=request.due_s + late_s) for request in plan_requests(trace, shape))
