"""One run: a cluster, a model, a system and requests, in virtual time.

The gateway, the monitor, the planner, the pool's registry and placement, and the workers' schedulers are the services'
own cores; messages take ``Latencies``, steps what the profile says, and bytes what the network gives. Nothing is drawn
by chance but what the seed says, and nothing looks at the machine.
"""

from __future__ import annotations

import math
from functools import partial

import msgspec

from bench.replay.plan import PlannedRequest
from bench.sim.clock import Clock
from bench.sim.compute import Compute
from bench.sim.fabric import Fabric, Path
from bench.sim.faults import Faults, drawn
from bench.sim.flows import Network
from bench.sim.gateway import SimGateway
from bench.sim.host_copies import HostCopies
from bench.sim.instance import SimInstance
from bench.sim.kv import KvPaths, Member
from bench.sim.lambdascale import LambdaPipe
from bench.sim.loading import Load, Loads, Transfers
from bench.sim.monitor import SimMonitor
from bench.sim.pair_member import PairPaths
from bench.sim.pairs import SimPairs
from bench.sim.planner import SimPlanner
from bench.sim.registry import SimRegistry
from bench.sim.requests import SimRequest
from bench.sim.run_recorder import RunRecorder
from bench.sim.run_result import RunResult
from bench.sim.setup import GIB, Frame, Imposed, Setup
from bench.sim.streams import Key
from bench.sim.watch import Watch
from bench.sim.workers import Held, Limits, SimWorker, SimWorkers
from bench.systems import Split, System
from services.gateway.core.router import Assignment
from services.gateway.core.stream import StreamState
from services.monitor.core.policy import DemandPolicy
from services.planner.core.rounds.settings import LiveSettings, PlanSettings
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.upstreams import Upstream
from shared.errors import Conflict, NoResponder
from shared.messages.common import Role
from shared.messages.generation import DecodePlace
from shared.messages.live import ZigzagAssignment
from shared.messages.load import Demand, LoadReport, QueueReport
from shared.messages.plans import DrainPlan, MutatePlan, ScalePlan
from shared.messages.progress import ScaleProgress
from shared.messages.registry import Floor, ModelRecord, Route, WorkerHeartbeat, WorkerInfo
from shared.profile import Profile

FOREVER_S = 1e9
IMPOSED_EVERY_S = 0.5
WIND_UP_S = 600.0
"""In which instances load, on whatever network."""
SETTLE_S = 1.0
"""Before the first instances are there, and again before the first request: what they report is known by then."""


def simulate(
    setup: Setup,
    system: System,
    requests: tuple[PlannedRequest, ...],
    *,
    split: Split | None = None,
    colocated: int | None = None,
    frame: Frame = Frame(),
    watch: Watch | None = None,
) -> RunResult:
    """Run a system. ``split``, or the number of ``colocated`` ones: the instances of one that does not scale; of one
    that does, those that it has at least. ``watch``: sees single steps and loads."""
    return Simulation(setup, system, requests, split=split, colocated=colocated, frame=frame, watch=watch).run()


