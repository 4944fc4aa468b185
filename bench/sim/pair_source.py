"""The source of a pair in virtual time: what ``services.worker.live.source`` does, without bus, tensors and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench.sim.clock import Clock
from bench.sim.instance import SimInstance
from bench.sim.pair_member import LATER, TOKEN, Carriers, OnTheirWay, PairMember, PairPaths, Reply, unseen
from bench.sim.pair_target import SimTarget
from services.worker.core.live import source_words as core
from services.worker.core.live import target_words as target_core
from services.worker.core.live.batch import Batch, Key, Request
from services.worker.core.live.machine import Abort, Cancelled, Finish, Lost, RunPart, SendHidden, TellEnded
from services.worker.core.live.source import LOOK_S, SourceMachine
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.codec import Message
from shared.messages.common import TAKES_PROMPTS, ErrorInfo
from shared.messages.live import PlanSplit, Pulled, Settle, Taken, ZigzagAssignment

MAX_BATCHES = 1_000_000
"""A simulated report may be as long as it is."""


class SimSource(PairMember[SourceMachine]):
    """Of one pair."""

    def __init__(
        self,
        clock: Clock,
        assignment: ZigzagAssignment,
        instance: SimInstance,
        paths: PairPaths,
        on_their_way: OnTheirWay,
        *,
        pull_s: float,
        ask_split: Callable[[PlanSplit], object],
        on_accepted: Callable[[], object],
        on_lending: Callable[[bool], object],
        on_done: Callable[[Batch, int, float], object],
        on_over: Callable[[], object],
    ) -> None:
        """``on_done``: a batch is done, whose first so many layers were run at the target; and when."""
        config = instance.scheduler.config
        super().__init__(
            clock,
            instance,
            SourceMachine(
                assignment,
                instance.compute.num_layers,
                chunk_tokens=config.prefill_chunk_tokens,
                max_sequences=config.max_num_sequences,
                max_batches=MAX_BATCHES,
                pull_s=pull_s,
            ),
            paths,
            decode_interval_s=assignment.slo_tbt_s / 2,
        )
        self.target: SimTarget
        """To be set before it begins."""
        self._pair_id = assignment.pair_id
        self._on_their_way = on_their_way
        self._ask_split, self._on_accepted = ask_split, on_accepted
        self._on_lending, self._on_done, self._on_over = on_lending, on_done, on_over
        self._sequences: dict[Key, ActiveSequence] = {}
        self._busy_s: dict[str, float] = {}
        self._part_began_s = 0.0
        self._receives: core.ReceiveHidden | None = None
        """Hidden states that are waited for."""
        self._fetches: core.FetchKv | None = None
        """KV that is."""
        self._direct: list[str] = []
        """Batches whose KV leaves from both members."""
        self._is_alive = False
        """It gives signs of life."""
        self._to_settle: list[str] = []

    def of_batch(self, batch_id: str) -> list[ActiveSequence]:
        """Its requests."""
        return [self._sequences[key] for key in self.machine.batches[batch_id].keys]

    def _has_ended(self, batch_id: str) -> bool:
        return all(s.finished for s in self.of_batch(batch_id))

    # --- questions ---------------------------------------------------------------------------

    def _offer(self, action: core.AskOffer) -> object:
        self._clock.after(2 * self._paths.message_s, self._accepted, action)
        return LATER

    def _accepted(self, action: core.AskOffer) -> None:
        if not (self.is_dead or self.target.is_dead):
            self._on_accepted()
            self.target.take_part()
            self.landed(action)

    def _hand_over(self, action: core.AskHandOver) -> object:
        batch = action.batch
        if self._has_ended(batch.batch_id):
            return core.HandOverAnswer(taken=False, asked=False)

        def answered(answer: Message | ErrorInfo) -> None:
            ended = tuple(s.key for s in self.of_batch(batch.batch_id) if s.finished)
            self.landed(action, core.HandOverAnswer(not isinstance(answer, ErrorInfo), ended=ended))

        def arrive() -> None:
            reply = self._after_a_message(answered)
            sequences = self.of_batch(batch.batch_id)
            self.target.hand_over(batch, action.serial, sequences, reply, behind_seal=action.behind_seal)

        self.send(arrive)
        return LATER

    def _after_a_message(self, reply: Reply) -> Reply:
        return lambda answer: self.send(reply, answer)

    def _ask(self, action: core.AskTarget) -> object:
        asked = action.message
        if isinstance(asked, Settle):
            asked = Settle(pair_id=self._pair_id, claim_ids=tuple(self._to_settle))
            self._to_settle.clear()

        def answered(answer: Message | ErrorInfo) -> None:
            if isinstance(answer, ErrorInfo):
                self.handle(Lost(answer.message))
                return
            if isinstance(answer, Pulled) and answer.first_layer:
                answer = self._joined(answer)
            gets_prompts = self.instance.state == "serving" and self.instance.role in TAKES_PROMPTS
            self.landed(action, (answer, gets_prompts))

        reply = self._after_a_message(answered)
        self.send(self.target.asked, lambda number: target_core.SourceAsks(number, asked), reply)  # type: ignore[arg-type]
        return LATER

    def _joined(self, pulled: Pulled) -> Pulled:
        """Whether KV of a batch goes from both members straight to where its requests are decoded."""
        theirs, ours = self.target.sequences(pulled.batch_id), self.of_batch(pulled.batch_id)
        direct = bool(theirs) and self.target.instance.join(theirs, ours, self.instance)
        return Pulled(batch_id=pulled.batch_id, first_layer=pulled.first_layer, loaded=pulled.loaded, kv_direct=direct)

    def tell_taken(self, taken: Taken, reply: Reply) -> None:
        """The target says so; it gets the answer after another message."""
        back = self._after_a_message(reply)
        self.send(self.asked, lambda number: core.TargetAsks(number, taken), back)

    def _split(self, action: core.AskSplit) -> None:
        self._ask_split(
            PlanSplit(
                pair_id=self._pair_id,
                batches=action.batches,
                source_free_s=action.source_free_s,
                pull_s=action.pull_s,
            )
        )

    def _settle_soon(self, action: core.SettleSoon) -> None:
        self._to_settle.append(action.claim_id)
        if self._is_alive:
            settle = Settle(pair_id=self._pair_id, claim_ids=tuple(self._to_settle))
            self._to_settle.clear()
            self.send(self.target.asked, lambda number: target_core.SourceAsks(number, settle), lambda _: None)

    def _keep_alive(self, action: core.KeepAlive) -> None:
        self._is_alive = action.on

    def _tell_cancelled(self, action: core.TellCancelled) -> None:
        self.send(self.target.cancel, action.keys)

    # --- hidden states and KV ----------------------------------------------------------------

    def _send_hidden(self, action: SendHidden) -> None:
        batch_id = action.batch_id
        num_bytes = self.machine.batches[batch_id].num_tokens * self._paths.hidden_bytes_per_token

        def arrived() -> None:
            self.target.hidden_came(batch_id, action.serial)

        self._on_their_way.send(self.instance, self.target.instance, num_bytes, "activations", arrived)

    def _receive_hidden(self, action: core.ReceiveHidden) -> object:
        if self.target.hidden.get(action.batch_id):
            return True
        self._receives = action
        return LATER

    def hidden_came(self, batch_id: str) -> None:
        """From the target."""
        action = self._receives
        if action is not None and action.batch_id == batch_id:
            self._receives = None
            self.landed(action, True)

    def _fetch(self, action: core.FetchKv) -> object:
        """KV of the layers that the target ran, as one flow."""
        batch_id = action.batch_id
        layer_bytes = self.instance.compute.kv_bytes_per_token / self.instance.compute.num_layers
        num_bytes = self.machine.batches[batch_id].num_tokens * action.first_layer * layer_bytes

        def here() -> None:
            self._fetches = None
            self.landed(action, True)

        def arrive() -> None:
            if self._fetches is not action:
                return
            if self._has_ended(batch_id):
                here()
            elif not self.is_dead:
                self._on_their_way.send(self.target.instance, self.instance, num_bytes, "kv", here)

        self._fetches = action
        self.send(arrive)
        return LATER

    def _send_rest(self, action: core.SendRest) -> None:
        self._direct.append(action.batch_id)
        self._look_at_rests(action.batch_id)

    def _look_at_rests(self, batch_id: str) -> None:
        """Until they are decoded elsewhere, have ended, or are to be decoded here."""
        if self.is_dead:
            return
        if any(not s.finished and s.decode_at is not None for s in self.of_batch(batch_id)):
            self._clock.after(LOOK_S, self._look_at_rests, batch_id)
        else:
            self._direct.remove(batch_id)
            self.handle(core.RestOver(batch_id))

    def _abort(self, _: Abort) -> None:
        self._on_their_way.abort()
        action, self._fetches = self._fetches, None
        if action is not None:
            self.landed(action, False)

    # --- the scheduler -----------------------------------------------------------------------

    def _lend(self, action: core.Lend) -> core.Lent:
        scheduler = self.instance.scheduler
        if action.begins:
            self.instance.partial = self
            scheduler.table.lending = True
        lent = scheduler.lend()
        self._sequences.update((s.key, s) for s in lent)
        budgets = scheduler.budgets
        tokens_per_s = budgets.speed.speed.prefill_tokens_per_s
        token_s = 1 / tokens_per_s if tokens_per_s else budgets.cost.token_s
        return core.Lent(tuple(Request(s.key, s.num_tokens) for s in lent), token_s)

    def _look(self, _: core.Look | None = None) -> None:
        scheduler, lengths = self.instance.scheduler, self.machine.expected_lengths
        has_room = not lengths or scheduler.reservations.fits(lengths)
        if self.machine.is_idle and not scheduler.has_prefill and has_room:
            self.handle(core.EngineFree())

    def _begin_batch(self, action: core.BeginBatch) -> bool:
        sequences = self.of_batch(action.batch_id)
        ok = self._has_ended(action.batch_id) or self.instance.scheduler.reservations.reserve(sequences)
        if ok:
            for sequence in sequences:
                sequence.first_scheduled_s = sequence.first_scheduled_s or self._clock.now_s
        return ok

    def _conclude(self, action: core.Conclude) -> None:
        action.how.apply(self.instance.scheduler.reservations, self.of_batch(action.batch_id))

    def _finish(self, action: Finish) -> object:
        batch, instance, sequences = (
            self.machine.batches[action.batch_id],
            self.instance,
            self.of_batch(action.batch_id),
        )
        reservations, now_s = instance.scheduler.reservations, self._clock.now_s
        outputs = [reservations.adopt(s, TOKEN, now_s, kv_here=action.kv_here) for s in sequences]
        num_layers = instance.compute.num_layers
        busy_s = self._busy_s.pop(action.batch_id) * num_layers / (num_layers - action.first_layer)
        instance.scheduler.budgets.speed.prefilled(batch.num_tokens, busy_s)
        if action.kv_direct:
            for sequence in sequences:
                instance.computed_rest(sequence)
        self.landed(action, core.Ran.WELL)
        instance.tell(output for output in outputs if output is not None)
        return LATER

    def _release_to_target(self, action: core.ReleaseToTarget) -> None:
        sequences = [s for i in action.batch_ids for s in self.of_batch(i)]
        self.instance.scheduler.release_to_target(sequences)

    def _restore(self, action: core.Restore) -> None:
        scheduler = self.instance.scheduler
        scheduler.table.lending = False
        scheduler.take_back([s for i in action.batch_ids for s in self.of_batch(i)])
        if action.doubt is not None:
            scheduler.abort([s for i in action.in_doubt for s in self.of_batch(i)], action.doubt)
        scheduler.take_back([self._sequences[key] for key in action.keys])

    # --- the rest ----------------------------------------------------------------------------

    def _moved(self, action: core.Moved) -> None:
        for batch_id in action.batch_ids:
            self._on_done(self.machine.batches[batch_id], self.instance.compute.num_layers, action.at_s)
            self.instance.gave(self.of_batch(batch_id))

    def _done(self, action: core.Done) -> None:
        self._on_done(self.machine.batches[action.batch_id], action.first_layer, action.at_s)

    def _over(self) -> None:
        super()._over()
        self._on_over()

    def _forget(self, action: core.WithholdKv) -> None:
        self.instance.forget(self.of_batch(action.batch_id))

    def _run(self, action: RunPart) -> object:
        self._part = action
        return LATER

    def _carriers(self) -> Carriers:
        return {
            Abort: self._abort,
            core.AskOffer: self._offer,
            core.Lend: self._lend,
            core.Lending: lambda action: self._on_lending(action.begun),
            core.AskHandOver: self._hand_over,
            SendHidden: self._send_hidden,
            core.AskTarget: self._ask,
            core.AskSplit: self._split,
            core.KeepAlive: self._keep_alive,
            core.Look: self._look,
            core.ReceiveHidden: self._receive_hidden,
            core.SendRest: self._send_rest,
            core.BeginBatch: self._begin_batch,
            RunPart: self._run,
            Finish: self._finish,
            core.Done: self._done,
            core.Conclude: self._conclude,
            core.FetchKv: self._fetch,
            core.LookAtRest: lambda action: self._has_ended(action.batch_id),
            core.WithholdKv: self._forget,
            core.SettleSoon: self._settle_soon,
            core.TellCancelled: self._tell_cancelled,
            core.Moved: self._moved,
            core.ReleaseToTarget: self._release_to_target,
            TellEnded: unseen,
            core.Restore: self._restore,
        }

    # --- PartialSteps ------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.machine.has_runs

    def begin(self) -> float | None:
        """See ``PartialSteps``."""
        while (part := self._next_part()) is not None:
            if not self._has_ended(part.batch_id):
                self._part_began_s = self._clock.now_s
                return self._seconds(self.machine.batches[part.batch_id], part)
            self.landed(part, core.Ran.NOT)
        return None

    def end(self) -> None:
        """See ``PartialSteps``."""
        part = self._part
        batch_id = part.batch_id
        busy_s = self._clock.now_s - self._part_began_s
        self._busy_s[batch_id] = self._busy_s.get(batch_id, 0.0) + busy_s
        if part.end == self.machine.batches[batch_id].num_tokens and part.kv_leaves:
            self._tell_layers(self.of_batch(batch_id), part.layer + 1, part.first_layer)
        self.landed(part, core.Ran.WELL)

    def _tell_layers(self, sequences: Iterable[ActiveSequence], num_layers: int, first_layer: int) -> None:
        for sequence in sequences:
            self.instance.ran_layers(sequence, first_layer, num_layers)

    def stepped(self) -> None:
        """See ``PartialSteps``."""
        self._look()

    def accepted(self) -> None:
        """See ``PartialSteps``."""
        self.handle(core.RequestArrived())

    def cancelled(self, sequence: ActiveSequence) -> None:
        """See ``PartialSteps``."""
        self.handle(Cancelled((sequence.key,)))
