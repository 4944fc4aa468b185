"""Workers in virtual time: they carry plans out, and report each change to the registry.

What a plan, a drain or a mutation means is the worker's protocol (``services/worker/scaling.py``, ``mutation.py``),
told here without messages: a plan reaches all of its targets at once. A worker that dies tells nobody; when it is back
it is a new process, which has nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec

from bench.sim.clock import Clock
from bench.sim.host_copies import HostCopies
from bench.sim.instance import SimInstance
from bench.sim.latencies import Latencies
from bench.sim.loading import Load, Transfers, Weights
from services.worker.core.scheduling.scheduler import LENT_QUEUE_FACTOR
from services.worker.core.upstreams import part_of
from shared.messages.common import InstanceState, Role
from shared.messages.plans import ChainMember, DrainPlan, MigratePlan, MutatePlan, ScalePlan
from shared.messages.progress import ProgressEvent, ScaleProgress
from shared.messages.registry import InstanceInfo, ModelRecord, WorkerHeartbeat, WorkerInfo

DROP_RETRY_S = 0.5
"""As ``services.worker.scaling``: how often an instance that holds the model's last copy asks whether it may go."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an instance says that it takes; the same for all."""

    max_running_requests: int
    max_queued_tokens: int
    context_tokens: int


@dataclass(eq=False, slots=True)
class Held:
    """A worker's instance."""

    instance_id: str
    model: ModelRecord
    epoch: int
    plan_id: str
    instance: SimInstance
    accepted_s: float
    load: Load | None = None
    drain_plan_id: str = ""
    ordered_role: tuple[int, float] = (0, 0.0)
    queue_factor: int = 1
    """How many instances' queues the requests sent here fill: of a live pair, all come to its source."""


@dataclass(eq=False, slots=True)
class SimWorker:
    """One worker: at most one instance."""

    info: WorkerInfo
    gpu_id: str
    held: Held | None = None
    sequence: int = 0
    is_up: bool = True

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def state(self) -> InstanceState:
        return self.held.instance.state if self.held is not None else "spare"


