"""The source of a pair: what it hands over, asks back and runs, whose each batch is, and what it frees.

Every request of the pair was accepted by the source's scheduler and stays accepted there, so that the source can
compute it whether or not the target lives. Only a *taken* batch is the target's (``batch.MOVES``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from services.worker.core.live.batch import Batch, Key, Place, Request, SourceBatch, packed, part_from
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
from services.worker.core.live.source_words import (
    AskHandOver,
    AskOffer,
    AskSplit,
    AskTarget,
    BeginBatch,
    Conclude,
    Done,
    EngineFree,
    FetchKv,
    HandOverAnswer,
    How,
    KeepAlive,
    Lend,
    Lending,
    Lent,
    Look,
    LookAtRest,
    Moved,
    Ran,
    ReceiveHidden,
    ReleaseToTarget,
    RequestArrived,
    Restore,
    RestOver,
    SendRest,
    SettleSoon,
    TargetAsks,
    TargetEnded,
    TellCancelled,
    WithholdKv,
)
from shared.errors import Conflict, Unavailable
from shared.messages.codec import Message
from shared.messages.common import Ack, ErrorInfo, LivePolicy
from shared.messages.live import (
    Dissolve,
    Dissolved,
    Given,
    Pull,
    Pulled,
    Seal,
    Settle,
    SplitBatch,
    ZigzagAssignment,
)

PULL_WAIT_S = 0.25
"""How long one pull waits at the target for a batch."""
LOOK_S = 0.05
"""How often a batch that lacks room here is tried again, whatever the engine says."""
MAX_LEAD_LAYERS = 1.0
"""A batch is asked for at most so long before the one in hand is done."""
MAX_UNWANTED = 65_536
"""Of a pair's cancelled requests so many are remembered; of others its target may hear late."""
_SMOOTHING = 0.5
_SLOTS_SHARE = 4
"""A batch takes at most this part of an instance's slots: all of its requests need theirs at once."""
_UNKNOWN_TOKEN_S = 1e-6
"""Without a measurement a batch's cost is only relative to the others'."""


class Kv(Enum):
    """Of the layers of a batch that ran at the target."""

    HERE = auto()
    COMING = auto()
    """Its blocks are written."""
    LOST = auto()


@dataclass(slots=True, eq=False)
class _Run:
    """A batch that is run here, or is about to be."""

    batch: SourceBatch
    claim_id: str = ""
    serial: int = -1
    first_layer: int = 0
    kv_direct: bool = False
    """KV of the layers before leaves the target for the decode instances; that of the others leaves from here."""
    kv: Kv = Kv.HERE
    next_layer: int = 0
    """Those before it have run."""
    next_part: tuple[int, int] = (0, 0)
    """Layer and token from which on the engine was given nothing yet."""
    has_failed: bool = False
    """The engine cannot run it: its requests are computed in ordinary steps."""
    is_held: bool = False
    """Its first tokens are sampled while KV is missing: its requests decode once ``Conclude`` says so."""
    rest_is_over: bool = False


class _Pulling(Enum):
    """What the source does to get work."""

    NOT = auto()
    """Before the queue is sealed, or no more."""
    WAITS = auto()
    """For its engine to be free."""
    ASKS = auto()
    RECEIVES = auto()
    BEGINS = auto()
    LACKS_ROOM = auto()
    WAITS_FOR_BACKLOG = auto()
    """Batches are being handed over: what is left then is looked at."""


class _For(Enum):
    """Why a batch is begun."""

    PULL = auto()
    BACKLOG = auto()
    PARTING = auto()


class PullTime:
    """What pulls take, and so how long before it is free the source asks for the next batch."""

    def __init__(self, pull_s: float = 0.0) -> None:
        """``pull_s``: as measured in the pair before."""
        self.pull_s = pull_s
        self.lead_s = 0.0

    def took(self, seconds: float, layer_s: float) -> None:
        """A pull took so long. ``layer_s``: the longest layer of a batch at the target."""
        self.pull_s += _SMOOTHING * (seconds - self.pull_s)
        self.lead_s = min(self.pull_s, MAX_LEAD_LAYERS * layer_s)


