"""The requests of one instance: accepted, batched step by step, ended.

``batching`` decides which of them the next step computes. Requests that have a slot and blocks here and are in no
step are ``reservations``.

While ``lending`` (live scaling), requests that have not begun are not admitted: ``lend`` takes them out, for another
instance to run layers of. Those that have begun (and were preempted) stay, and go on here; so do those that are
computed alone. A lent request ends here like any other, unless it is taken back, adopted, or the target's for good.

Pure: no clock, no engine. Two batches are in flight at most: the second is made before the tokens of the first are
known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType

from services.worker.core.scheduling.batching import ContinuousBatching
from services.worker.core.scheduling.blocks import BlockPool
from services.worker.core.scheduling.gateways import Gone
from services.worker.core.scheduling.request_table import (
    NO_GRAMMARS,
    NO_PROMPT_LOGPROBS,
    RequestTable,
    guides_nobody,
)
from services.worker.core.scheduling.reservations import Reservations
from services.worker.core.scheduling.schedule import (
    Queued,
    Sampled,
    ScheduledBatch,
    ScheduledSlice,
    SchedulerConfig,
    SchedulerLoad,
)
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.core.scheduling.step_budget import StepBudgets
from shared.errors import Conflict, ContextLengthExceeded, Overloaded
from shared.messages.common import ErrorInfo
from shared.messages.generation import FinishReason, PromptLogprobs, StreamPart

LENT_QUEUE_FACTOR = 2
"""Two instances work on a queue that is lent: it may be twice as long."""
MAX_IN_FLIGHT = 2
NO_FAILURES: Mapping[int, ErrorInfo] = MappingProxyType({})


class Scheduler:
    """Continuous batching over one KV pool."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool | None = None) -> None:
        """``pool``: of as many blocks as ``config`` says; one is made by default."""
        self.config = config
        self.table = RequestTable(config, pool)
        self.pool = self.table.pool
        self.reservations = Reservations(self.table)
        self.budgets = StepBudgets(config)
        """What steps may take. Their times are to be told to it."""
        self._batching = ContinuousBatching(self.table, self.reservations, self.budgets)
        self._flight: deque[ScheduledBatch] = deque()
        self._ended: list[StreamPart] = []
        self._decode_tokens_total = 0

    @property
    def has_work(self) -> bool:
        """Whether ``schedule``, ``take_ended`` or ``reservations.take_prefilled`` has something to give."""
        return bool(self.table.running or self._ended or self.reservations.has_prefilled or self.table.may_admit)

    @property
    def waits_for_quiet(self) -> bool:
        """Whether there may be a next batch once what is in flight has landed, and none before: a request that is to be
        computed alone is here."""
        return bool(self.table.flight) and self._batching.some_alone

    @property
    def num_requests(self) -> int:
        """Requests accepted and not ended."""
        return len(self.table.accepted)

    def add(self, sequence: ActiveSequence, now_s: float = 0.0) -> None:
        """Accept a request at the tail of the queue.

        A continuation whose streamed tokens already end it gets its terminal at once. Raises
        ``Conflict`` for an attempt that is here already, ``ContextLengthExceeded`` when not even
        one token fits behind the prompt, ``UnsupportedParameter`` for a grammar, or log-probabilities of
        the prompt, where there are none, and ``Overloaded`` when the queue is full.
        """
        config, table = self.config, self.table
        if sequence.key in table.accepted:
            raise Conflict(f"attempt {sequence.attempt} of request {sequence.request_id} is here already")
        if not sequence.prompt or len(sequence.prompt) >= config.limit_tokens:
            raise ContextLengthExceeded(
                f"a prompt of {len(sequence.prompt)} tokens: this instance takes 1 to {config.limit_tokens - 1}",
                param="prompt",
            )
        if sequence.is_guided and table.guide is guides_nobody:
            raise NO_GRAMMARS
        if sequence.num_to_score and not table.scores_prompts:
            raise NO_PROMPT_LOGPROBS
        reason = sequence.finish_reason(config.limit_tokens)
        if reason is not None:
            sequence.finished = True
            self._ended.append(sequence.end(reason))
            return
        queued, factor = self._queued(), LENT_QUEUE_FACTOR if self.table.lending else 1
        if queued.requests >= factor * config.max_queued_requests:
            raise Overloaded(f"{queued.requests} requests are queued, the limit is {config.max_queued_requests}")
        # A queue that is empty takes any prompt that fits the pool, else a long one could never run.
        if queued.requests and queued.tokens + sequence.num_tokens > factor * config.max_queued_tokens:
            raise Overloaded(f"{queued.tokens} tokens are queued, the limit is {config.max_queued_tokens}")
        if sequence.arrived_s is None:
            sequence.arrived_s = now_s
        table.number(sequence)
        table.accepted[sequence.key] = sequence
        table.wait(sequence)
        self._batching.accepted(sequence)

    def cancel(self, request_id: str, attempt: int) -> ActiveSequence | None:
        """End a request as cancelled. Its blocks are free at once, or when what touches them has landed."""
        sequence = self.table.accepted.get((request_id, attempt))
        if sequence is not None:
            self._end([sequence], "cancelled")
        return sequence

    def cancel_gateway(self, gone: Gone) -> list[ActiveSequence]:
        """Cancel every request of gateways that are gone."""
        theirs = [s for s in self.table.accepted.values() if gone.had(s.gateway_id, s.gateway_incarnation)]
        self._end(theirs, "cancelled")
        return theirs

    def abort_all(self, error: ErrorInfo) -> list[ActiveSequence]:
        """End every request with an error."""
        every = list(self.table.accepted.values())
        self._end(every, "error", error)
        return every

    def abort(self, sequences: Iterable[ActiveSequence], error: ErrorInfo) -> None:
        """End these requests with an error, those that have not ended."""
        self._end([s for s in sequences if not s.finished], "error", error)

    def lend(self) -> list[ActiveSequence]:
        """Take the requests that have not begun out of the queue, in order. They stay accepted: ``take_back``,
        ``release_to_target`` or a reservation must follow for each that is not cancelled before."""
        return self.table.stop_waiting(lambda s: not s.stays)

    def take_back(self, sequences: Iterable[ActiveSequence]) -> None:
        """Lent requests wait here again, at their old places; ended ones are left out."""
        for sequence in sequences:
            if not sequence.finished:
                self.table.wait(sequence)

    def release_to_target(self, sequences: Iterable[ActiveSequence]) -> None:
        """Lent requests are another instance's for good: they leave without a word."""
        for sequence in sequences:
            if not sequence.finished:
                self.table.forget(sequence)

    def schedule(self, now_s: float = 0.0) -> ScheduledBatch | None:
        """The next batch, or None if there is nothing to compute, or only behind what is in flight. ``complete`` must
        follow, or ``drop``. Raises ``RuntimeError`` for a third one."""
        if len(self._flight) == MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} batches are in flight")
        batch = self._batching.next_batch(now_s)
        if self.table.complete:
            self._end_complete()
        if batch is not None:
            self.table.prefill_tokens_total += batch.num_prefill_tokens
            self._decode_tokens_total += batch.num_decode_tokens
            self._flight.append(batch)
            self.table.flight.append(batch)
        return batch

    def _end_complete(self) -> None:
        table = self.table
        self._ended += [table.completed(sequence) for sequence in table.complete if not sequence.finished]
        table.complete.clear()
        table.stop_waiting(lambda s: s.finished)  # one that was preempted for another in the same step
        table.running = [s for s in table.running if not s.finished]

    def scored(self, batch: ScheduledBatch, scores: Mapping[int, PromptLogprobs]) -> list[StreamPart]:
        """Take the log-probabilities of prompts of the oldest batch in flight, by a request's ``id()``, before its
        tokens: the outputs of those that have not ended. Of one that was preempted in between they hold all the
        same."""
        here = (piece.sequence for piece in batch.slices if id(piece.sequence) in scores)
        return [sequence.scored(scores[id(sequence)]) for sequence in here if not sequence.finished]

    def complete(
        self,
        batch: ScheduledBatch,
        sampled: Sequence[Sampled],
        failures: Mapping[int, ErrorInfo] = NO_FAILURES,
        *,
        without: Container[int] = (),
    ) -> list[StreamPart]:
        """Take the tokens of the oldest batch in flight, one per slice that samples, in their order.

        Slices in ``failures``, by their place in the batch, could not be computed: they have no token, and their
        requests end with that. Slices in ``without`` were not computed after all (``lies_there``). Returns the new
        outputs. Requests that ended in between get none. A request that was preempted in between has its token, unless
        it is to be decoded elsewhere: it is computed again with it.
        """
        if not self._flight or batch is not self._flight[0]:
            raise RuntimeError("this batch is not the oldest in flight")
        self._flight.popleft()
        table = self.table
        table.landed(batch)
        torn, table.torn = table.torn, set()
        outputs: list[StreamPart] = []
        tokens = iter(sampled)
        leave, remembers = False, table.cache is not None
        for place, piece in enumerate(batch.slices):
            sequence = piece.sequence
            if without and place in without:
                continue
            failure = failures.get(place) if failures else None
            token = next(tokens) if piece.sample and failure is None else None
            if sequence.finished:
                continue
            if failure is not None:
                outputs.append(table.failed(sequence, failure))
                leave = True
                continue
            late = token is not None and token.is_late
            if torn and id(sequence) in torn:
                if token is not None and not late and sequence.decode_at is None:
                    outputs.append(table.take_token(sequence, token))
                continue
            sequence.num_computed = piece.start + piece.num_tokens - late
            if remembers:
                table.remember(sequence)
            if token is None:
                continue
            if token.is_late:
                assert sequence.guidance is not None
                sequence.guidance.was_late = True
                continue
            outputs.append(table.take_token(sequence, token))
            if sequence.decode_at is not None:
                self.reservations.hold_for_decode(sequence, token)
            leave = leave or sequence.finished or sequence.reserved
        if leave:
            table.running = [s for s in table.running if not (s.finished or s.reserved)]
        if torn:
            table.stop_waiting(lambda s: s.finished)
            table.waiting_tokens = sum(s.num_tokens for s in table.waiting)
        return outputs

    def lies_there(self, piece: ScheduledSlice) -> bool:
        """Whether a slice in flight could be computed again: its request has neither ended nor been preempted."""
        return not (piece.sequence.finished or id(piece.sequence) in self.table.torn)

    def drop(self, batch: ScheduledBatch) -> None:
        """The newest batch in flight is over, and counts for nothing: it was made behind one that failed."""
        if not self._flight or batch is not self._flight[-1]:
            raise RuntimeError("this batch is not the newest in flight")
        self._flight.pop()
        self.table.landed(batch)
        if not self._flight:
            self.table.torn.clear()

    def decode_steps(self) -> int:
        """How many of the next steps would do the same: decode all that runs, without admitting or preempting
        anything. Requests reach their limits with the last of them at most. 0: the next step is another one, or there
        is something to take first."""
        table, reservations, running = self.table, self.reservations, self.table.running
        if self._flight or self._ended or reservations.has_prefilled or self._batching.some_alone or table.held_back:
            return 0
        if not running or len(running) > self.config.max_batch_tokens or self._batching.can_admit:
            return 0
        limit_tokens, steps = self.config.limit_tokens, self.config.limit_tokens
        for sequence in running:
            num_tokens = len(sequence.tokens)
            if num_tokens - sequence.num_computed > 1 or sequence.decode_at is not None:
                return 0
            left = sequence.params.max_tokens - len(sequence.output)
            steps = min(steps, left)
            steps = min(steps, limit_tokens - num_tokens)
        pool = table.pool
        if not pool.can_allocate(len(running) * pool.blocks_for(steps)):
            num_free = pool.num_blocks - pool.num_used
            steps = bisect_right(range(1, steps + 1), num_free, key=self._blocks_to_grow)
        return steps

    def decode_ahead(self, steps: int, token_id: int = 0) -> list[ActiveSequence]:
        """As if so many steps, at most ``decode_steps()``, had been scheduled and completed one by one, each with
        ``token_id`` for every request that runs, which ends none of them. Which blocks they hold may differ, how many
        not. Returns those that reached their limits; their outputs are not said again."""
        table, pool = self.table, self.table.pool
        self._decode_tokens_total += steps * len(table.running)
        limit_tokens, token_ids = self.config.limit_tokens, [token_id] * steps
        ended: list[ActiveSequence] = []
        for sequence in table.running:
            sequence.num_computed += steps
            while sequence.num_computed > len(sequence.block_table) * pool.block_size:
                pool.append(sequence.block_table)
            sequence.append_all(token_ids)
            if len(sequence.output) >= sequence.params.max_tokens or len(sequence.tokens) >= limit_tokens:
                ended.append(sequence)
        if ended:
            for sequence in ended:
                table.ended_by_itself(sequence)
            table.running = [s for s in table.running if not s.finished]
        return ended

    def _blocks_to_grow(self, steps: int) -> int:
        """That so many decode steps of all that runs take."""
        blocks_for = self.table.pool.blocks_for
        return sum(max(0, blocks_for(s.num_computed + steps) - len(s.block_table)) for s in self.table.running)

    def take_ended(self) -> list[StreamPart]:
        """Terminal outputs of requests that ended outside a step (cancelled, aborted, nothing left to do)."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_prefill(self) -> bool:
        """Whether a running request's context is not computed yet."""
        return any(len(s.tokens) - s.num_computed > 1 for s in self.table.running)

    @property
    def has_decodes(self) -> bool:
        """Whether a running request waits for its next token."""
        return any(len(s.tokens) - s.num_computed == 1 for s in self.table.running)

    def load(self, ahead: int = 0) -> SchedulerLoad:
        """The load now. O(running). ``ahead``: as after so many decode steps (``decode_ahead``) that end no request."""
        running_tokens = known_tokens = num_prefilling = 0
        for sequence in self.table.running:
            running_tokens += sequence.num_computed
            remaining = len(sequence.tokens) - sequence.num_computed
            if remaining > 1:
                known_tokens += remaining
                num_prefilling += 1
        # What is held for decode counts as running.
        held = self.reservations.for_decode
        running_tokens += sum(s.num_computed for s in held)
        queued = self._queued()
        head_blocks, grown = self._batching.head_blocks(), 0
        if ahead:
            running_tokens += ahead * len(self.table.running)
            grown = self._blocks_to_grow(ahead)
        return SchedulerLoad(
            queued.requests,
            queued.tokens + known_tokens,
            len(self.table.running) + len(held),
            running_tokens,
            self.pool.num_used + grown,
            self.pool.num_blocks,
            self.table.prefill_tokens_total,
            self._decode_tokens_total + ahead * len(self.table.running),
            self.table.preemptions_total,
            queued.oldest_arrived_s,
            self.pool.block_size,
            num_prefilling,
            self.table.ended_requests_total,
            self.table.ended_tokens_total,
            0 if self.pool.can_allocate(head_blocks + grown) else head_blocks,
            self.table.cached_tokens_total,
            round(self.table.beginnings.tokens),
            self.table.beginnings.hottest,
        )

    def check(self) -> None:
        """Assert the invariants that hold between calls. For tests."""
        table, reservations = self.table, self.reservations
        lent = [s for s in table.accepted.values() if not s.block_table]
        here = [*table.running, *table.waiting, *reservations.for_prefill, *reservations.for_decode, *lent]
        self.pool.check([*{id(s): s.block_table for s in here}.values(), *table.landing])
        assert table.landing_blocks == sum(map(len, table.landing))
        for name, sequences in (("running", table.running), ("waiting", table.waiting)):
            order = [s.id for s in sequences]
            assert order == sorted(order), f"{name} is not in order of arrival"
        assert reservations.free_slots >= 0
        assert table.waiting_tokens == sum(s.num_tokens for s in table.waiting)
        assert set(table.accepted) <= {s.key for s in here if not s.finished}

    def _queued(self) -> Queued:
        """Those that wait, are lent, or are computed outside of steps."""
        table, reservations = self.table, self.reservations
        num_held = sum(not s.finished for s in reservations.for_decode)
        if len(table.accepted) == len(table.running) + len(table.waiting) + num_held:
            oldest_s = table.waiting[0].arrived_s if table.waiting else None
            return Queued(len(table.waiting), table.waiting_tokens, oldest_s)
        for_prefill = {id(s) for s in reservations.for_prefill}
        queued = [s for s in table.accepted.values() if id(s) in for_prefill or not s.block_table]
        oldest_s = min((s.arrived_s for s in queued if s.arrived_s is not None), default=None)
        return Queued(len(queued), sum(s.num_tokens for s in queued), oldest_s)

    def _end(self, sequences: Iterable[ActiveSequence], reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """End requests outside a step."""
        for sequence in sequences:
            self._ended.append(sequence.end(reason, error))
            self.table.forget(sequence)
        self.table.running = [s for s in self.table.running if not s.finished]
        self.table.stop_waiting(lambda s: s.finished)
