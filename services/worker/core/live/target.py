"""The target of a pair: which layer it runs, which batch it gives, which it keeps, and what it frees.

A batch is the target's once it is *taken*. Until then it is the source's: should the target go, the source computes it;
should the source go, the gateway submits it again. A batch has blocks here from ``Reserve`` to ``Free``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from services.worker.core.live.batch import Batch, Key, part_from
from services.worker.core.live.gates import Gates
from services.worker.core.live.life import PairLife, PairState
from services.worker.core.live.machine import (
    Abort,
    AnswerQuestion,
    Begin,
    Cancelled,
    Detach,
    Due,
    EngineStopped,
    Finish,
    Lost,
    Machine,
    Over,
    PartWanted,
    RunPart,
    SendHidden,
    TellEnded,
)
from services.worker.core.live.target_words import (
    Abandon,
    Announce,
    AwaitStepEnd,
    Embed,
    EndRequests,
    EngineStops,
    Forget,
    Free,
    GatesCame,
    HandedOver,
    HostBatch,
    LayersReady,
    Note,
    Reserve,
    SendKv,
    SourceAsks,
    TellTaken,
    Wake,
)
from shared.errors import BadRequest, BlitzError, Conflict, EngineBroken, Overloaded, Unavailable
from shared.messages.common import Ack, ErrorInfo
from shared.messages.live import (
    Dissolve,
    Dissolved,
    Given,
    LayerRuns,
    Pull,
    Pulled,
    PullKv,
    Seal,
    Settle,
    ZigzagAssignment,
)
from shared.zigzag.batch import State
from shared.zigzag.queue import Claim, Layer, Policy, Queue

WATCH_S = 0.05
"""How often it is looked whether layers come as planned."""
KNOWS_S = 1.0
"""How long the source's question to part waits for its answer to what it was told."""
NO_RUNS = LayerRuns(started_ago_s=0.0, bucket_s=0.0)


@dataclass(slots=True)
class _Run:
    """A batch that has blocks here."""

    batch: Batch
    open: set[Key]
    """Requests of it that have not ended."""
    next_token: int = 0
    """Of the layer that is begun: the engine was given those before it."""
    num_in_flight: int = 0
    """Parts that the engine was given, and that have not landed."""
    is_sent: bool = False
    """Once pulled, its hidden states are on their way, or there."""
    kv_sent: set[int] = field(default_factory=set)
    """The same of KV, by first layers."""
    lacks_hidden: bool = False