class SourceMachine(Machine):
    """Of one pair."""

    def __init__(
        self,
        assignment: ZigzagAssignment,
        num_layers: int,
        *,
        chunk_tokens: int,
        max_sequences: int,
        max_batches: int,
        pull_s: float = 0.0,
    ) -> None:
        """``chunk_tokens``: most of a batch, and of a part of a layer. ``max_sequences``: slots of the instance.
        ``max_batches``: after so many the pair ends. ``pull_s``: what a pull took in the pair before."""
        super().__init__()
        self.life = PairLife()
        self.time = PullTime(pull_s)
        self.failure = ""
        self._pair_id = assignment.pair_id
        self._policy: LivePolicy = assignment.policy
        self._target = assignment.target.worker_id
        self._num_layers = num_layers
        self._chunk_tokens = chunk_tokens
        self._most_requests = max(1, max_sequences // _SLOTS_SHARE)
        self._max_batches = max_batches
        self._token_s = 0.0
        self.batches: dict[str, Batch] = {}
        """All that there ever were."""
        # What waits, and what the target has.
        self._lent: deque[Request] = deque()
        """Out of the scheduler's queue, and in no batch yet."""
        self._backlog: deque[SourceBatch] = deque()
        """Not handed over yet, or never: behind all that is."""
        self.handed: dict[str, SourceBatch] = {}
        """At the target, by id, in first-come order; those included that were pulled and are not begun."""
        self._asked: SourceBatch | None = None
        """The target has not answered whether it takes it."""
        self._num_handed = self._num_done = 0
        self._unwanted: set[Key] = set()
        """Cancelled while the pair lasts."""
        self._arrived = False
        self._cooperates = False
        """The queue is sealed, and the planner knows of it."""
        self._lending = False
        """The scheduler lends."""
        self._asks_to_lend = False
        self._hands_over = False
        # What is run here.
        self._runs: deque[_Run] = deque()
        """First come, first served."""
        self._begins: _Run | None = None
        self._begins_for = _For.PULL
        self._pulling = _Pulling.NOT
        self._pull_began_s = 0.0
        self._answer: Pulled | None = None
        self._gets_prompts = True
        self._free = False
        """The engine is, or there is another reason to look."""
        self._look_s = math.inf
        self._num_claims = 0
        # KV of it.
        self._coming: deque[_Run] = deque()
        """To be fetched, one after the other."""
        self._fetching: _Run | None = None
        self._direct: dict[str, _Run] = {}
        """KV of these goes straight to where it is decoded, and is not there yet."""
        # The end.
        self.target_loaded = False
        """It finishes batches itself, and owns their requests then: not before it has heard that this is known here."""
        self._has_last_word = False
        """The target ended the pair, and said what it owns."""
        self.is_ending = False
        """Nothing more is handed over or pulled."""
        self._given: deque[Given] | None = None
        """What the target gave in the end, and is not begun. None: it has not answered, or is not asked yet."""
        self._asks_to_part = False
        self._must_settle = self._asks_to_settle = False
        self._is_lost = False
        """Nothing comes from the target any more."""
        self._restored = False
        self._restoring = False
        self._is_over = False

    # --- to be read -----------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        return self._look_s

    @property
    def has_runs(self) -> bool:
        """There may be a layer to run. Cheap: the engine asks before every step."""
        return bool(self._runs)

    @property
    def remaining_s(self) -> float:
        """Expected seconds until the batches here are done."""
        return sum([run.batch.batch.layer_s * (self._num_layers - run.next_layer) for run in self._runs])

    @property
    def is_idle(self) -> bool:
        """There is no layer to run here, or none for longer than it takes to get more."""
        return not self._runs or self.remaining_s <= self.time.lead_s

    @property
    def expected_lengths(self) -> tuple[int, ...]:
        """Contexts of the batch that probably is the next to be run here."""
        batch = next(iter([*self.handed.values(), *self._backlog]), None)
        return () if batch is None else batch.batch.lengths

    # --- offered, redirecting -------------------------------------------------------------------

    def _begin(self, _: Begin) -> None:
        self.do(AskOffer())

    def _accepted(self, _: AskOffer, __: None) -> None:
        if not self._is_lost:
            self.life.move_to(PairState.REDIRECTING)
            self._lend(begins=True)

    def _lend(self, *, begins: bool = False) -> None:
        self._asks_to_lend = self._hands_over = True
        self.do(Lend(begins))

    def _lent_some(self, _: Lend, lent: Lent | None) -> None:
        self._asks_to_lend = False
        if lent is None:
            self._fail("its engine is in another pair")
            return
        self._lent += lent.requests
        self._token_s = lent.token_s
        if not self._lending:
            self._lending = True
            self.do(Lending(True))
        if not self._is_lost:
            self._pack()
            self._hand_over_next()

    def _pack(self) -> None:
        """What was lent waits in batches from now on."""
        requests = [self._lent.popleft() for _ in range(len(self._lent))]
        for pack in packed(requests, self._chunk_tokens, self._most_requests):
            num_tokens = sum([r.num_tokens for r in pack])
            layer_s = (self._token_s or _UNKNOWN_TOKEN_S) * num_tokens / self._num_layers
            batch = Batch(f"{self._pair_id}-{len(self.batches)}", pack, layer_s)
            self.batches[batch.batch_id] = batch
            self._backlog.append(SourceBatch(batch))

    def _hand_over_next(self) -> None:
        """Everything, as far as the target has capacity."""
        is_first = self.life.state is PairState.REDIRECTING
        if self._backlog and (is_first or not self.is_ending):
            batch = self._asked = self._backlog.popleft()
            batch.move_to(Place.HANDED_OVER)
            # Before the answer: a pull may bring it back before that comes.
            self.handed[batch.batch_id] = batch
            self.do(AskHandOver(batch.batch, self._num_handed, behind_seal=not is_first))
        else:
            self._handed_over()

    def _handed_over(self) -> None:
        self._hands_over = False
        if self.life.state is PairState.REDIRECTING:
            self.do(AskTarget(Seal(pair_id=self._pair_id, count=self._num_handed)))

    def _hand_over_answered(self, _: AskHandOver, answer: HandOverAnswer) -> None:
        batch, self._asked = self._asked, None
        if batch is None or self._is_lost:
            return
        if not answer.asked:
            batch.move_to(Place.UNWANTED)
            del self.handed[batch.batch_id]
            self._hand_over_next()
            return
        if not answer.taken and batch.place is not Place.HANDED_OVER:
            self._fail(f"the target refuses batch {batch.batch_id}, which it gave")
            return
        if not answer.taken:
            batch.move_to(Place.WAITING)
            self._backlog.appendleft(self.handed.pop(batch.batch_id))
            self._handed_over()
            return
        serial, self._num_handed = self._num_handed, self._num_handed + 1
        # The target may not have heard of it.
        if gone := tuple([key for key in batch.batch.keys if key in self._unwanted or key in answer.ended]):
            self.do(TellCancelled(gone))
        self.do(SendHidden(batch.batch_id, serial))

    def _hidden_sent(self, _: SendHidden, __: None) -> None:
        if not self._is_lost:
            self._hand_over_next()

    def _answered(self, asked: AskTarget, result: tuple[Message, bool]) -> None:
        answer, gets_prompts = result
        if self._is_lost:
            return
        match answer:
            case Pulled():
                self._pull_answered(answer, gets_prompts=gets_prompts)
            case Dissolved():
                self._parted(answer)
            case _ if isinstance(asked.message, Seal):
                self._sealed()
            case _:
                self._must_settle = False

    def _sealed(self) -> None:
        self.life.move_to(PairState.COOPERATING)
        waiting = self._to_split()
        if waiting:
            self.do(AskSplit(waiting, self.remaining_s, self.time.pull_s))
        else:
            self._cooperate()

    def _to_split(self) -> tuple[SplitBatch, ...]:
        """Nothing where no split can gain: equal batches need none, and without a measurement there is none."""
        batches = [b.batch for b in self.handed.values()]
        if self._policy != "zigzag" or not self._token_s or len({b.layer_s for b in batches}) < 2:
            return ()
        return tuple(SplitBatch(batch_id=b.batch_id, layer_s=b.layer_s) for b in batches)

    def _split_asked(self, _: AskSplit, __: None) -> None:
        if not self._is_lost:
            self._cooperate()

    def _cooperate(self) -> None:
        self._cooperates = True
        self._free = False
        self._wait()
        self.do(KeepAlive(True))
        self.do(Look())  # is it free already?

    def _arrived_one(self, _: RequestArrived) -> None:
        self._arrived = True

    def _cancelled(self, event: Cancelled) -> None:
        for key in event.keys:
            if len(self._unwanted) < MAX_UNWANTED:
                self._unwanted.add(key)
            if any(key in batch.batch.keys for batch in self.handed.values()):
                self.do(TellCancelled((key,)))

    # --- cooperating, loaded: work is got ----------------------------------------------------------

    def _wait(self) -> None:
        self._pulling = _Pulling.WAITS
        self._look_s = self.now_s + LOOK_S

    def _engine_free(self, _: EngineFree) -> None:
        """The next batch may be asked for: there is nothing else to run soon, and room for more."""
        self._free = True

    def _due(self, _: Due) -> None:
        if self.now_s < self._look_s:
            return
        self._look_s = self.now_s + LOOK_S
        if self._pulling is _Pulling.LACKS_ROOM:
            self._try_again()
        elif self._pulling is _Pulling.WAITS:
            # Requests that leave with their KV, or have ended, give their room back at any time: no step says so.
            self.do(Look())

    def _pull(self) -> None:
        self._free = False
        if self._parts:
            self._end()
            return
        self._pulling, self._look_s = _Pulling.ASKS, math.inf
        self._pull_began_s = self.now_s
        serial, self._num_claims = self._num_claims, self._num_claims + 1
        claim_id = f"{self._pair_id}-claim-{serial}"
        self.do(AskTarget(Pull(pair_id=self._pair_id, claim_id=claim_id, serial=serial, wait_s=PULL_WAIT_S)))

    @property
    def _parts(self) -> bool:
        """It parts from the target now, busy or not: the baselines do once everything is loaded."""
        return self._num_done >= self._max_batches or (self.target_loaded and self._policy != "zigzag")

    def _pull_answered(self, answer: Pulled, *, gets_prompts: bool) -> None:
        self._answer, self._gets_prompts = answer, gets_prompts
        if not answer.batch_id:
            self._free = True  # it still is, unless something comes in between
            self._after_pull(answer)
            return
        serial = self._num_claims - 1
        self._begins_for = _For.PULL
        self._get(answer.batch_id, answer.first_layer, f"{self._pair_id}-claim-{serial}", serial, answer.kv_direct)

    def _get(self, batch_id: str, first_layer: int, claim_id: str, serial: int, kv_direct: bool = False) -> None:
        """A batch that the target gave."""
        batch = self.handed.get(batch_id)
        if batch is None or batch.place is not Place.HANDED_OVER or not 0 <= first_layer < self._num_layers:
            self._fail(f"the target gave batch {batch_id!r} from layer {first_layer} on, which it does not have")
            return
        batch.move_to(Place.PULLED)
        self._begins = _Run(batch, claim_id, serial, first_layer, kv_direct)
        if first_layer:
            self._pulling = _Pulling.RECEIVES
            self.do(ReceiveHidden(batch_id, serial))
        else:
            self.do(SettleSoon(claim_id))
            self._begin_run()

    def _hidden_received(self, _: ReceiveHidden, is_here: bool) -> None:
        run = self._begins
        if run is None or self._is_lost:
            return
        if not is_here:  # it is computed from the beginning
            run.first_layer, run.kv_direct = 0, False
            self.do(SettleSoon(run.claim_id))
        self._begin_run()

    def _begin_run(self) -> None:
        run = self._begins
        if run is None:
            return
        run.next_layer, run.next_part = run.first_layer, (run.first_layer, 0)
        run.kv = Kv.COMING if run.first_layer else Kv.HERE
        if run.kv_direct:
            self._direct[run.batch.batch_id] = run
            self.do(SendRest(run.batch.batch_id, run.first_layer))  # before the engine says anything of it
        self._try_again()

    def _try_again(self) -> None:
        run = self._begins
        if run is not None:
            self._free = False
            self._pulling, self._look_s = _Pulling.BEGINS, math.inf
            self.do(BeginBatch(run.batch.batch_id, run.first_layer))

    def _begun(self, _: BeginBatch, has_room: bool) -> None:
        run = self._begins
        if run is None:
            return
        if not has_room:
            if self._is_lost:
                self._give_up_beginning()
            else:
                self._pulling, self._look_s = _Pulling.LACKS_ROOM, self.now_s + LOOK_S
            return
        self._begins = None
        batch = run.batch
        batch.move_to(Place.BEGUN)
        if self.handed.pop(batch.batch_id, None) is None:
            self._backlog.remove(batch)
        self._runs.append(run)
        # What the engine said before it had this batch does not count any more. But by now it may be done with it, and
        # nothing else would say so.
        self._free = False
        self.do(Look())
        if run.rest_is_over:
            self.do(LookAtRest(batch.batch_id))
        elif run.first_layer and not run.kv_direct:
            self._coming.append(run)
        if not self._is_lost:
            self._after_begin()

    def _after_begin(self) -> None:
        if self._begins_for is _For.PULL and self._answer is not None:
            layer_s = max([b.batch.layer_s for b in self.handed.values()], default=0.0)
            self.time.took(self.now_s - self._pull_began_s, layer_s)
            self._after_pull(self._answer)
        elif self._begins_for is _For.BACKLOG:
            self._wait()
        else:
            self._pulling = _Pulling.NOT

    def _after_pull(self, answer: Pulled) -> None:
        self.target_loaded = self.target_loaded or answer.loaded
        if self.target_loaded and self.life.state is PairState.COOPERATING:
            self.life.move_to(PairState.LOADED)
        self._wait()
        if answer.batch_id:
            if self._backlog:
                self._arrived = True  # the target has capacity now for what waits here
        elif answer.can_dissolve or not self._gets_prompts:
            self._end()
        elif self._backlog:
            self._pulling, self._look_s = _Pulling.WAITS_FOR_BACKLOG, math.inf

    def _begin_from_backlog(self) -> None:
        """The target has nothing to pull, and no capacity or no use for what waits here."""
        if not self._backlog:
            self._wait()
            return
        self._begins, self._begins_for = _Run(self._backlog[0]), _For.BACKLOG
        self._begin_run()

    # --- layers -----------------------------------------------------------------------------------

    def _part_wanted(self, _: PartWanted) -> None:
        run = next((run for run in self._runs if run.next_layer < self._num_layers), None)
        if run is not None and run.next_part[0] < self._num_layers:  # else its first tokens come before others' layers
            batch, (layer, begin) = run.batch.batch, run.next_part
            end = part_from(begin, batch.num_tokens, self._chunk_tokens)
            run.next_part = (layer, end) if end < batch.num_tokens else (layer + 1, 0)
            leaves = run.kv_direct or run.kv is Kv.HERE
            self.do(RunPart(batch.batch_id, layer, begin, end, run.first_layer, leaves))

    def _run_of(self, batch_id: str) -> _Run | None:
        """None: it has ended in the meantime, with the engine or because a part failed."""
        return next((run for run in self._runs if run.batch.batch_id == batch_id), None)

    def _part_ran(self, part: RunPart, ran: Ran) -> None:
        run = self._run_of(part.batch_id)
        if run is None:
            return
        if ran is not Ran.WELL:
            run.has_failed = ran is Ran.FAILED
            self._run_done(run)
        elif part.end == run.batch.batch.num_tokens:
            run.next_layer = part.layer + 1
            if run.next_layer == self._num_layers:
                run.is_held = run.kv is not Kv.HERE  # even if it comes before this has landed
                self.do(Finish(part.batch_id, run.first_layer, run.kv is Kv.HERE, run.kv_direct))

    def _finished(self, finish: Finish, ran: Ran) -> None:
        run = self._run_of(finish.batch_id)
        if run is not None:
            run.has_failed = ran is Ran.FAILED
            self._run_done(run)

    def _run_done(self, run: _Run) -> None:
        self._runs.remove(run)
        batch_id = run.batch.batch_id
        if run.kv is Kv.HERE and not run.has_failed and not run.is_held:
            self.do(Conclude(batch_id, How.DECODED))
        elif run.kv is not Kv.COMING:
            self._join(run)
        self._num_done += 1
        self.do(Done(batch_id, run.first_layer, self.now_s, forget=run.has_failed and run.kv_direct))

    def _join(self, run: _Run) -> None:
        """Both are over, its layers here and its KV."""
        how = How.KV_ARRIVED if run.kv is Kv.HERE else How.KV_LOST
        self.do(Conclude(run.batch.batch_id, How.COMPUTE_HERE if run.has_failed else how))

    # --- KV -----------------------------------------------------------------------------------------

    def _kv_is_over(self, _: FetchKv, is_here: bool) -> None:
        run, self._fetching = self._fetching, None
        if run is not None:
            self.do(SettleSoon(run.claim_id))
            self._kv_ends(run, is_here=is_here)

    def _kv_ends(self, run: _Run, *, is_here: bool) -> None:
        run.kv = Kv.HERE if is_here else Kv.LOST
        if run not in self._runs:
            self._join(run)

    def _rest_is_over(self, event: RestOver) -> None:
        run = self._direct.get(event.batch_id)
        if run is None:
            return
        if run.batch.place is Place.BEGUN:
            self.do(LookAtRest(event.batch_id))
        else:
            run.rest_is_over = True  # all may be over while it waits for room here

    def _rest_looked(self, looked: LookAtRest, ended: bool) -> None:
        run = self._direct.pop(looked.batch_id, None)
        if run is None:
            return
        if ended:
            self.do(SettleSoon(run.claim_id))
            self._kv_ends(run, is_here=True)
        else:  # KV of the first layers is needed after all
            self._coming.append(run)

    def _fetch(self) -> None:
        if self._is_lost:
            while self._coming:
                self._kv_ends(self._coming.popleft(), is_here=False)
        elif self._coming and self._fetching is None:
            run = self._fetching = self._coming.popleft()
            self.do(FetchKv(run.batch.batch_id, run.serial, run.first_layer))

    # --- the end --------------------------------------------------------------------------------

    def _target_asks(self, event: TargetAsks) -> None:
        if self.life.state is PairState.FAILED:
            # The target must finish nothing any more.
            self.refuse(event.question, Conflict(f"pair {self._pair_id} has failed here: {self.failure}"))
            return
        self._taken(event.message.batch_ids)
        if self._backlog:
            self._arrived = True  # the target has capacity now
        if event.message.loaded and not self.target_loaded:
            self.target_loaded = True
            if self._parts and not self.life.ended:
                self._free = True  # busy or not. Others ask for a batch once they are free, as ever
        self.do(AnswerQuestion(event.question, Ack()))

    def _taken(self, batch_ids: Iterable[str]) -> None:
        taken = []
        for batch_id in batch_ids:
            batch = self.handed.get(batch_id)
            if batch is not None and batch.place is Place.HANDED_OVER:
                batch.move_to(Place.TAKEN)
                del self.handed[batch_id]
                taken.append(batch)
        self._num_done += len(taken)
        if taken:
            ids = tuple([b.batch_id for b in taken])
            self.do(Moved(ids, self.now_s))
            self.do(ReleaseToTarget(ids))

    def _end(self) -> None:
        """Nothing is to be gained any more, or there is nobody to gain it for."""
        self.is_ending = True
        self._pulling, self._look_s = _Pulling.NOT, math.inf

    def _part(self) -> None:
        self._asks_to_part = True
        self.do(KeepAlive(False))
        self.do(
            AskTarget(
                Dissolve(
                    pair_id=self._pair_id,
                    claim_id=f"{self._pair_id}-end",
                    first_serial=self._num_claims,
                    source_busy_s=self.remaining_s,
                )
            )
        )

    def _parted(self, event: Dissolved) -> None:
        self.life.move_to(PairState.DISSOLVED)
        self._taken((*event.finished, *event.kept))
        # Untouched ones are at the target still as far as we know: they come back with all that it does not own.
        self._given = deque(g for g in event.given if g.first_layer and g.batch_id in self.handed)
        self._must_settle = any(g.first_layer for g in event.given)

    def _get_given(self) -> None:
        if self._given:
            given = self._given.popleft()
            self._begins_for = _For.PARTING
            self._get(given.batch_id, given.first_layer, f"{self._pair_id}-end/{given.batch_id}", given.serial)

    def _target_ended(self, event: TargetEnded) -> None:
        if not self.life.ended:
            self._has_last_word = True
            self._taken(event.finished)
        self._fail(event.reason)

    def _lost(self, event: Lost) -> None:
        self._fail(event.reason)

    def _fail(self, reason: str) -> None:
        if self._is_lost or self._restoring:
            return
        self._is_lost = self.is_ending = True
        self.do(Abort(reason))
        if self.life.fail():
            self.failure = reason
            self.do(TellEnded(reason))
        self.do(KeepAlive(False))
        if self._pulling is not _Pulling.BEGINS:
            self._give_up_beginning()
        self._pulling, self._look_s = _Pulling.NOT, math.inf

    def _give_up_beginning(self) -> None:
        run, self._begins = self._begins, None
        if run is not None and run.kv_direct:
            self._direct.pop(run.batch.batch_id, None)
            self.do(WithholdKv(run.batch.batch_id))

    @property
    def _may_restore(self) -> bool:
        """Nothing is written into any block any more but by the engine, and what it does on its own is known."""
        if not self.life.ended or self._restoring or self._asks_to_lend or self._fetching or self._begins:
            return False
        return self._is_lost or not (self._given is None or self._given or self._coming or self._must_settle)

    def _restore(self) -> None:
        self._restoring = True
        if not self._lending:
            self._restored = True
            return
        doubt = self._doubt()
        doubtful = [b for b in self.handed.values() if doubt is not None and b.place is Place.HANDED_OVER]
        back = [b for b in (*self.handed.values(), *self._backlog) if b not in doubtful]
        for batch in back:
            batch.move_to(Place.BACK)
        for batch in doubtful:
            batch.move_to(Place.IN_DOUBT)
        keys = tuple([r.key for r in self._lent])
        back_ids, doubtful_ids = tuple([b.batch_id for b in back]), tuple([b.batch_id for b in doubtful])
        for queue in (self.handed, self._backlog, self._lent):
            queue.clear()
        self.do(Restore(back_ids, keys, doubtful_ids, doubt))

    def _doubt(self) -> ErrorInfo | None:
        """What requests end with that the target may own, or not. Two instances must not go on with one attempt, whose
        tokens need not agree; another attempt goes on from the tokens that the gateway has."""
        if self.life.state is not PairState.FAILED or not self.target_loaded or self._has_last_word:
            return None
        reason = f"{self._target} may have finished the prompt, and does not answer: {self.failure}"
        return ErrorInfo.of(Unavailable(reason))

    def _is_restored(self, _: Restore, __: None) -> None:
        self._restored = True

    def _engine_stopped(self, _: EngineStopped) -> None:
        self._fail("the engine has stopped")
        self._runs.clear()
        self._begins = self._fetching = None
        self._asks_to_lend = False
        self._restoring = self._restored = True

    def look(self) -> None:
        if self._coming:
            self._fetch()
        if self._pulling is _Pulling.WAITS_FOR_BACKLOG and not self._hands_over:
            self._begin_from_backlog()
        if self._pulling is _Pulling.WAITS and self._free:
            self._pull()
        elif self._pulling is _Pulling.LACKS_ROOM and self._free:
            self._try_again()
        if self._arrived and self._may_hand_over:
            self._arrived = False
            self._lend()
        if self.is_ending:
            self._go_on_ending()

    @property
    def _may_hand_over(self) -> bool:
        takes_backlog = self._begins is not None and self._begins_for is _For.BACKLOG
        return self._cooperates and not (self._hands_over or self.is_ending or takes_backlog)

    def _go_on_ending(self) -> None:
        is_quiet = not (self._hands_over or self._begins or self._coming or self._fetching)
        if not self._is_lost:
            if is_quiet and not self._direct and not self._asks_to_part:
                self._part()
            elif self._given and self._begins is None:
                self._get_given()
            elif self._given is not None and is_quiet and self._must_settle and not self._asks_to_settle:
                self._asks_to_settle = True
                self.do(AskTarget(Settle(pair_id=self._pair_id, claim_ids=())))
        if self._may_restore:
            self._restore()
        if self._restored and not self._runs and not self._is_over:
            self._is_over = True
            self.do(Detach())
            if self._lending:
                self.do(Lending(False))
            self.do(Over())

    handlers: ClassVar = {
        Begin: _begin,
        RequestArrived: _arrived_one,
        EngineFree: _engine_free,
        PartWanted: _part_wanted,
        RestOver: _rest_is_over,
        TargetAsks: _target_asks,
        Cancelled: _cancelled,
        TargetEnded: _target_ended,
        Lost: _lost,
        EngineStopped: _engine_stopped,
        Due: _due,
    }
    landings: ClassVar = {
        AskOffer: _accepted,
        Lend: _lent_some,
        AskHandOver: _hand_over_answered,
        SendHidden: _hidden_sent,
        AskTarget: _answered,
        AskSplit: _split_asked,
        ReceiveHidden: _hidden_received,
        BeginBatch: _begun,
        RunPart: _part_ran,
        Finish: _finished,
        FetchKv: _kv_is_over,
        LookAtRest: _rest_looked,
        Restore: _is_restored,
    }
