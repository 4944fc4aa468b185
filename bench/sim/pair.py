"""A live pair in virtual time: what ``services.worker.live`` does between two workers, without threads, bus and
tensors.

Who runs which layer, what is lent, pulled, kept and given is decided by ``shared.zigzag`` and
``services.worker.core.pairing``. Here questions take a message's time each way, hidden states and KV are flows between
the two, and what the engines do takes their instances' time. The order is the worker's: KV of pulled batches comes one
batch after another, while their other layers run.

Not simulated: embedding, copies to and from an engine, the pieces in which KV of a batch is asked for, and messages
that are lost.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from bench.sim.clock import Clock
from bench.sim.instance import SimInstance
from bench.sim.pair_steps import SourceSteps
from bench.sim.pair_target import PairTarget
from bench.sim.pair_tensors import PairPaths, PairTensors, on_engine
from bench.sim.processes import Process, Signal, Steps
from services.worker.core.pairing.batch import PromptBatch
from services.worker.core.pairing.pair import PairLife, PairState
from services.worker.core.pairing.source_queue import SourceQueue
from services.worker.core.pairing.source_work import (
    LOOK_S,
    AfterPull,
    PullTime,
    SourceRun,
    SourceWork,
    after_pull,
    parts,
)
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import Unavailable
from shared.messages.common import TAKES_PROMPTS, ErrorInfo
from shared.messages.live import Gate, LiveBatch, LiveReport, PlanSplit, ZigzagAssignment
from shared.zigzag.queue import Claim


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
        on_accepted: Callable[[], object] = lambda: None,
        on_lending: Callable[[bool], object] = lambda _begun: None,
        on_end: Callable[[SimPair], object] = lambda _pair: None,
    ) -> None:
        """``pull_s``: what a pull took in the source's pair before. ``ask_split``: tells the planner what waits; it may
        answer with ``set_gates``. ``on_accepted``: the target takes part: its instance is to go live. ``on_lending``:
        the queue is two instances' from now on, or no more. ``on_end``: ``report`` is there; the target may still
        finish what it kept."""
        self.assignment = assignment
        self.source = source
        self.life = PairLife()
        self.report: LiveReport | None = None
        self._clock = clock
        self._paths = paths
        self._ask_split, self._on_accepted = ask_split, on_accepted
        self._on_lending, self._on_end = on_lending, on_end
        self._num_layers = source.compute.num_layers
        self.queue = SourceQueue(assignment.pair_id, self._num_layers, source.scheduler.config)
        self.source_work: SourceWork[SourceRun] = SourceWork(
            self._num_layers, source.scheduler.config.prefill_chunk_tokens
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
        self._changed = Signal()
        self._tensors = PairTensors(paths, self._changed)
        self.target = PairTarget(
            clock, assignment, self.life, target, source, self._tensors, self._changed, on_finished=self._finished
        )
        self._processes: list[Process] = []
        self._target_processes: list[Process] = []
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
        self._knows_shares = False
        """The source has heard who has what; the pair is over."""
        self._num_claims = 0
        self._failure = ""
        self._started_s = clock.now_s
        self._batches: list[tuple[LiveBatch, float]] = []
        """And when their first tokens came."""
        self._first_cooperative_s: float | None = None

    # --- what is told --------------------------------------------------------------------------

    def begin(self) -> None:
        """The source offers it, and the target, which loads, accepts. ``layers_ready`` is to be told."""
        self._started_s = self._clock.now_s
        self._start(self._run())

    def arrived(self) -> None:
        """The source accepted a request: it goes the way of the others."""
        if not self._is_ending:
            self._arrived = True
            self._changed.fire()

    def layers_ready(self, layers_ready: int, *, complete: bool = False) -> None:
        """So many layers are loaded at the target. ``complete``: everything is."""
        self.target.layers_ready(layers_ready, complete=False)
        if complete and not self._loaded:
            self._loaded = True
            self._start(self._tell_loaded(), at_target=True)

    def set_gates(self, gates: tuple[Gate, ...]) -> None:
        """A split reaches the target."""
        self.target.set_gates(gates)

    def source_gone(self, reason: str, notice_s: float = 0.0) -> None:
        """The source has died: nobody reports. What the target does not own is dropped there, ``notice_s`` later."""
        failed = self._fail(reason)
        self._stop(self._processes)
        self._clock.after(notice_s, self._drop_at_target, failed)

    def _drop_at_target(self, failed: bool) -> None:
        if failed:
            self.target.close()
        else:  # what the target kept is its own
            self.target.drop_all_but(())

    def target_gone(self, reason: str, notice_s: float = 0.0) -> None:
        """The target has died. The source goes on alone, ``notice_s`` later."""
        if self.report is not None:
            return
        self._fail(reason)
        self._stop([*self._processes, *self._target_processes])
        self.target.died()
        self._start(self._go_on_alone(notice_s, in_doubt=self._source_knows and not self._knows_shares))

    def _go_on_alone(self, notice_s: float, *, in_doubt: bool) -> Steps:
        yield notice_s
        self._lose_kv()
        yield from self._take_back(in_doubt=in_doubt)

    @property
    def is_over(self) -> bool:
        """Both members have left it."""
        return self.target.is_over and self.report is not None

    # --- the source ----------------------------------------------------------------------------

    def _run(self) -> Steps:
        yield 2 * self._paths.message_s
        self._on_accepted()
        self.target.begin()
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
            self._ask_split(
                PlanSplit(
                    pair_id=self.assignment.pair_id,
                    batches=waiting,
                    source_free_s=self.source_work.remaining_s,
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
            taken = yield from self.target.take(batch, behind_seal=behind_seal)
            yield self._paths.message_s
            if not taken:
                self.queue.refused(batch)
                return
            for sequence in self.queue.took(batch):
                self._cancelled(sequence)
            self._start(self._bring_hidden(batch))

    def _bring_hidden(self, batch: PromptBatch) -> Steps:
        """As the source embeds them."""
        sent = self._tensors.send_hidden(self.source, self.target.instance, batch.num_tokens)
        yield from self._tensors.until_arrived(sent)
        self.target.hidden_arrived(batch.batch_id)

    def _pull_until_over(self) -> Steps:
        self._look()
        while True:
            yield from self._until_free()
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

    def _until_free(self) -> Steps:
        """Room comes without a step, too, as when requests leave with their KV."""
        look_at_s = self._clock.now_s + LOOK_S
        while not self._free:
            yield self._changed, look_at_s
            if self._clock.now_s >= look_at_s:
                self._look()
                look_at_s = self._clock.now_s + LOOK_S
        self._free = False

    def _pull(self) -> Steps:
        """The claim, or None, and whether cooperation has nothing left to gain."""
        claim_id = f"{self.assignment.pair_id}-claim-{self._num_claims}"
        self._num_claims += 1
        yield self._paths.message_s
        claim, over = yield from self.target.pull(claim_id)
        yield self._paths.message_s
        return claim, over

    def _receive(self, claim: Claim) -> Steps:
        """Get a batch that the target gave, and begin it. Its KV follows, or goes straight to who decodes it."""
        batch = self.queue.handed[claim.batch_id]
        self.queue.pulled.add(claim.batch_id)
        given, run = self.target.given(claim), SourceRun(batch)
        if given is None:
            self._settle_soon(claim.claim_id)
        else:
            hidden, theirs = given
            yield from self._tensors.until_arrived(hidden)
            run = SourceRun(batch, claim.first_layer, self.target.instance.join(theirs, batch.sequences, self.source))
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
                sent = self._tensors.send(self.target.instance, self.source, num_bytes, "kv")
                yield from self._tensors.until_arrived(sent)
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
        shares = yield from self.target.share(f"{self.assignment.pair_id}-end", busy_s)
        self.life.move_to(PairState.DISSOLVED)
        yield self._paths.message_s
        self._knows_shares = True
        self._taken_by_target((*self.target.work.finished, *shares.kept))
        for claim in shares.given:
            if claim.first_layer and claim.batch_id in self.queue.handed:
                yield from self._receive(claim)
        while self._fetching or self._direct:
            yield self._changed

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
        assignment, replace = self.assignment, msgspec.structs.replace
        now_s, first_s = self._clock.now_s, self._first_cooperative_s
        self._on_lending(False)
        self.target.changed()
        self.report = LiveReport(
            pair_id=assignment.pair_id,
            plan_id=assignment.plan_id,
            source=assignment.source.worker_id,
            target=assignment.target.worker_id,
            policy=assignment.policy,
            outcome="failed" if self._failure else "dissolved",
            reason=self._failure,
            started_ago_s=now_s - self._started_s,
            first_cooperative_token_ago_s=None if first_s is None else now_s - first_s,
            batches=tuple(replace(batch, first_token_ago_s=now_s - at_s) for batch, at_s in self._batches),
        )
        self._on_end(self)

    def _fail(self, reason: str) -> bool:
        if not self._knows_shares:
            self._failure = reason
        self._is_ending = True
        self._tensors.abort()
        return self.life.fail()

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
            self.target.layers_ready(0, complete=True)

    def _finished(self, batch: PromptBatch) -> None:
        if not self.life.ended:
            self._start(self._tell_taken(batch.batch_id))

    def _tell_taken(self, batch_id: str) -> Steps:
        yield self._paths.message_s
        self._taken_by_target((batch_id,))
        if self.queue.backlog:
            self.arrived()  # the target has capacity now

    def _settle_soon(self, claim_id: str) -> None:
        self._clock.after(self._paths.message_s, self.target.settle, claim_id)

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
        done = LiveBatch(
            batch_id=batch.batch_id,
            num_requests=len(batch.sequences),
            num_tokens=batch.num_tokens,
            target_layers=first_layer,
            source_layers=self._num_layers - first_layer,
            first_token_ago_s=0.0,
        )
        self._batches.append((done, now_s))

    def _cancelled(self, sequence: ActiveSequence) -> None:
        if self.queue.holds(*sequence.key):
            self._clock.after(self._paths.message_s, self.target.cancel, sequence.key)

    def _at_source(self, function: Callable[[], object]) -> Steps:
        return on_engine(self.source, function, self._changed)

    def _start(self, steps: Steps, *, at_target: bool = False) -> None:
        processes = self._target_processes if at_target else self._processes
        processes[:] = [process for process in processes if not process.over]
        processes.append(Process(self._clock, steps))

    def _stop(self, processes: Iterable[Process]) -> None:
        for process in list(processes):
            process.stop()