class TargetMachine(Machine):
    """Of one pair."""

    def __init__(
        self,
        assignment: ZigzagAssignment,
        num_layers: int,
        *,
        part_tokens: int,
        limit_tokens: int,
        ordered_s: float = 0.0,
    ) -> None:
        """``part_tokens``: most of a part of a layer. ``limit_tokens``: of a request, with what it puts out.
        ``ordered_s``: when the target's plan was stored."""
        super().__init__()
        self.life = PairLife()
        self.queue = Queue(num_layers, Policy(assignment.policy))
        self.gates = Gates(assignment)
        self.loaded = False
        """It has everything."""
        self.shares: Dissolved | None = None
        """What was agreed in the end."""
        self.failure = ""
        self.may_run = False
        """There may be a layer to run. Cheap: the engine asks before every step."""
        self._pair_id = assignment.pair_id
        self._part_tokens = part_tokens
        self._limit_tokens = limit_tokens
        self._ordered_s = ordered_s
        self._watch_s = math.inf
        self._runs: dict[str, _Run] = {}
        self._not_taken: dict[str, Batch] = {}
        """Those that are the source's."""
        self._known: set[str] = set()
        """All that ever came."""
        self._reserving: dict[str, tuple[HandedOver, list[int]]] = {}
        """With the questions that repeat it."""
        self._settling: list[int] = []
        """Questions that are answered once blocks are free."""
        self._begun: Layer | None = None
        """With parts that the engine was not given yet."""
        self._ends = False
        """A batch's last part is in flight: its first tokens come before others' layers."""
        self._finished: list[str] = []
        """Batches that were finished here, in order, and of which the source may not know."""
        self._pulls: list[tuple[int, Pull, float]] = []
        """Those that wait, and until when."""
        self._parting: list[tuple[int, Dissolve, float]] = []
        """The same of wishes to part."""
        self._source_knows = False
        """That this one is loaded, or the pair has ended."""
        self._halted = False
        self._tells = True
        """The source may not know that the pair has failed."""
        self._source_is_lost = False
        self._engine_error: ErrorInfo | None = None
        """Of what was kept."""
        self._awaits_step_end = False
        self._is_over = False

    # --- to be read -----------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        waiting = [until_s for _, _, until_s in self._pulls]
        # Later it is the end of a layer that is waited for.
        waiting += [until_s for _, _, until_s in self._parting if until_s > self.now_s]
        if self.gates.may_lapse and not self.life.ended:
            waiting.append(self._watch_s)
        return min(waiting, default=math.inf)

    @property
    def num_requests(self) -> int:
        """Of batches that have blocks here."""
        return sum([len(run.batch.requests) for run in list(self._runs.values())])

    @property
    def queued(self) -> tuple[int, int]:
        """Requests and tokens that are this instance's own: what it kept. Before the pair dissolves, all are the
        source's."""
        runs = list(self._runs.values()) if self.queue.dissolved else []
        return sum([len(run.batch.requests) for run in runs]), sum([run.batch.num_tokens for run in runs])

    def holds(self, batch_id: str) -> bool:
        """A batch has blocks here."""
        return batch_id in self._runs

    # --- batches come ---------------------------------------------------------------------------

    def _begin(self, _: Begin) -> None:
        self.life.move_to(PairState.REDIRECTING)
        self._watch_s = self.now_s + WATCH_S

    def _handed_over(self, asked: HandedOver) -> None:
        batch = asked.batch
        if self._has_failed(asked.question):
            return
        if batch.batch_id in self._reserving:
            self._reserving[batch.batch_id][1].append(asked.question)
        elif batch.batch_id in self._known:
            self.do(AnswerQuestion(asked.question, Ack()))
        elif self._is_closed:
            self.refuse(asked.question, Conflict(f"pair {self._pair_id} is over"))
        elif (most := max([r.num_tokens for r in batch.requests])) >= self._limit_tokens:
            limit = self._limit_tokens - 1
            self.refuse(asked.question, BadRequest(f"{most} tokens: the target takes up to {limit}"))
        else:
            self._known.add(batch.batch_id)
            self._reserving[batch.batch_id] = asked, [asked.question]
            self.do(Reserve(batch.batch_id))

    def _reserved(self, reserve: Reserve, ok: bool) -> None:
        if reserve.batch_id not in self._reserving:
            return  # the engine has stopped in the meantime
        asked, questions = self._reserving.pop(reserve.batch_id)
        batch = asked.batch
        error: BlitzError | None = None
        if not ok:
            self._known.discard(batch.batch_id)
            error = Overloaded(f"no capacity for {batch.num_tokens} tokens of KV now")
        elif self._is_closed:
            self.do(Free((batch.batch_id,)))
            error = Conflict(f"pair {self._pair_id} is over")
        else:
            self.queue.add(batch.batch_id, batch.layer_s, behind_seal=asked.behind_seal, absent=True)
            self._runs[batch.batch_id] = _Run(batch, set(batch.keys))
            self._not_taken[batch.batch_id] = batch
            self.gates.added(self.queue, batch.batch_id)
            self.do(HostBatch(batch.batch_id, asked.serial))
        for question in questions:
            self.do(AnswerQuestion(question, Ack())) if error is None else self.refuse(question, error)

    def _hosted(self, host: HostBatch, is_here: bool) -> None:
        """Without its hidden states, the source can have it back as it is. Should it stay here, there will be an
        embedding."""
        run = self._runs.get(host.batch_id)
        if run is not None and is_here:
            self.queue.arrived(host.batch_id)
            self._changed()
        elif run is not None:
            run.lacks_hidden = True
            self._embed_lost()

    def _embedded(self, embed: Embed, _: None) -> None:
        if embed.batch_id in self._runs:
            self.queue.arrived(embed.batch_id)
            self._changed()

    def _embed_lost(self) -> None:
        for batch_id, run in self._runs.items():
            if run.lacks_hidden and self.loaded:
                run.lacks_hidden = False
                self.do(Embed(batch_id))

    def _source_asks(self, event: SourceAsks) -> None:
        if self._has_failed(event.question):
            return
        match event.message:
            case Seal():
                self._seal(event.question, event.message)
            case Pull():
                self._pulls.append((event.question, event.message, self.now_s + event.message.wait_s))
            case PullKv():
                self._send_kv(event.question, event.message)
            case Settle():
                self._settle(event.question, event.message)
            case Dissolve():
                self._wish_to_part(event.question, event.message)

    def _seal(self, question: int, message: Seal) -> None:
        """All that waited was handed over."""
        num_known = len(self._known)
        if num_known < message.count:
            self.refuse(question, Conflict(f"{num_known} batches of {message.count} are here"))
            return
        if self.life.state is PairState.REDIRECTING:
            self.life.move_to(PairState.COOPERATING)
            self._move_on()
        self.do(AnswerQuestion(question, Ack()))

    # --- layers ---------------------------------------------------------------------------------

    def _layers_ready(self, event: LayersReady) -> None:
        """The last layer counts only once the source knows, so that no batch is finished here which the source may
        compute as well."""
        self.queue.set_layers_ready(min(event.layers_ready, self.queue.num_layers - 1))
        self._changed()
        if event.complete and not self.loaded:
            self.loaded = True
            self._move_on()
            self._embed_lost()
            if self.life.ended:
                self._source_knows = True
            else:
                # Should the two lose each other, it must not compute what may be finished here.
                self.do(TellTaken((), loaded=True))

    def _told(self, told: TellTaken, knows: bool) -> None:
        if knows:
            self._finished = [i for i in self._finished if i not in told.batch_ids]
        if told.loaded and not told.batch_ids:
            if knows:
                self.queue.set_layers_ready(self.queue.num_layers)
                self._changed()
            self._source_knows = True

    def _gates_came(self, event: GatesCame) -> None:
        if not self.queue.dissolved and not self.queue.loaded:  # else it is too late
            self.gates.set(self.queue, event.gates)
            self._changed()

    def _due(self, _: Due) -> None:
        if self.gates.may_lapse and self.now_s >= self._watch_s and not self.life.ended:
            while self._watch_s <= self.now_s:
                self._watch_s += WATCH_S
            if self.gates.lapse_if_late(self.queue, self.now_s - self._ordered_s):
                self.do(Note(f"pair {self._pair_id}: layers are late, the split is off"))
                self._changed()

    def _part_wanted(self, _: PartWanted) -> None:
        while (layer := self._next_layer()) is not None:
            run = self._runs[layer.batch_id]
            if self._is_wanted(layer.batch_id):
                begin, num_tokens = run.next_token, run.batch.num_tokens
                end = part_from(begin, num_tokens, self._part_tokens)
                run.num_in_flight += 1
                run.next_token = end % num_tokens
                self._begun = layer if run.next_token else None
                self._ends = self._is_last(layer.layer, end, run)
                self.do(RunPart(layer.batch_id, layer.layer, begin, end))
                return
            self._begun = None
            self._stop(run)
        self.may_run = False

    def _next_layer(self) -> Layer | None:
        if self._halted or self._ends:
            return None
        if self._begun is not None:
            return self._begun
        if self._parting and not self.queue.can_share:
            return None  # what is begun has to end first
        return self.queue.next_for_target()

    def _part_ran(self, part: RunPart, error: str | None) -> None:
        run = self._runs.get(part.batch_id)
        if run is None or not run.num_in_flight or self._halted:
            return  # the pair ended in the meantime
        run.num_in_flight -= 1
        self.may_run = True
        self._ends = self._ends and not self._is_last(part.layer, part.end, run)
        if error is not None:
            self._engine_failed(error)
        elif not self._is_wanted(part.batch_id):
            self._stop(run)
        elif self._is_last(part.layer, part.end, run):
            # Before the queue knows: the next look must find the requests in one place or the other.
            self.do(Finish(part.batch_id))
        elif part.end == run.batch.num_tokens:
            self.queue.layer_done(part.batch_id)

    def _is_last(self, layer: int, end: int, run: _Run) -> bool:
        return layer + 1 == self.queue.num_layers and end == run.batch.num_tokens

    def _stop(self, run: _Run) -> None:
        """Nobody waits for the batch: no more of it is run, and it is freed when nothing of it is in flight."""
        batch_id = run.batch.batch_id
        if self._begun is not None and self._begun.batch_id == batch_id:
            self._begun = None
        if not run.num_in_flight:
            self.queue.stopped(batch_id)
            del self._runs[batch_id]
            self.do(Free((batch_id,)))

    def _finished_one(self, finish: Finish, error: str | None) -> None:
        batch_id = finish.batch_id
        if error is not None:
            self._engine_failed(error)
        elif self._runs.pop(batch_id, None) is not None:
            self.may_run = not self._halted
            theirs = self._not_taken.pop(batch_id, None) is not None
            if not self.queue.layer_done(batch_id):  # cancelled while its first tokens were sampled
                self.do(Forget((batch_id,), theirs=theirs))
                return
            self._finished.append(batch_id)
            self.do(Forget((batch_id,), theirs=False))
            if not self.life.ended:
                self.do(TellTaken((batch_id,), loaded=self.loaded))

    def _is_wanted(self, batch_id: str) -> bool:
        """Somebody still waits for the batch that is inside a layer."""
        return self.queue.batch(batch_id).state is not State.STOPPING

    def _engine_failed(self, reason: str) -> None:
        if self.queue.dissolved:
            self._abandon_kept(f"the engine failed: {reason}")
        else:
            self._halt()
            self._fail(f"the target's engine failed: {reason}")

    def _engine_stops(self, event: EngineStops) -> None:
        if self.life.state is PairState.DISSOLVED and not self._is_over and not self._halted:
            self._abandon_kept(event.reason)

    def _abandon_kept(self, reason: str) -> None:
        """What was kept is the target's alone, even if the source does not know yet."""
        self._halt()
        self._engine_error = ErrorInfo.of(Unavailable(reason))
        self._await_step_end()

    def _halt(self) -> None:
        self._halted, self._begun, self.may_run = True, None, False

    # --- the source pulls -----------------------------------------------------------------------

    @property
    def _can_dissolve(self) -> bool:
        """Cooperation has nothing left to gain. The baselines have none once everything is loaded."""
        return self.queue.can_dissolve if self.queue.policy is Policy.ZIGZAG else self.queue.loaded

    def _answer_pulls(self) -> None:
        """The earliest batch, if the source may have it: at once, or before another layer is begun."""
        waiting, self._pulls = self._pulls, []
        for question, asked, until_s in waiting:
            is_over = self.queue.dissolved or self._can_dissolve
            found = None if is_over else self.queue.pull(asked.claim_id)
            claim = found if isinstance(found, Claim) else None
            if claim is None and not is_over and self.now_s < until_s:
                self._pulls.append((question, asked, until_s))
                continue
            if claim is not None:
                self._send_hidden(claim, asked.serial)
            pulled = Pulled(
                batch_id="" if claim is None else claim.batch_id,
                first_layer=0 if claim is None else claim.first_layer,
                layers_ready=self.queue.layers_ready,
                loaded=self.loaded,
                can_dissolve=claim is None and self._can_dissolve,
            )
            self.do(AnswerQuestion(question, pulled))
            if claim is not None:
                self._changed()  # what was in the way of a later batch is gone

    def _send_hidden(self, claim: Claim, serial: int) -> None:
        """What was computed of a claimed batch, once; the source has the rest."""
        run = self._runs.get(claim.batch_id)
        if claim.first_layer and run is not None and not run.is_sent:
            run.is_sent = True
            self.do(SendHidden(claim.batch_id, serial))

    def _send_kv(self, question: int, asked: PullKv) -> None:
        """The source has room for KV of a batch that it pulled."""
        run = self._runs.get(asked.batch_id)
        claim = next((c for c in self.queue.open_claims() if c.batch_id == asked.batch_id), None)
        if run is None or claim is None:
            self.refuse(question, Conflict(f"batch {asked.batch_id!r} is not the source's to pull, or settled"))
            return
        if not 0 <= asked.first_layer < asked.last_layer <= claim.first_layer:
            layers = f"{asked.first_layer}..{asked.last_layer}"
            self.refuse(question, BadRequest(f"KV of layers {layers} of {claim.first_layer} that were run"))
            return
        if asked.first_layer not in run.kv_sent:
            run.kv_sent.add(asked.first_layer)
            self.do(SendKv(asked.batch_id, asked.serial, asked.first_layer, asked.last_layer))
        self.do(AnswerQuestion(question, Ack()))

    def _settle(self, question: int, asked: Settle) -> None:
        """The source has these batches. Unknown and settled claims are ignored; without any it only says that it
        lives."""
        settled = [c for c in self.queue.open_claims() if c.claim_id in asked.claim_ids]
        for claim in settled:
            self.queue.confirm(claim.claim_id)
        if not self._free([claim.batch_id for claim in settled], question):
            self.do(AnswerQuestion(question, Ack()))

    # --- batches go -----------------------------------------------------------------------------

    def _free(self, batch_ids: list[str], question: int = -1) -> bool:
        """They are the source's, or every request of them has ended. One that is inside a layer is freed at its end.
        False if none of them is here."""
        here = tuple([i for i in batch_ids if not self._is_inside(i) and self._runs.pop(i, None) is not None])
        if here:
            if question >= 0:
                self._settling.append(question)
            self.do(Free(here, question))
        return bool(here)

    def _is_inside(self, batch_id: str) -> bool:
        return not self._halted and self.queue.batch(batch_id).in_layer

    def _freed(self, free: Free, _: None) -> None:
        for batch_id in free.batch_ids:
            self.do(Forget((batch_id,), theirs=self._not_taken.pop(batch_id, None) is not None))
        if free.question in self._settling:
            self._settling.remove(free.question)
            self.do(AnswerQuestion(free.question, Ack()))
        self._changed()

    def _cancelled(self, event: Cancelled) -> None:
        here = {key for run in self._runs.values() for key in run.open}
        keys = tuple([key for key in event.keys if key in here])
        if keys:
            self.do(EndRequests(keys))

    def _requests_ended(self, ended: EndRequests, _: None) -> None:
        free = []
        for batch_id, run in self._runs.items():
            had = len(run.open)
            run.open.difference_update(ended.keys)
            if had and not run.open and self._cancel(batch_id):
                free.append(batch_id)
        self._free(free)

    def _cancel(self, batch_id: str) -> bool:
        """Nobody waits for a batch. Whether it can be freed now: else its layer's end, or the source's settling, frees
        it."""
        if any(claim.batch_id == batch_id for claim in self.queue.open_claims()):
            return False
        self.queue.cancel(batch_id)
        return not self.queue.batch(batch_id).in_layer

    # --- parting --------------------------------------------------------------------------------

    def _wish_to_part(self, question: int, asked: Dissolve) -> None:
        """Begun batches stay, untouched ones are shared. Repeating gives the same shares."""
        if self.shares is not None:
            self.do(AnswerQuestion(question, self.shares))
        elif self.life.state is PairState.REDIRECTING:
            self.refuse(question, Conflict(f"the queue of pair {self._pair_id} is not sealed"))
        else:
            # Once loaded, the source knows by now; its answer is about to be here.
            self._parting.append((question, asked, self.now_s + KNOWS_S))

    @property
    def _may_part(self) -> bool:
        """Not while a batch is inside a layer that only the source could go on from."""
        if not self._parting or not self.queue.can_share:
            return False
        return not self.loaded or self._source_knows or self.now_s >= self._parting[0][2]

    def _part(self) -> None:
        asked = self._parting[0][1]
        # The source has what it pulled before it asks for this.
        for claim in self.queue.open_claims():
            self.queue.confirm(claim.claim_id)
        shares = self.queue.dissolve(asked.claim_id, source_busy=asked.source_busy_s)
        for claim in shares.given:
            if not claim.first_layer:
                self.queue.confirm(claim.claim_id)
        given = tuple(
            Given(batch_id=claim.batch_id, first_layer=claim.first_layer, serial=asked.first_serial + i)
            for i, claim in enumerate(shares.given)
        )
        self.shares = Dissolved(kept=shares.kept, given=given, finished=tuple(self._finished), layer_runs=NO_RUNS)
        kept = tuple([i for i in shares.kept if i in self._runs])
        for batch_id in shares.kept:
            self._not_taken.pop(batch_id, None)
        self.do(Announce(kept))
        self.life.move_to(PairState.DISSOLVED)
        self.do(Note(f"pair {self._pair_id} is dissolved: {len(shares.kept)} kept, {len(given)} given"))
        for question, _, _ in self._parting:
            self.do(AnswerQuestion(question, self.shares))
        self._parting.clear()
        begun = [g for g in given if g.first_layer and g.batch_id in self._runs]
        self._free([i for i in self._not_taken if all(i != g.batch_id for g in begun)])
        for one in begun:
            self.do(SendHidden(one.batch_id, one.serial))
        self._changed()

    # --- the end --------------------------------------------------------------------------------

    @property
    def _is_closed(self) -> bool:
        return self._halted or self.queue.dissolved or self.life.ended

    def _lost(self, event: Lost) -> None:
        if self.life.state is PairState.DISSOLVED:
            self._source_is_lost = True
            return
        if not self.life.ended:
            self._tells = event.tell
        self._fail(event.reason)

    def _fail(self, reason: str) -> None:
        """Everything that is not owned here is to be dropped."""
        if not self.life.fail():
            return
        self.failure = reason
        self.do(Note(f"pair {self._pair_id} failed: {reason}", warns=True))
        self.do(Abort(reason))
        self._await_step_end()

    def _await_step_end(self) -> None:
        if not self._awaits_step_end:
            self._awaits_step_end = True
            self.do(AwaitStepEnd())

    def _all_has_landed(self, _: AwaitStepEnd, __: None) -> None:
        self._awaits_step_end = False
        if self.life.state is PairState.FAILED:
            self._close()
        elif self._engine_error is not None:
            kept = tuple([i for i in self._runs if i not in self._not_taken])
            self.do(Abandon(kept, None if self.loaded else self._engine_error))
            self._engine_error = None
            self._close()
        self._leave()

    def _engine_stopped(self, _: EngineStopped) -> None:
        self._awaits_step_end = False
        if self.life.fail():
            self.failure = "the engine has stopped"
            self.do(Abort(self.failure))
        for asked, questions in self._reserving.values():
            for question in questions:
                self.refuse(question, EngineBroken(f"{asked.batch.batch_id}: the engine has stopped"))
        for question in self._settling:
            self.refuse(question, EngineBroken("the engine has stopped"))
        self._reserving.clear()
        self._settling.clear()
        self._runs.clear()
        if self._not_taken:
            self.do(Forget(tuple(self._not_taken)))
            self._not_taken.clear()
        if not self._is_over:  # else the source was told
            self._close()
            self._leave()

    def _close(self) -> None:
        """Run nothing more, and have nothing of the source's."""
        self._halt()
        self._free(list(self._runs))
        if self.life.state is PairState.FAILED and self._tells:
            self.do(TellEnded(self.failure, tuple(self._finished)))

    def _leave(self) -> None:
        if self.life.ended and not self._runs and not self._is_over:
            self._is_over = True
            self.do(Detach())
            self.do(Over())

    def look(self) -> None:
        if self.life.state is PairState.FAILED:
            self._refuse_waiting()
            return
        if self._may_part:
            self._part()
        if self._pulls:
            self._answer_pulls()
        if self.life.state is PairState.DISSOLVED and not self._is_over and not self._halted:
            if self._source_is_lost or not self.queue.open_claims():
                self._free(list(self._not_taken))
            if not self._runs:
                self._await_step_end()

    def _refuse_waiting(self) -> None:
        for waiting in (*self._pulls, *self._parting):
            self._has_failed(waiting[0])
        self._pulls.clear()
        self._parting.clear()

    # --- inside ---------------------------------------------------------------------------------

    def _has_failed(self, question: int) -> bool:
        """Then it is refused."""
        if self.life.state is not PairState.FAILED:
            return False
        self.refuse(question, Conflict(f"pair {self._pair_id} has failed here: {self.failure}"))
        return True

    def _move_on(self) -> None:
        if self.loaded and self.life.state is PairState.COOPERATING:
            self.life.move_to(PairState.LOADED)

    def _changed(self) -> None:
        """There may be a layer to run."""
        self.may_run = not self._halted
        self.do(Wake())

    handlers: ClassVar = {
        Begin: _begin,
        HandedOver: _handed_over,
        SourceAsks: _source_asks,
        LayersReady: _layers_ready,
        GatesCame: _gates_came,
        PartWanted: _part_wanted,
        Cancelled: _cancelled,
        Lost: _lost,
        EngineStops: _engine_stops,
        EngineStopped: _engine_stopped,
        Due: _due,
    }
    landings: ClassVar = {
        Reserve: _reserved,
        HostBatch: _hosted,
        Embed: _embedded,
        TellTaken: _told,
        RunPart: _part_ran,
        Finish: _finished_one,
        Free: _freed,
        EndRequests: _requests_ended,
        AwaitStepEnd: _all_has_landed,
    }
