"""A live pair in virtual time: what ``services.worker.live`` does between two workers, without threads, bus and
tensors.

Who runs which layer, what is lent, pulled, kept and given is decided by ``shared.zigzag`` and
``services.worker.core.live``. Here questions take a message's time each way, hidden states and KV are flows between the
two, and what the engines do takes their instances' time. The order is the worker's: KV of pulled batches comes one
batch after another, while their other layers run.

Not simulated: embedding, copies to and from an engine, the pieces in which KV of a batch is asked for, and messages
that are lost.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bench.sim.clock import Clock
from bench.sim.flows import Flow, Network
from bench.sim.instance import SimInstance
from bench.sim.pair_steps import SourceSteps, TargetSteps
from bench.sim.processes import Process, Signal, Steps
from bench.sim.sharing import Resource
from services.worker.core.live.batch import PromptBatch
from services.worker.core.live.pair import PairLife, PairState
from services.worker.core.live.source_queue import SourceQueue
from services.worker.core.live.source_work import (
    LOOK_S,
    PULL_WAIT_S,
    AfterPull,
    PullTime,
    SourceRun,
    SourceWork,
    after_pull,
    parts,
)
from services.worker.core.live.target_work import TargetRun, TargetWork
from services.worker.core.scheduling.sequence import Sequence as Request
from shared.errors import Unavailable
from shared.messages.common import TAKES_PROMPTS, ErrorInfo
from shared.messages.live import Gate, LiveBatch, LiveReport, PlanSplit, ZigzagAssignment
from shared.messages.traffic import Purpose
from shared.zigzag.queue import Claim, Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPaths:
    """How hidden states and KV get from one member to the other."""

    network: Network
    path: Callable[[SimInstance, SimInstance], tuple[Resource, ...]]
    hidden_bytes_per_token: int
    message_s: float = 0.0003
    """A question between workers, or its answer."""


@dataclass(slots=True, eq=False)
class _Sent:
    """Tensors on their way to the other member."""

    flow: Flow | None = None
    arrived: bool = False


@dataclass(slots=True)
class _Held:
    """A batch at the target, until it is the target's or dropped."""

    run: TargetRun
    hidden: _Sent = field(default_factory=_Sent)
    """As pulled."""