class Simulation:
    """One run; see ``simulate``."""

    def __init__(
        self,
        setup: Setup,
        system: System,
        requests: tuple[PlannedRequest, ...],
        *,
        split: Split | None,
        colocated: int | None,
        frame: Frame = Frame(),
        watch: Watch | None = None,
    ) -> None:
        self._setup, self._system, self._requests, self._frame = setup, system, requests, frame
        self._watch = watch
        model, latencies = setup.model, setup.latencies
        self._cluster = setup.cluster.joined(model.degree)
        self._record = self._registered(split, colocated)
        self._clock = clock = Clock()
        self._network = network = Network(clock)
        self._fabric = fabric = Fabric(self._cluster)
        self._compute = Compute(model.profile, scale=setup.compute_scale, overhead_s=setup.step_overhead_s)
        self._config = self._scheduler_config()
        self._zero_s = math.inf
        self._imposed: dict[Role, Imposed] = {}
        """What was imposed last."""
        self._recorder = RunRecorder(clock, network, fabric, model)
        self._gateway = SimGateway(
            clock,
            self._submit,
            self._recorder.served.append,
            on_queues=self._on_queues,
            cancel=self._cancel,
            settings=setup.gateway,
            latencies=latencies,
        )
        self._registry = SimRegistry(clock, self._on_routes)
        self._host_copies = HostCopies(
            clock,
            network,
            fabric,
            latencies,
            lambda worker_id: worker_id,
            policy=system.copies,
            keep_copies_s=system.keep_copies_s,
        )
        self._workers = SimWorkers(
            clock,
            latencies,
            self._transfers(),
            self._host_copies,
            Limits(setup.worker.max_running_requests, setup.worker.max_queued_tokens, self._config.limit_tokens),
            lambda _record: model.weights,
            make=self._make,
            report=self._on_report,
            progress=self._on_progress,
            on_layers=self._on_layers if system.live != "never" or watch is not None else None,
            on_serving=lambda held: self._pairs.serves(held.instance_id),
        )
        self._planner = SimPlanner(
            clock,
            latencies,
            self._registry,
            PlanSettings(
                strategy=system.strategy,
                mutation=system.mutation,
                advise=not system.scales,
                live=LiveSettings(choice=system.live, policy=system.live_policy),
            ),
            self._find_profile,
            on_plan=self._on_plan,
            on_assignment=self._on_assignment,
            on_move=self._workers.on_migrate_plan,
        )
        self._monitor = SimMonitor(
            clock,
            self._registry.view,
            lambda _model, _worker: model.profile,
            self._on_demand,
            policy=DemandPolicy(down_window_s=setup.give_back_window_s),
            first_look_s=frame.looks_after_s,
            latencies=latencies,
        )
        paths = PairPaths(network=network, path=self._kv_path, hidden_bytes_per_token=model.hidden_bytes_per_token)
        self._pairs = SimPairs(clock, latencies, self._workers, self._planner, paths)
        self._kv = KvPaths(
            network=network,
            path=self._kv_path,
            find=self._find_instance,
            notice_s=latencies.silent_s,
            seed=setup.seed,
        )
        self._faults = Faults(
            clock,
            latencies,
            self._workers,
            self._host_copies,
            self._pairs,
            seed=setup.seed,
            on_departed=self._gateway.on_worker_lost,
            on_lease_over=self._on_lease_over,
        )

    def _transfers(self) -> Transfers:
        loads = Loads(
            self._clock,
            self._network,
            self._fabric,
            lambda worker_id: worker_id,
            is_there=self._is_there,
            notice_s=self._setup.latencies.silent_s,
        )
        if not self._system.pipelines:
            return loads
        model, latencies = self._setup.model, self._setup.latencies
        return LambdaPipe(self._clock, self._network, self._fabric, latencies, model, loads, lambda: self._workers)

    def _is_there(self, upstream: Upstream, load: Load) -> bool:
        if upstream.kind == "gpu":
            return self._workers.has_instance(upstream.worker_id, upstream.instance_id)
        return self._host_copies.has(upstream.worker_id, load.plan.model.model_hash)

    # --- what there is -----------------------------------------------------------------------

    def _registered(self, split: Split | None, colocated: int | None) -> ModelRecord:
        model, system = self._setup.model, self._system
        self._floors: dict[Role, int] = {}
        if split is not None:
            self._floors = {"prefill": split.prefill, "decode": split.decode}
        elif colocated is not None:
            self._floors = {"colocated": colocated}
        return msgspec.structs.replace(
            model.record,
            slo_ttft_s=model.slo_ttft_s,
            slo_tbt_s=model.slo_tbt_s,
            serving=system.serving,
            min_instances=1,
        )

    def _scheduler_config(self) -> SchedulerConfig:
        worker, model = self._setup.worker, self._setup.model
        num_blocks = self._setup.kv_bytes // (worker.block_size * model.kv_bytes_per_token)
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=worker.block_size,
            context_tokens=model.record.basics.max_position,
            max_num_sequences=worker.max_running_requests,
            max_batch_tokens=worker.max_batch_tokens,
            prefill_chunk_tokens=worker.prefill_chunk_tokens,
            max_queued_requests=worker.max_queued_requests,
            max_queued_tokens=worker.max_queued_tokens,
        )

    def _worker_info(self, gpu_id: str) -> WorkerInfo:
        gpu, cluster = self._fabric.gpus[gpu_id], self._cluster
        return WorkerInfo(
            worker_id=gpu_id,
            incarnation="1",
            host=gpu.host,
            device="cuda",
            engine="mock",
            transport_address=b"",
            arena_bytes=int(self._setup.model.degree * self._setup.cluster.gpu_memory_gib * GIB),
            kv_bytes=self._setup.kv_bytes,
            leaf=gpu.nic.leaf,
            nic=gpu.nic.nic_id,
            nic_gbps=cluster.nic_gbps,
            scale_up_domain=gpu.domain,
            scale_up_gbps=cluster.scale_up_gbps,
            host_link_gbps=cluster.host_link_gbps,
            ssd_gbps=cluster.ssd_gbps,
            host_cache_bytes=int(cluster.host_memory_gib * GIB / cluster.gpus_per_host),
        )

    def _begin(self) -> None:
        """The instances that are there from the start, and their hosts' copies."""
        self._registry.put_model(self._record)
        self._host_copies.put_model(self._record)
        for gpu_id in self._fabric.gpus:
            self._workers.add(SimWorker(self._worker_info(gpu_id), gpu_id))
        wanted = self._floors or dict.fromkeys(self._system.roles, 1)
        for role, count in self._floors.items():
            self._registry.set_floor(Floor(model=self._record.name, instances=count, left_s=FOREVER_S, role=role))
        if self._frame.placed is not None:
            self._begin_as(self._frame.placed, self._frame.copies)
            return
        if self._system.copies == "every-host":
            for worker_id in self._in_turns()[: self._cluster.hosts]:
                self._host_copies.put(worker_id, self._record, cached=False)
        roles: list[Role] = [role for role, count in wanted.items() for _ in range(count)]
        places = list(self._fabric.gpus) if self._frame.packed else self._in_turns()
        for place, (worker_id, role) in enumerate(zip(places, roles, strict=False)):
            if place == 0 and self._system.copies == "one":
                self._host_copies.put(worker_id, self._record, cached=False)
            elif self._system.copies == "kept":
                self._host_copies.keep(worker_id, self._record)
            self._workers.begin(worker_id, self._record, role, self._registry.next_epoch())

    def _begin_as(self, placed: tuple[tuple[int, Role], ...], copies: tuple[tuple[int, bool], ...]) -> None:
        workers = list(self._fabric.gpus)
        for number, cached in copies:
            self._host_copies.put(workers[number], self._record, cached=cached)
            self._workers.changed(workers[number])
        for number, role in placed:
            self._workers.begin(workers[number], self._record, role, self._registry.next_epoch())

    def _in_turns(self) -> list[str]:
        """GPUs, one of each host in turn."""
        by_host: dict[str, list[str]] = {}
        for gpu in self._fabric.gpus.values():
            by_host.setdefault(gpu.host, []).append(gpu.gpu_id)
        hosts = list(by_host.values())
        return [host[i] for i in range(self._cluster.gpus_per_host) for host in hosts]

    # --- instances ---------------------------------------------------------------------------

    def _make(self, worker: SimWorker, instance_id: str, model: ModelRecord, role: Role) -> SimInstance:
        return SimInstance(
            self._clock,
            self._gateway,
            instance_id=instance_id,
            worker=worker.info.process,
            model=model.name,
            role=role,
            config=self._config,
            compute=self._compute,
            kv=self._kv,
            slo_tbt_s=model.slo_tbt_s or self._setup.worker.slo_tbt_s,
            on_report=self._on_load,
            on_idle=lambda instance: self._workers.idle(instance.worker_id),
            on_ran=partial(self._ran, worker.worker_id) if self._watch is not None else None,
        )

    def _ran(self, worker_id: str, began_s: float, num_tokens: float) -> None:
        if self._watch is not None:
            self._watch.ran(worker_id, began_s, self._clock.now_s, num_tokens)

    def _kv_path(self, source: Member, target: Member) -> Path:
        return self._fabric.gpu_to_gpu(source.worker_id, target.worker_id)

    def _find_instance(self, place: DecodePlace) -> SimInstance | None:
        held = self._workers[place.worker_id].held
        return held.instance if held is not None and held.instance_id == place.instance_id else None

    def _find_profile(
        self, *, model_hash: str, layout_hash: str, engine: str, device: str, gpu_name: str
    ) -> Profile | None:
        del model_hash, layout_hash, engine, device, gpu_name  # there is one model, and one kind of worker
        return self._setup.model.profile

    # --- requests ----------------------------------------------------------------------------

    def _submit(self, assignment: Assignment, stream: StreamState) -> None:
        worker = self._workers[assignment.route.worker_id]
        held = worker.held
        if not worker.is_up:
            raise NoResponder(f"nobody answers for {worker.worker_id}")
        if held is None or held.instance_id != assignment.route.instance_id:
            raise Conflict(f"instance {assignment.route.instance_id} is not here")
        held.instance.submit(stream, decode_at=stream.decode_at, may_wait=assignment.may_wait)

    def _cancel(self, worker_id: str, key: Key) -> None:
        held = self._workers[worker_id].held
        if held is not None:
            held.instance.cancel(key)

    # --- messages ----------------------------------------------------------------------------

    def _on_demand(self, demand: Demand) -> None:
        # What is imposed is known from the end of the lead-in on.
        if self._frame.imposed is None or self._clock.now_s < self._zero_s:
            self._planner.on_demand(demand)

    def _on_progress(self, said: ScaleProgress) -> None:
        self._planner.on_progress(said)

    def _on_load(self, report: LoadReport) -> None:
        self._gateway.on_load(report)
        self._monitor.on_load(report)
        self._planner.on_load(report)

    def _on_queues(self, report: QueueReport) -> None:
        self._monitor.on_queues(report)
        self._planner.on_queue(report)

    def _on_report(self, heartbeat: WorkerHeartbeat) -> None:
        had_instance = self._recorder.holds(heartbeat.worker.worker_id)
        if not self._registry.report(heartbeat):
            return
        self._host_copies.put_report(heartbeat)
        self._recorder.report(heartbeat, self._host_copies.num_bytes)
        if had_instance and heartbeat.instance is None:
            self._planner.on_instances_gone()

    def _on_lease_over(self, worker_id: str, incarnation: str) -> None:
        had_instance = self._recorder.holds(worker_id)
        if not self._registry.forget(worker_id, incarnation):
            return
        self._host_copies.forget(worker_id)
        self._recorder.gone(worker_id, self._host_copies.num_bytes)
        if had_instance:
            self._planner.on_instances_gone()

    def _on_routes(self, model: str, routes: tuple[Route, ...]) -> None:
        self._gateway.routes_changed(model, routes)
        self._monitor.routes_changed()

    def _on_plan(self, plan: ScalePlan | DrainPlan | MutatePlan) -> None:
        if isinstance(plan, ScalePlan):
            if self._watch is not None:
                self._watch.plans.append(plan)
            self._workers.on_scale_plan(plan)
        elif isinstance(plan, DrainPlan):
            self._workers.on_drain_plan(plan)
        else:
            self._workers.on_mutate_plan(plan)

    def _on_assignment(self, assignment: ZigzagAssignment, stored_s: float) -> None:
        if self._workers[assignment.source.worker_id].is_up:
            self._pairs.begin(assignment, stored_s)

    def _on_layers(self, held: Held, num_layers: int) -> None:
        self._pairs.layers_ready(held.instance_id, num_layers)

    # --- all of it ---------------------------------------------------------------------------

    def run(self) -> RunResult:
        clock, requests = self._clock, self._requests
        # A unix time of 0 means "not yet" here and there.
        clock.run(SETTLE_S)
        self._begin()
        clock.run(2 * SETTLE_S)
        # Times of requests, of the lead-in and of what is imposed count from here.
        self._zero_s = zero_s = clock.now_s + (self._frame.lead_in_s if self._frame.lead_in else -requests[0].due_s)
        lead_in = self._frame.lead_in
        for number, request in enumerate(lead_in):
            self._arrives(request, zero_s - self._frame.lead_in_s, number - len(lead_in))
        for request in requests:
            self._arrives(request, zero_s, request.index)
        for imposed in self._frame.imposed or ():
            clock.at(max(clock.now_s, zero_s + imposed.at_s), self._impose, imposed)
        faults = self._frame.faults
        if self._setup.kill_every_s is not None:
            every_s = self._setup.kill_every_s
            faults += drawn(every_s, requests[0].due_s, requests[-1].due_s, self._setup.seed)
        self._faults.schedule(faults, zero_s)
        first_s, last_s = zero_s + requests[0].due_s, zero_s + requests[-1].due_s
        until_s = last_s if self._frame.counted_s is None else first_s + self._frame.counted_s
        clock.run(max(last_s, until_s))
        while (
            len(self._recorder.served) < len(lead_in) + len(requests) and clock.now_s < last_s + self._setup.patience_s
        ):
            clock.run(clock.now_s + 1.0)
        self._gateway.check_conserved()
        end_s = clock.now_s
        self._gateway.end()
        return self._result(first_s, until_s, end_s)

    def check_nothing_held(self) -> None:
        """Raises ``AssertionError`` where something is left of requests. Call it after ``run`` ended them all; it lets
        what is under way come to its end."""
        clock, end_s = self._clock, self._clock.now_s + WIND_UP_S
        clock.run(clock.now_s + SETTLE_S)
        while self._pairs.under_way() and clock.now_s < end_s:
            clock.run(clock.now_s + SETTLE_S)
        self._gateway.check_conserved()
        instances = [worker.held.instance for worker in self._workers if worker.held is not None]
        for instance in instances:
            instance.check_empty()
        bookings = self._gateway.router.bookings
        held = {
            "requests": self._gateway.num_active,
            "booked": sum([bookings.load_of(instance.instance_id).inflight_requests for instance in instances]),
            "pairs": len(self._pairs.under_way()),
            "flows": sum([n for purpose, n in self._network.running().items() if purpose != "weights"]),
        }
        if any(held.values()):
            raise AssertionError(f"{held} at {clock.now_s:g} s")

    def _arrives(self, request: PlannedRequest, zero_s: float, index: int) -> None:
        at_s = zero_s + request.due_s
        arrived = SimRequest(index, at_s, self._record.name, request.input_tokens, request.output_tokens)
        self._clock.at(at_s, self._gateway.arrive, arrived)

    def _impose(self, imposed: Imposed) -> None:
        """Now, and again and again as a monitor does, until something else is imposed: what still loads cannot go."""
        self._imposed[imposed.role] = imposed
        self._ask_again(imposed)

    def _ask_again(self, imposed: Imposed) -> None:
        if self._imposed.get(imposed.role) is not imposed:
            return
        self._clock.after(IMPOSED_EVERY_S, self._ask_again, imposed)
        self._planner.on_demand(
            Demand(
                publisher="imposed",
                sequence=self._clock.num_happened,
                model=self._record.name,
                role=imposed.role,
                desired=imposed.desired,
                observed=self._recorder.num_serving(imposed.role),
                triggered_ago_s=0.0,
                reason="imposed",
                term=1,
                spare=0,
                urgent=imposed.desired,
            )
        )

    def _result(self, begin_s: float, until_s: float, end_s: float) -> RunResult:
        if self._watch is not None:
            self._watch.ended(
                self._zero_s, self._recorder.served, self._planner.all_records(), self._network.carried, self._fabric
            )
        return RunResult(
            system=self._system.name,
            requests=self._requests,
            records=self._recorder.records(),
            duration_s=end_s - begin_s,
            zero_s=self._zero_s,
            cluster=self._recorder.cluster(begin_s, until_s, self._planner.all_records()),
            num_events=self._clock.num_happened,
            num_died=self._faults.num_died,
        )
