"""An instance in virtual time: its states, the requests that it takes, those that it decodes for others, and its load.

Its scheduler is the worker's own; ``engine`` runs it. What becomes of the requests of one that drains is ``migration``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from bench.sim.arrivals import Arrivals
from bench.sim.block_counts import BlockCounts
from bench.sim.clock import Clock
from bench.sim.compute import Compute
from bench.sim.engine import BatchTimes, PartialSteps, SimEngine
from bench.sim.kv import Departures, KvPaths
from bench.sim.load_reports import REPORT_EVERY_S, LoadReports
from bench.sim.migration import Migrator
from bench.sim.streams import Key, Listener, Stream, sequence_of
from bench.sim.token_reporter import TokenReporter
from services.worker.core.lifecycle import InstanceLifecycle
from services.worker.core.load import load_report
from services.worker.core.scheduling.request_checks import check_slot
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import Conflict, SentBack
from shared.messages.common import TAKES_PROMPTS, InstanceState, Role
from shared.messages.destinations import Destination, SendBack
from shared.messages.generation import DecodePlace, StreamPart
from shared.messages.load import LoadReport
from shared.messages.plans import MigratePlan
from shared.subjects import Process


class SimInstance:
    """From ``loading`` on. Requests and questions come in at the clock's present time."""

    def __init__(
        self,
        clock: Clock,
        listener: Listener,
        *,
        instance_id: str,
        worker: Process,
        model: str,
        role: Role,
        config: SchedulerConfig,
        compute: Compute,
        kv: KvPaths | None = None,
        slo_tbt_s: float = 0.0,
        expects_profile: bool = True,
        on_report: Callable[[LoadReport], object] = lambda _report: None,
        report_every_s: float = REPORT_EVERY_S,
        on_idle: Callable[[SimInstance], object] = lambda _instance: None,
        on_ran: Callable[[float, float], object] | None = None,
    ) -> None:
        """``kv``: None where no request is decoded elsewhere. ``on_report``: told of the load, at most every
        ``report_every_s`` and only while something changes. ``on_idle``: told whenever nothing is left of an instance
        that drains. ``on_ran``: told of prompts (``ran``)."""
        self._clock = clock
        self.instance_id = instance_id
        self.worker = worker
        self.worker_id = worker.id
        self.model = model
        self.role: Role = role
        self.compute = compute
        self.scheduler = Scheduler(config, BlockCounts(config.num_blocks, config.block_size))
        self.scheduler.budgets.keep_tbt(slo_tbt_s)
        if expects_profile:
            self.scheduler.budgets.expect(compute.profile)
        self.load_s = 0.0
        """How long it took to load; 0 until it serves."""
        self.on_first_work: Callable[[], object] | None = None
        """Called once, when something is accepted for the role that it has by then."""
        self._life = InstanceLifecycle("loading")
        self._departures = None if kv is None else Departures(clock, self, kv)
        self._migrator = None
        if kv is not None and self._departures is not None:
            self._migrator = Migrator(clock, self, kv, self._departures)
        self._reporter = TokenReporter(clock, listener, worker, instance_id)
        self.arrivals = Arrivals(clock, self, self._reporter)
        self._engine = SimEngine(clock, self.scheduler, compute, self)
        self._on_report, self._on_idle = on_report, on_idle
        self._on_ran = on_ran
        self._reports = LoadReports(clock, report_every_s, self._report, lambda: self._engine.is_busy)

    # --- its life ----------------------------------------------------------------------------

    @property
    def state(self) -> InstanceState:
        return self._life.state

    @property
    def num_requests(self) -> int:
        """That have not ended here, those included whose KV is on its way here."""
        shared = 0 if self.partial is None else self.partial.num_requests
        return self.scheduler.num_requests + len(self.arrivals) + shared

    def serve(self, load_s: float = 0.0) -> None:
        """All weights are here: take requests. Raises the life cycle's error."""
        self._life.move_to("serving")
        self.load_s = load_s
        self.changed()
        self._engine.wake()

    def go_live(self) -> None:
        """Run layers for another instance. Raises the life cycle's error."""
        self._life.move_to("live")
        self.changed()

    def drain(self) -> None:
        """Take no more requests. Raises the life cycle's error."""
        self._life.move_to("draining")
        self.changed()
        self.rests()

    def leave(self, destinations: Sequence[Destination], send_back: SendBack) -> None:
        """It drains: see its requests off. What nobody takes ends here."""
        if self._migrator is not None:
            self._migrator.leave(destinations, send_back)

    def on_migrate_plan(self, plan: MigratePlan, stored_s: float) -> None:
        """Move some requests, and serve on. ``stored_s``: when it was published."""
        if self._migrator is not None:
            self._migrator.on_migrate_plan(plan, stored_s)

    def revive(self) -> None:
        """Take requests again. Raises the life cycle's error."""
        self._life.move_to("serving")
        self.changed()

    def take_role(self, role: Role, on_first_work: Callable[[], object] | None = None) -> None:
        """What comes from now on is this role's; what is here finishes as it began."""
        self.role, self.on_first_work = role, on_first_work
        self._report()

    def kill(self) -> list[str]:
        """It is gone, with its worker. Its listener is told nothing; returns the requests that it had, in order of
        arrival. Those on their way here with their KV stay where they come from."""
        self._engine.count()
        self._life.move_to("failed")
        self._reports.stop()
        self._engine.stop()
        begun = [] if self._departures is None else self._departures.kill()
        begun += [] if self._migrator is None else self._migrator.kill()
        self.arrivals.kill()
        return [request_id for request_id in self._reporter.clear() if request_id not in begun]

    def check_empty(self) -> None:
        """Raises ``AssertionError`` unless nothing of any request is left here."""
        self.scheduler.check()
        held = {
            "requests": self.num_requests,
            "told of": len(self._reporter),
            "leaving": 0 if self._departures is None else len(self._departures.transfers),
            "moving": 0 if self._migrator is None else len(self._migrator),
            "blocks": self.scheduler.pool.num_used,
            **self.arrivals.held,
        }
        if any(held.values()):
            raise AssertionError(f"{self.instance_id}, which is {self.state}, still has {held}")

    # --- requests ----------------------------------------------------------------------------

    def submit(self, stream: Stream, *, decode_at: DecodePlace | None = None, may_wait: bool = True) -> None:
        """Take a request. Raises ``SentBack``, ``Conflict``, ``Overloaded``, ``ContextLengthExceeded`` as a worker
        does."""
        if self.state == "draining":
            raise SentBack(f"instance {self.instance_id} drains")
        self.check_admits()
        older = [key for n in range(stream.attempt) if self._reporter.of(key := (stream.request_id, n)) is not None]
        if not older and not may_wait:
            check_slot(self.instance_id, self.num_requests, self.scheduler.config.max_num_sequences)
        for key in older:
            self.cancel(key)
        sequence = sequence_of(stream, decode_at)
        self.scheduler.add(sequence, self._clock.now_s)
        self._reporter.add(sequence)
        self.began(TAKES_PROMPTS)
        if self.partial is not None:
            self.partial.accepted()
        self._engine.wake()

    def cancel(self, key: Key) -> None:
        """Nobody wants this attempt any more. Nothing is told of it."""
        sequence = self._reporter.of(key)
        if sequence is None:
            return
        self._reporter.remove(sequence)
        arriving = self.arrivals.of(sequence)
        if arriving is not None:
            self.arrivals.release(arriving)
            return

        def cancel() -> None:
            self.scheduler.cancel(*sequence.key)
            if self.partial is not None:
                self.partial.cancelled(sequence)
            if self._departures is not None:
                self._departures.ended(sequence)
            if self._migrator is not None:
                self._migrator.ended(sequence)

        self.call(cancel)

    def began(self, roles: frozenset[Role]) -> None:
        """It has accepted something for these roles."""
        if self.on_first_work is not None and self.role in roles:
            first, self.on_first_work = self.on_first_work, None
            first()

    def check_admits(self) -> None:
        """Raises ``Conflict`` if it takes no requests."""
        if self.state != "serving":
            raise Conflict(f"{self.instance_id} takes no requests: it is {self.state}")

    def left(self, sequence: ActiveSequence) -> None:
        """Another instance decodes it."""
        self._reporter.remove(sequence)
        self.arrivals.left(sequence.key)

        def leave() -> None:
            reservations = self.scheduler.reservations
            if reservations.token_of(sequence) is None:
                reservations.release_to_decoder(sequence)
            else:
                reservations.leave(sequence)  # its blocks are freed with the pair's batch

        self.call(leave)

    # --- for pairs ---------------------------------------------------------------------------

    def took(self, sequences: Iterable[ActiveSequence]) -> None:
        """Another instance's requests are this one's from now on."""
        for sequence in sequences:
            self._reporter.take_over(sequence)

    def gave(self, sequences: Iterable[ActiveSequence]) -> None:
        """These are another instance's from now on."""
        for sequence in sequences:
            self._reporter.remove(sequence)

    def ran_layers(self, sequence: ActiveSequence, first_layer: int, num_layers: int) -> None:
        """Layers ``first_layer <= i < num_layers`` of a whole context have run here, outside of steps. If another
        instance is to decode it, that is asked for room, and the KV of all layers since the first leaves; that of
        others only if the members have joined. Else all of it leaves once the context is computed."""
        if self._departures is None or sequence.decode_at is None or sequence.finished:
            return
        if not first_layer or self.sends(sequence):
            self._departures.ran_layers(sequence, num_layers)

    def join(self, sequences: Sequence[ActiveSequence], there: Sequence[ActiveSequence], source: SimInstance) -> bool:
        """At a pair's target: whether KV of a batch that the source pulls goes from both straight to where its requests
        are to be decoded. ``there``: the source's own."""
        if self._departures is None or source._departures is None or any(s.decode_at is None for s in sequences):
            return False
        return self._departures.join(sequences, there, source._departures)

    def sends(self, sequence: ActiveSequence) -> bool:
        """Its KV leaves for another instance, as far as is known."""
        return self._departures is not None and self._departures.sends(sequence)

    def computed_rest(self, sequence: ActiveSequence) -> None:
        """At the source: a context of which KV leaves from both has its first token."""
        if self._departures is not None and self.scheduler.reservations.token_of(sequence) is not None:
            self._departures.computed(sequence)

    def forget(self, sequences: Iterable[ActiveSequence]) -> None:
        """The other member goes on with these, from whatever layer: none of their KV leaves from here any more."""
        if self._departures is not None:
            self._departures.forget(sequences)

    # --- its engine --------------------------------------------------------------------------

    @property
    def partial(self) -> PartialSteps | None:
        """What it computes of a pair's batches. Set it between steps (``call``)."""
        return self._engine.partial

    @partial.setter
    def partial(self, partial: PartialSteps | None) -> None:
        self._engine.partial = partial

    @property
    def pipeline(self) -> BatchTimes | None:
        """Who runs its batches with it. Set it before it serves."""
        return self._engine.pipeline

    @pipeline.setter
    def pipeline(self, pipeline: BatchTimes | None) -> None:
        self._engine.pipeline = pipeline

    @property
    def computes(self) -> bool:
        """See ``EngineOwner``, as the next six."""
        return self.state in ("live", "serving", "draining")

    def call(self, function: Callable[[], object], *, after_step: bool = False) -> None:
        """See ``SimEngine.call``."""
        self._engine.call(function, after_step=after_step)

    def ran(self, began_s: float, num_tokens: float) -> None:
        if self._on_ran is not None:
            self._on_ran(began_s, num_tokens)

    def ran_first_layer(self, sequence: ActiveSequence, end: int, step_ends_s: float) -> None:
        if self._departures is not None:
            self._departures.ran_first_layer(sequence, end, step_ends_s)

    def ran_chunk(self, sequence: ActiveSequence) -> None:
        if self._departures is not None:
            self._departures.step_ended(sequence)

    def computed(self, sequence: ActiveSequence) -> None:
        if self._departures is None:
            self.scheduler.reservations.decode_here(sequence)
        else:
            self._departures.computed(sequence)

    def rests(self) -> None:
        """Say so, if it drains and has nothing left."""
        if self.state == "draining" and not self._engine.is_busy and not self.num_requests:
            self._on_idle(self)

    # --- what is told ------------------------------------------------------------------------

    def tell(self, outputs: Iterable[StreamPart]) -> None:
        """Of requests that are here, what they got now."""
        self._reporter.report(outputs)

    def tell_run(
        self, requests: Iterable[ActiveSequence], ends_s: Sequence[float], ended: Iterable[ActiveSequence]
    ) -> None:
        """Of decode steps that ended at these times; some requests ended with the last."""
        self._reporter.report_run(requests, ends_s, ended)

    # --- load --------------------------------------------------------------------------------

    def changed(self) -> None:
        """A report is due at the end of the interval."""
        if self.state in ("live", "serving", "draining"):
            self._reports.changed()

    def _report(self) -> None:
        self._on_report(self.load_report(self._clock.now_s))

    def load_report(self, now_s: float) -> LoadReport:
        """What the worker would say. ``now_s``: the clock's time."""
        ahead = self._engine.ahead()
        load = self.scheduler.load(ahead)
        if self.partial is not None:
            requests, tokens = self.partial.queued
            load = replace(
                load, queued_requests=load.queued_requests + requests, queued_tokens=load.queued_tokens + tokens
            )
        return load_report(
            load,
            self.scheduler.budgets.speed.speed,
            worker=self.worker,
            instance_id=self.instance_id,
            model=self.model,
            state=self.state,
            role=self.role,
            busy_s_total=self._engine.busy_s_total(ahead),
            load_s=self.load_s,
            now_s=now_s,
        )