class SimPair:
    """From ``begin`` to ``report``."""

    def __init__(
        self,
        clock: Clock,
        assignment: ZigzagAssignment,
        source: SimInstance,
        target: SimInstance,
        paths: PairPaths,
        *,
        pull_s: float = 0.0,
        ask_split: Callable[[PlanSplit], object] = lambda _asked: None,
        on_lending: Callable[[bool], object] = lambda _begun: None,
        on_end: Callable[[SimPair], object] = lambda _pair: None,
    ) -> None:
        """``pull_s``: what a pull took in the source's pair before. ``ask_split``: tells the planner what waits; it may
        answer with ``set_gates``. ``on_lending``: the queue is two instances' from now on, or no more. ``on_end``:
        ``report`` is there; the target may still finish what it kept."""
        self.assignment = assignment
        self.source = source
        self.target = target
        self.life = PairLife()
        self.report: LiveReport | None = None
        self._clock = clock
        self._paths = paths
        self._ask_split = ask_split
        self._on_lending, self._on_end = on_lending, on_end
        self._num_layers = source.compute.num_layers
        self.queue = SourceQueue(assignment.pair_id, self._num_layers, source.scheduler.config)
        self.source_work: SourceWork[SourceRun] = SourceWork(
            self._num_layers, source.scheduler.config.prefill_chunk_tokens
        )
        self.target_work: TargetWork[TargetRun] = TargetWork(
            self._num_layers, target.scheduler.config.prefill_chunk_tokens, assignment
        )
        self.time = PullTime(pull_s)
        self._source_steps = SourceSteps(
            source,
            self.source_work,
            lambda: clock.now_s,
            decode_interval_s=assignment.slo_tbt_s / 2,
            on_done=self._done,
            on_step=self._look,
            on_accepted=self.arrived,
            on_cancelled=self._cancelled,
        )
        self._target_steps = TargetSteps(
            target,
            self.target_work,
            lambda: clock.now_s,
            decode_interval_s=assignment.slo_tbt_s / 2,
            on_layer=self._layer_ended,
            on_finished=self._finished,
        )
        self._changed = Signal()
        self._on_their_way: list[_Sent] = []
        self._processes: list[Process] = []
        self._target_processes: list[Process] = []
        self._not_taken: dict[str, _Held] = {}
        """At the target, those that are the source's."""
        self._coming: deque[tuple[SourceRun, str]] = deque()
        """Pulled batches whose KV is to be fetched, with their claims."""
        self._fetching = False
        self._direct: list[SourceRun] = []
        """Pulled batches whose KV goes straight to where it is decoded, and is not there yet."""
        self._handing = False
        self._arrived = False
        self._is_ending = False
        self._free = False
        self._loaded = False
        """The target has everything."""
        self._source_knows = False
        self._num_claims = 0
        self._shares: Shares | None = None
        self._failure = ""
        self._started_s = clock.now_s
        self._batches: list[LiveBatch] = []
        self._first_cooperative_s: float | None = None

    # --- what is told --------------------------------------------------------------------------

    def begin(self) -> None:
        """The target has accepted the source's offer, and is live. ``layers_ready`` is to be told."""
        self._started_s = self._clock.now_s
        self.target.partial = self._target_steps
        self._start(self._run())

    def arrived(self) -> None:
        """The source accepted a request: it goes the way of the others."""
        if not self._is_ending:
            self._arrived = True
            self._changed.fire()

    def layers_ready(self, layers_ready: int, *, complete: bool = False) -> None:
        """So many layers are loaded at the target. ``complete``: everything is."""
        self.target_work.set_layers_ready(layers_ready, complete=False)
        if complete and not self._loaded:
            self._loaded = True
            self._start(self._tell_loaded(), at_target=True)
        self._look_at_target()

    def set_gates(self, gates: tuple[Gate, ...]) -> None:
        """A split reaches the target."""
        self.target_work.set_gates(gates)
        self._look_at_target()

    def source_gone(self, reason: str) -> None:
        """The source has died: nobody reports. What the target does not own is dropped there."""
        failed = self._fail(reason)
        self._stop(self._processes)
        if not failed:  # what the target kept is its own
            self._drop_all_but(())
            return
        batches = self.target_work.close()
        self._not_taken.clear()
        scheduler = self.target.scheduler
        release = [sequence for batch in batches for sequence in batch.sequences]
        self.target.forget(release)
        self.target.call(lambda: scheduler.reservations.release(release), between_layers=True)
        self._layer_ended()

    def target_gone(self, reason: str, *, last_word: bool = False) -> None:
        """The target has died, or its load is given up. ``last_word``: it said what it owns before."""
        if self.report is not None:
            return
        failed = self._fail(reason)
        self._stop([*self._processes, *self._target_processes])
        self.target_work.close()
        self._not_taken.clear()
        self._lose_kv()
        self._start(self._take_back(in_doubt=failed and self._source_knows and not last_word))

    @property
    def is_over(self) -> bool:
        """Both members have left it."""
        return self.life.ended and not self.target_work.batches

    # --- the source ----------------------------------------------------------------------------

    def _run(self) -> Steps:
        yield self._paths.message_s  # the target's answer
        self.life.move_to(PairState.REDIRECTING)
        yield from self._at_source(self._begin_lending)
        self._on_lending(True)
        yield from self._redirect()
        yield from self._pull_until_over()
        self._is_ending = True
        while self._handing or self._direct or self._fetching:
            yield self._changed
        yield from self._dissolve()
        yield from self._take_back(in_doubt=False)

    def _begin_lending(self) -> None:
        scheduler = self.source.scheduler
        self.source.partial = self._source_steps
        scheduler.table.lending = True
        self.queue.lend(scheduler)

    def _redirect(self) -> Steps:
        yield from self._hand_over(behind_seal=False)
        yield 2 * self._paths.message_s
        self.life.move_to(PairState.COOPERATING)
        waiting = self.queue.to_split(self.assignment.policy, self._token_s)
        if waiting:
            free_at_s = self._clock.now_s + self.source_work.remaining_s
            self._ask_split(
                PlanSplit(
                    pair_id=self.assignment.pair_id,
                    batches=waiting,
                    source_free_at_s=free_at_s,
                    pull_s=self.time.pull_s,
                )
            )
        self._start(self._hand_arrivals())

    def _hand_arrivals(self) -> Steps:
        while not self._is_ending:
            while not self._arrived and not self._is_ending:
                yield self._changed
            self._arrived = False
            if not self._is_ending:
                self._handing = True
                yield from self._at_source(lambda: self.queue.lend(self.source.scheduler))
                yield from self._hand_over(behind_seal=True)
                self._handing = False
                self._changed.fire()

    def _hand_over(self, *, behind_seal: bool) -> Steps:
        """Everything, as far as the target has capacity."""
        self.queue.pack(self._token_s)
        while not self._is_ending and (batch := self.queue.next_to_hand()) is not None:
            yield self._paths.message_s
            taken = yield from self._take_at_target(batch, behind_seal=behind_seal)
            yield self._paths.message_s
            if not taken:
                self.queue.refused(batch)
                return
            for sequence in self.queue.took(batch):
                self._cancelled(sequence)
            held = self._not_taken.get(batch.batch_id)
            self._start(self._bring_hidden(batch, held))

    def _bring_hidden(self, batch: PromptBatch, held: _Held | None) -> Steps:
        """As the source embeds them."""
        num_bytes = batch.num_tokens * self._paths.hidden_bytes_per_token
        yield from self._bring(self.source, self.target, num_bytes, "activations")
        if held is not None:
            self.target_work.queue.arrived(batch.batch_id)
            self._look_at_target()

    def _pull_until_over(self) -> Steps:
        self._look()
        while True:
            while not self._free:
                yield self._changed
            self._free = False
            if not self.life.ended and parts(self.assignment.policy, target_loaded=self._source_knows):
                return
            began_s = self._clock.now_s
            claim, over = yield from self._pull()
            if claim is not None:
                yield from self._receive(claim)
                layer_s = max([b.layer_s for b in self.queue.handed.values()], default=0.0)
                self.time.took(self._clock.now_s - began_s, layer_s)
            else:
                self._free = True
            gets_prompts = self.source.state == "serving" and self.source.role in TAKES_PROMPTS
            has_backlog = bool(self.queue.backlog)
            then = after_pull(
                pulled=claim is not None, can_dissolve=over, gets_prompts=gets_prompts, has_backlog=has_backlog
            )
            if then is AfterPull.DISSOLVE:
                return
            if then is AfterPull.HAND_OVER:
                self.arrived()
            elif then is AfterPull.RUN_BACKLOG:
                yield from self._run_from_backlog()

    def _pull(self) -> Steps:
        """The claim, or None, and whether cooperation has nothing left to gain."""
        claim_id = f"{self.assignment.pair_id}-claim-{self._num_claims}"
        self._num_claims += 1
        yield self._paths.message_s
        until_s = self._clock.now_s + PULL_WAIT_S
        while True:
            waits = self._clock.now_s < until_s
            over = self.target_work.is_over
            claim = self.target_work.pull(claim_id, waits=waits)
            if claim is not None or over or not waits:
                break
            yield self._changed, until_s
        if claim is not None:
            self._send_hidden(claim)
            self._look_at_target()  # what was in the way of a later batch is gone
        over = claim is None and self.target_work.can_dissolve
        yield self._paths.message_s
        return claim, over

    def _send_hidden(self, claim: Claim) -> None:
        held = self._not_taken.get(claim.batch_id)
        if claim.first_layer and held is not None:
            num_bytes = held.run.batch.num_tokens * self._paths.hidden_bytes_per_token
            held.hidden = self._send(self.target, self.source, num_bytes, "activations")

    def _receive(self, claim: Claim) -> Steps:
        """Get a batch that the target gave, and begin it. Its KV follows, or goes straight to who decodes it."""
        batch = self.queue.handed[claim.batch_id]
        self.queue.pulled.add(claim.batch_id)
        held = self._not_taken.get(claim.batch_id)
        run = SourceRun(batch)
        if claim.first_layer and held is not None:
            while not held.hidden.arrived:
                yield self._changed
            theirs = held.run.batch.sequences
            direct = self.target.join(theirs, batch.sequences, self.source)
            run = SourceRun(batch, claim.first_layer, direct)
        else:
            self._settle_soon(claim.claim_id)
        yield from self._begin(run)
        del self.queue.handed[claim.batch_id]
        if run.kv_direct:
            self._direct.append(run)
            self._start(self._until_decoded_elsewhere(run, claim.claim_id))
        elif run.first_layer:
            self._fetch_soon(run, claim.claim_id)

    def _begin(self, run: SourceRun) -> Steps:
        def start() -> bool:
            if not self.queue.begin(run.batch, self.source.scheduler):
                return False
            self.source_work.begin(run, self._clock.now_s)
            return True

        while not (yield from self._at_source(start)):
            self._free = False
            yield self._changed, self._clock.now_s + LOOK_S
        self._free = False
        self._look()
        self.source.call(lambda: None, between_layers=True)

    def _run_from_backlog(self) -> Steps:
        while self._handing:
            yield self._changed
        if self.queue.backlog:
            yield from self._begin(SourceRun(self.queue.backlog[0]))
            self.queue.backlog.popleft()

    def _fetch_soon(self, run: SourceRun, claim_id: str) -> None:
        self._coming.append((run, claim_id))
        if not self._fetching:
            self._fetching = True
            self._start(self._fetch_all())

    def _fetch_all(self) -> Steps:
        """KV of the layers that the target ran, one batch after another."""
        layer_bytes = self.source.compute.kv_bytes_per_token / self._num_layers
        while self._coming:
            run, claim_id = self._coming[0]
            yield self._paths.message_s
            if not run.batch.ended:
                num_bytes = run.batch.num_tokens * run.first_layer * layer_bytes
                yield from self._bring(self.target, self.source, num_bytes, "kv")
            self._coming.popleft()
            self._settle_soon(claim_id)
            yield from self._at_source(functools.partial(self._kv_over, run, is_here=True))
        self._fetching = False
        self._changed.fire()

    def _until_decoded_elsewhere(self, run: SourceRun, claim_id: str) -> Steps:
        """Or until they have ended, or are to be decoded here: then KV of the first layers is needed after all."""
        while any(not s.finished and s.decode_at is not None for s in run.batch.sequences):
            yield self._changed, self._clock.now_s + LOOK_S
        self._direct.remove(run)
        if run.batch.ended:
            self._settle_soon(claim_id)
            yield from self._at_source(functools.partial(self._kv_over, run, is_here=True))
        else:
            self._fetch_soon(run, claim_id)
        self._changed.fire()

    def _kv_over(self, run: SourceRun, *, is_here: bool) -> None:
        self.source_work.kv_over(run, self.source.scheduler, is_here=is_here)

    # --- the end -------------------------------------------------------------------------------

    def _dissolve(self) -> Steps:
        busy_s = self.source_work.remaining_s
        yield self._paths.message_s
        while self._loaded and not self._source_knows:
            yield self._changed
        claim_id = f"{self.assignment.pair_id}-end"
        while (shares := self.target_work.share(claim_id, busy_s, kv_apart=True)) is None:
            yield self._changed
        self._shares = shares
        self._keep(shares)
        yield self._paths.message_s
        self.life.move_to(PairState.DISSOLVED)
        self._taken_by_target((*self.target_work.finished, *shares.kept))
        for claim in shares.given:
            if claim.first_layer and claim.batch_id in self.queue.handed:
                yield from self._receive(claim)
        while self._fetching or self._direct:
            yield self._changed

    def _keep(self, shares: Shares) -> None:
        """At the target: what it kept is its own, what it gives and had not begun is dropped."""
        begun = [claim for claim in shares.given if claim.first_layer]
        for batch_id in shares.kept:
            self._take_at_target_for_good(batch_id)
        for claim in begun:
            self._send_hidden(claim)
        self._drop_all_but([claim.batch_id for claim in begun])
        self._look_at_target()

    def _take_back(self, *, in_doubt: bool) -> Steps:
        """What the target does not own is the source's again, like any other request."""
        doubt = None
        if in_doubt:
            doubt = ErrorInfo.of(Unavailable(f"the target may have finished the prompt: {self._failure}"))
        back, doubtful = self.queue.close(in_doubt=in_doubt)
        yield from self._at_source(lambda: self.queue.restore(self.source.scheduler, back, doubtful, doubt))
        while self.source_work:
            yield self._changed
        yield from self._at_source(lambda: setattr(self.source, "partial", None))
        self._over()

    def _over(self) -> None:
        assignment = self.assignment
        self._on_lending(False)
        self._layer_ended()
        self.report = LiveReport(
            pair_id=assignment.pair_id,
            plan_id=assignment.plan_id,
            source=assignment.source.worker_id,
            target=assignment.target.worker_id,
            policy=assignment.policy,
            outcome="failed" if self.life.state is PairState.FAILED else "dissolved",
            reason=self._failure,
            started_at_s=self._started_s,
            ended_at_s=self._clock.now_s,
            first_cooperative_token_at_s=self._first_cooperative_s,
            batches=tuple(self._batches),
        )
        self._on_end(self)

    def _fail(self, reason: str) -> bool:
        failed = self.life.fail()
        if failed:
            self._failure = reason
        self._is_ending = True
        for sent in self._on_their_way:
            if sent.flow is not None:
                self._paths.network.abort(sent.flow)
        self._on_their_way.clear()
        return failed

    def _lose_kv(self) -> None:
        """What was to come from the target does not."""
        lost = [*self._direct, *[run for run, _ in self._coming]]
        self._direct.clear()
        self._coming.clear()

        def lose() -> None:
            for run in lost:
                self._kv_over(run, is_here=False)

        self.source.call(lose)

    # --- the target ----------------------------------------------------------------------------

    def _take_at_target(self, batch: PromptBatch, *, behind_seal: bool) -> Steps:
        """A hand-over: whether the target has capacity."""
        scheduler = self.target.scheduler
        if any(length >= scheduler.config.limit_tokens for length in batch.lengths):
            return False
        theirs = PromptBatch(batch.batch_id, batch.serial, [_copy(s) for s in batch.sequences], batch.layer_s)
        if not (yield from self._at(self.target, lambda: scheduler.reservations.reserve(theirs.sequences))):
            return False
        run = TargetRun(theirs)
        self.target_work.add(run, behind_seal=behind_seal)
        self._not_taken[batch.batch_id] = _Held(run)
        self._changed.fire()
        return True

    def _tell_loaded(self) -> Steps:
        """The source has to know before the target finishes batches."""
        yield self._paths.message_s
        self._source_knows = True
        if parts(self.assignment.policy, target_loaded=True):
            self._free = True
            self._changed.fire()
        yield self._paths.message_s
        if not self.life.ended or self.life.state is PairState.DISSOLVED:
            if self.life.state is PairState.COOPERATING:
                self.life.move_to(PairState.LOADED)
            self.target_work.set_layers_ready(0, complete=True)
            self._look_at_target()

    def _finished(self, batch: PromptBatch) -> None:
        self._take_at_target_for_good(batch.batch_id)
        if not self.life.ended:
            self._start(self._tell_taken(batch.batch_id))

    def _tell_taken(self, batch_id: str) -> Steps:
        yield self._paths.message_s
        self._taken_by_target((batch_id,))
        if self.queue.backlog:
            self.arrived()  # the target has capacity now

    def _take_at_target_for_good(self, batch_id: str) -> None:
        held = self._not_taken.pop(batch_id, None)
        if held is not None:
            self.target.took([s for s in held.run.batch.sequences if not s.finished])

    def _drop_all_but(self, batch_ids: Iterable[str]) -> None:
        self._drop([batch_id for batch_id in self._not_taken if batch_id not in batch_ids])

    def _drop(self, batch_ids: Sequence[str]) -> None:
        """Free what these have at the target."""

        def drop() -> None:
            for batch in self.target_work.drop(tuple(batch_ids)):
                self.target.forget(batch.sequences)
                self.target.scheduler.reservations.release(batch.sequences)
            self._layer_ended()

        if batch_ids:
            self.target.call(drop, between_layers=True)
        for batch_id in batch_ids:
            self._not_taken.pop(batch_id, None)

    def _layer_ended(self) -> None:
        self._changed.fire()
        if self.life.ended and not self.target_work.batches and self.target.partial is self._target_steps:
            self.target.partial = None

    def _look_at_target(self) -> None:
        self.target.call(lambda: None, between_layers=True)
        self._layer_ended()

    def _settle_soon(self, claim_id: str) -> None:
        self._clock.after(self._paths.message_s, self._settle, claim_id)

    def _settle(self, claim_id: str) -> None:
        self._drop(self.target_work.settle({claim_id}))

    # --- both ----------------------------------------------------------------------------------

    @property
    def _token_s(self) -> float:
        """Of a prompt token at the source, through all layers, as measured or as a profile says."""
        budgets = self.source.scheduler.budgets
        tokens_per_s = budgets.speed.speed.prefill_tokens_per_s
        return 1 / tokens_per_s if tokens_per_s else budgets.cost.token_s

    def _look(self) -> None:
        """A step of the source has ended: the next batch may be asked for."""
        scheduler = self.source.scheduler
        if self.source_work.is_free(scheduler, self.time.lead_s) and self.queue.has_room(scheduler):
            self._free = True
        self._changed.fire()

    def _done(self, run: SourceRun) -> None:
        self._record(run.batch, run.first_layer)
        self._look()

    def _taken_by_target(self, batch_ids: Iterable[str]) -> None:
        batches = self.queue.taken_by_target(batch_ids)
        for batch in batches:
            self._record(batch, self._num_layers)
        sequences = [s for batch in batches for s in batch.sequences]
        self.source.gave(sequences)
        self.source.call(lambda: self.source.scheduler.release_to_target(sequences), between_layers=True)

    def _record(self, batch: PromptBatch, first_layer: int) -> None:
        now_s = self._clock.now_s
        if 0 < first_layer < self._num_layers and self._first_cooperative_s is None:
            self._first_cooperative_s = now_s
        self._batches.append(
            LiveBatch(
                batch_id=batch.batch_id,
                num_requests=len(batch.sequences),
                num_tokens=batch.num_tokens,
                target_layers=first_layer,
                source_layers=self._num_layers - first_layer,
                first_token_at_s=now_s,
            )
        )

    def _cancelled(self, sequence: Request) -> None:
        if self.queue.holds(*sequence.key):
            self._clock.after(self._paths.message_s, self._cancel_at_target, sequence.key)

    def _cancel_at_target(self, key: tuple[str, int]) -> None:
        free = []
        for batch_id, held in self._not_taken.items():
            for sequence in held.run.batch.sequences:
                if sequence.key == key:
                    sequence.finished = True
                    if held.run.batch.ended and self.target_work.cancel(batch_id):
                        free.append(batch_id)
        self._drop(free)

    def _at_source(self, function: Callable[[], object]) -> Steps:
        return self._at(self.source, function)

    def _at(self, member: SimInstance, function: Callable[[], object]) -> Steps:
        """Run it on the engine's thread, between two layers; its result."""
        results: list[object] = []

        def run() -> None:
            results.append(function())
            self._changed.fire()

        member.call(run, between_layers=True)
        while not results:
            yield self._changed
        return results[0]

    def _send(self, sender: SimInstance, receiver: SimInstance, num_bytes: float, purpose: Purpose) -> _Sent:
        sent = _Sent()

        def arrived(_: Flow) -> None:
            sent.arrived = True
            self._on_their_way.remove(sent)
            self._changed.fire()

        self._on_their_way.append(sent)
        path = self._paths.path(sender, receiver)
        sent.flow = self._paths.network.start(path, num_bytes, on_end=arrived, purpose=purpose)
        return sent

    def _bring(self, sender: SimInstance, receiver: SimInstance, num_bytes: float, purpose: Purpose) -> Steps:
        sent = self._send(sender, receiver, num_bytes, purpose)
        while not sent.arrived:
            yield self._changed

    def _start(self, steps: Steps, *, at_target: bool = False) -> None:
        processes = self._target_processes if at_target else self._processes
        processes[:] = [process for process in processes if not process.over]
        processes.append(Process(self._clock, steps))

    def _stop(self, processes: Iterable[Process]) -> None:
        for process in list(processes):
            process.stop()


def _copy(sequence: Request) -> Request:
    """A request, as another instance knows it."""
    return Request(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        gateway_id=sequence.gateway_id,
        prompt=sequence.prompt,
        params=sequence.params,
        output=list(sequence.output),
        decode_at=sequence.decode_at,
    )