class SimWorkers:
    """All of them, and what they are told."""

    def __init__(
        self,
        clock: Clock,
        latencies: Latencies,
        loads: Transfers,
        host_copies: HostCopies,
        limits: Limits,
        weights_of: Callable[[ModelRecord], Weights],
        *,
        make: Callable[[SimWorker, str, ModelRecord, Role], SimInstance],
        report: Callable[[WorkerHeartbeat], None],
        progress: Callable[[ScaleProgress], None],
        on_layers: Callable[[Held, int], None] | None,
        on_serving: Callable[[Held], None],
    ) -> None:
        """``make``: an instance of that id for a worker. ``report`` and ``progress`` reach the pool and the planner;
        the delay is added here. ``on_layers``: told of each layer of an instance that is there; None: nobody asks.
        ``on_serving``: told of one that has all its weights."""
        self._clock = clock
        self._latencies = latencies
        self._loads = loads
        self._host_copies = host_copies
        self._limits = limits
        self._began: dict[tuple[str, str], float] = {}
        """When each plan's workers first reported on it."""
        self._weights_of = weights_of
        self._make = make
        self._report = report
        self._progress = progress
        self._on_layers = on_layers
        self._on_serving = on_serving
        self._workers: dict[str, SimWorker] = {}
        host_copies.on_change = self.changed

    def __getitem__(self, worker_id: str) -> SimWorker:
        return self._workers[worker_id]

    def __iter__(self) -> Iterator[SimWorker]:
        return iter(self._workers.values())

    def add(self, worker: SimWorker) -> None:
        """A worker registers, now."""
        self._workers[worker.worker_id] = worker
        self._report(self._heartbeat(worker))

    def begin(self, worker_id: str, model: ModelRecord, role: Role, epoch: int) -> None:
        """The worker's instance is there from the start; call it before time runs."""
        worker = self._workers[worker_id]
        held = worker.held = self._hold(worker, f"first-{worker_id}", model, epoch, "", role)
        held.instance.serve()
        self._report(self._heartbeat(worker))

    # --- death -------------------------------------------------------------------------------

    def die(self, worker_id: str) -> None:
        """With what it has; it is up. Who else has to know is told by who calls this."""
        worker = self._workers[worker_id]
        held, worker.held, worker.is_up = worker.held, None, False
        if held is not None:
            held.instance.kill()
            if held.load is not None:
                self._loads.abort(held.load)
        self._loads.lost(worker_id)

    def come_back(self, worker_id: str) -> None:
        """A new process under the same id registers."""
        worker = self._workers[worker_id]
        incarnation = str(int(worker.info.incarnation) + 1)
        worker.info = msgspec.structs.replace(worker.info, incarnation=incarnation)
        worker.sequence, worker.is_up = 0, True
        self.changed(worker_id)

    def has_instance(self, worker_id: str, instance_id: str) -> bool:
        """Whether the worker has this one, in whatever state."""
        held = self._workers[worker_id].held
        return held is not None and held.instance_id == instance_id

    # --- what is told to others --------------------------------------------------------------

    def changed(self, worker_id: str) -> None:
        """The registry is to know how a worker is now."""
        if not self._workers[worker_id].is_up:
            return
        self._clock.after(self._latencies.heartbeat_s, self._report, self._heartbeat(self._workers[worker_id]))

    def _heartbeat(self, worker: SimWorker) -> WorkerHeartbeat:
        worker.sequence += 1
        held, info = worker.held, None
        if held is not None:
            state = held.instance.state
            info = InstanceInfo(
                instance_id=held.instance_id,
                model=held.model.name,
                model_hash=held.model.model_hash,
                layout_hash=held.model.layout_hash,
                state=state,
                role=held.instance.role,
                epoch=held.epoch,
                weights_digest="whole" if state in ("serving", "draining") and held.load is None else "",
                max_running_requests=self._limits.max_running_requests,
                max_queued_tokens=held.queue_factor * self._limits.max_queued_tokens,
                context_tokens=self._limits.context_tokens,
                plan_id=held.plan_id,
            )
        return WorkerHeartbeat(
            worker=worker.info,
            state=worker.state,
            instance=info,
            sequence=worker.sequence,
            host_copies=self._host_copies.of(worker.worker_id),
        )

    def _tell(self, plan_id: str, worker: SimWorker, held: Held, event: ProgressEvent, layer: int = -1) -> None:
        now_s = self._clock.now_s
        received = held.model.weights_bytes if event in ("loaded", "serving") and held.load is not None else 0
        said = ScaleProgress(
            plan_id=plan_id,
            worker_id=worker.worker_id,
            instance_id=held.instance_id,
            event=event,
            after_s=now_s - self._began.setdefault((plan_id, worker.worker_id), now_s),
            layer=layer,
            received_bytes=received,
        )
        self._clock.after(self._latencies.progress_s, self._progress, said)

    # --- load --------------------------------------------------------------------------------

    def on_scale_plan(self, plan: ScalePlan) -> None:
        """A plan reaches its targets. Their sources have nothing to do but to stay."""
        loads: dict[str, Load] = {}
        for member in plan.targets:
            load = self._accept(plan, member)
            if load is not None:
                loads[member.worker_id] = load
        if loads:
            chunk_bytes = max(chain.chunk_bytes for chain in plan.chains)
            self._clock.after(self._latencies.connect_s, self._start, loads, chunk_bytes)

    def _accept(self, plan: ScalePlan, member: ChainMember) -> Load | None:
        worker, part = self._workers[member.worker_id], part_of(plan, member.worker_id)
        if part is None or worker.held is not None or not worker.is_up:
            return None
        held = worker.held = self._hold(worker, member.instance_id, plan.model, member.epoch, plan.plan_id, plan.role)
        self.changed(worker.worker_id)
        self._tell(plan.plan_id, worker, held, "accepted")

        on_layers = self._on_layers

        def layers(num_layers: int) -> None:
            self._tell(plan.plan_id, worker, held, "layer_ready", num_layers - 1)
            if on_layers is not None:
                on_layers(held, num_layers)

        held.load = Load(
            plan,
            part,
            self._weights_of(plan.model),
            worker.gpu_id,
            layers if on_layers is not None else None,
            lambda: self._loaded(worker, held),
        )
        return held.load

    def _hold(
        self, worker: SimWorker, instance_id: str, model: ModelRecord, epoch: int, plan_id: str, role: Role
    ) -> Held:
        made = self._make(worker, instance_id, model, role)
        return Held(instance_id, model, epoch, plan_id, made, self._clock.now_s)

    def _start(self, loads: dict[str, Load], chunk_bytes: int) -> None:
        held = {worker_id: self._workers[worker_id].held for worker_id in loads}
        here = {name: one for name, one in held.items() if one is not None and one.load is loads[name]}
        self._loads.start({worker_id: loads[worker_id] for worker_id in here}, chunk_bytes)
        for worker_id, one in here.items():
            self._tell(one.plan_id, self._workers[worker_id], one, "first_byte")

    def _loaded(self, worker: SimWorker, held: Held) -> None:
        self._tell(held.plan_id, worker, held, "loaded")
        self._clock.after(self._latencies.serve_s, self._serve, worker, held)

    def _serve(self, worker: SimWorker, held: Held) -> None:
        if worker.held is not held:
            return  # it has died
        load_s = self._clock.now_s - held.accepted_s
        if held.instance.state in ("loading", "live"):
            held.instance.serve(load_s)
        else:
            held.instance.load_s = load_s
        self._on_serving(held)
        self._tell(held.plan_id, worker, held, "serving")
        load, held.load = held.load, None
        self.changed(worker.worker_id)
        if load is not None and load.plan.keeps_on_host(worker.worker_id):
            self._host_copies.keep(worker.worker_id, held.model)

    def serve_early(self, worker_id: str) -> None:
        """The worker's instance takes requests before it has all weights: others run with it what it lacks."""
        worker = self._workers[worker_id]
        if worker.held is not None and worker.held.instance.state == "loading":
            worker.held.instance.serve()
            self.changed(worker_id)
            self._tell(worker.held.plan_id, worker, worker.held, "live")

    def live(self, worker_id: str) -> None:
        """The worker's instance loads, and computes already."""
        worker = self._workers[worker_id]
        if worker.held is not None and worker.held.instance.state == "loading":
            worker.held.instance.go_live()
            self.changed(worker_id)
            self._tell(worker.held.plan_id, worker, worker.held, "live")

    def lends(self, worker_id: str, held: Held, *, begun: bool) -> None:
        """The queue of the worker's instance is two instances' from now on, or no more."""
        held.queue_factor = LENT_QUEUE_FACTOR if begun else 1
        if self._workers[worker_id].held is held:
            self.changed(worker_id)

    # --- drain, mutate -----------------------------------------------------------------------

    def on_drain_plan(self, plan: DrainPlan) -> None:
        """Instances go, or stay after all."""
        for target in plan.targets:
            worker = self._workers[target.worker_id]
            held = worker.held
            if held is None or held.instance_id != target.instance_id:
                continue
            if plan.revive:
                self._revive(plan, worker, held)
            elif held.instance.state == "serving":
                self._drain(plan, worker, held)
                held.instance.leave(target.destinations, target.send_back)

    def _revive(self, plan: DrainPlan, worker: SimWorker, held: Held) -> None:
        if held.instance.state != "draining":
            return
        held.instance.revive()
        self.changed(worker.worker_id)
        self._tell(plan.plan_id, worker, held, "serving")

    def _drain(self, plan: DrainPlan, worker: SimWorker, held: Held) -> None:
        held.drain_plan_id = plan.plan_id
        held.instance.drain()
        self.changed(worker.worker_id)

    def on_migrate_plan(self, plan: MigratePlan, stored_s: float) -> None:
        """An instance gives requests away, and stays. ``stored_s``: when it was published."""
        held = self._workers[plan.worker_id].held
        if held is not None and held.instance_id == plan.instance_id:
            held.instance.on_migrate_plan(plan, stored_s)

    def idle(self, worker_id: str) -> None:
        """The worker's instance drains and has nothing left."""
        worker = self._workers[worker_id]
        if worker.held is not None:
            self._idle(worker, worker.held)

    def _idle(self, worker: SimWorker, held: Held) -> None:
        """It may go, unless somebody needs its copy or it is the last."""
        if worker.held is not held or held.instance.state != "draining" or held.instance.num_requests:
            return
        if self._is_needed(worker, held) or not self._host_copies.may_drop_gpu(worker.worker_id, held.model):
            self._clock.after(DROP_RETRY_S, self._idle, worker, held)
            return
        worker.held = None
        self.changed(worker.worker_id)
        self._tell(held.drain_plan_id, worker, held, "spare")

    def _is_needed(self, worker: SimWorker, held: Held) -> bool:
        """Whether it loads still, or others read its copy."""
        loads = [other.held.load for other in self._workers.values() if other.held is not None]
        running = [load for load in loads if load is not None]
        return held.load is not None or self._loads.is_read(worker.worker_id, running)

    def on_mutate_plan(self, plan: MutatePlan) -> None:
        """Instances get another role; nothing moves."""
        for target in plan.targets:
            worker = self._workers[target.worker_id]
            held = worker.held
            if not worker.is_up:
                continue
            if held is None or held.instance_id != target.instance_id or held.instance.state != "serving":
                self._refuse(plan, target.worker_id, target.instance_id)
                continue
            if held.instance.role != plan.role:
                held.ordered_role = plan.term, plan.planned_s
                held.instance.take_role(plan.role, partial(self._tell, plan.plan_id, worker, held, "working"))
                self.changed(worker.worker_id)
            self._tell(plan.plan_id, worker, held, "serving")

    def _refuse(self, plan: MutatePlan, worker_id: str, instance_id: str) -> None:
        said = ScaleProgress(
            plan_id=plan.plan_id,
            worker_id=worker_id,
            instance_id=instance_id,
            event="failed",
            after_s=0.0,
            detail="it is not there, or does not serve",
        )
        self._clock.after(self._latencies.progress_s, self._progress, said)

    def whole(self, model_hash: str) -> list[str]:
        """Workers whose instances have all weights of a model, and stay."""
        return [
            worker.worker_id
            for worker in self._workers.values()
            if worker.held is not None
            and worker.held.model.model_hash == model_hash
            and worker.held.load is None
            and worker.held.instance.state == "serving"
        ]

    def instance_at(self, worker_id: str) -> SimInstance:
        """Of a worker that has one."""
        held = self._workers[worker_id].held
        if held is None:
            raise RuntimeError(f"{worker_id} has no instance")
        return held.instance
