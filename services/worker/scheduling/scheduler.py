"""Which tokens an instance computes next: continuous batching with chunked prefill.

Rules, in order:

1. First come, first served. ``running`` and then ``waiting`` are always in order of arrival.
2. Each step has a budget of tokens: decode tokens take it first, then prefills that run, then
   new ones from the head of ``waiting``. A later request never starts before an earlier one.
3. All blocks of a prefix are taken when it starts, so that they are one run of the pool and a
   prefill never stops half-way for memory. Decodes take a block when they cross into it.
4. A decode that finds no block preempts the latest arrival: its blocks are freed, it returns
   to the head of ``waiting`` with its output kept, and computes prompt and output again. The
   latest arrival itself just waits. So the oldest request always advances, and nothing starves.
5. A request that is to be computed alone is in no step with others. It is admitted like any other; then those that are
   alone and all others together take turns: every second step, while there is one, is one of those, in rotation.

Pure: no clock, no engine. One batch is in flight at a time.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from types import MappingProxyType

from services.worker.scheduling.blocks import BlockPool
from services.worker.scheduling.gateways import Gone
from services.worker.scheduling.output import TokenOutput
from services.worker.scheduling.schedule import (
    Queued,
    SampledToken,
    ScheduledBatch,
    ScheduledSlice,
    SchedulerConfig,
    SchedulerLoad,
)
from services.worker.scheduling.sequence import Sequence
from shared.errors import Conflict, ContextLengthExceeded, Overloaded
from shared.messages.common import ErrorInfo
from shared.messages.generation import FinishReason

NO_FAILURES: Mapping[int, ErrorInfo] = MappingProxyType({})

__all__ = ["SampledToken", "ScheduledBatch", "ScheduledSlice", "Scheduler", "SchedulerConfig", "SchedulerLoad"]


class Scheduler:
    """Continuous batching over one KV pool."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        # Kept free at admission so that a new prefill is not the next decode's victim.
        self._spare_blocks = config.num_blocks // 100
        self._waiting: deque[Sequence] = deque()
        self._waiting_tokens = 0
        self._running: list[Sequence] = []
        self._by_key: dict[tuple[str, int], Sequence] = {}
        self._next_id = 0
        self._some_alone = False
        """Perhaps: a request that is to be computed alone may be here."""
        self._alone_next = False
        self._last_alone = -1
        self._in_flight: ScheduledBatch | None = None
        self._ended: list[TokenOutput] = []
        self._prefill_tokens_total = 0
        self._decode_tokens_total = 0
        self._preemptions_total = 0

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` or ``take_ended`` has something to give."""
        return bool(self._running or self._ended or self._may_admit())

    @property
    def num_requests(self) -> int:
        """Requests accepted and not ended."""
        return len(self._by_key)

    def add(self, sequence: Sequence, now_s: float = 0.0) -> None:
        """Accept a request at the tail of the queue.

        A continuation whose streamed tokens already end it gets its terminal at once. Raises
        ``Conflict`` for an attempt that is here already, ``ContextLengthExceeded`` when not even
        one token fits behind the prompt, and ``Overloaded`` when the queue is full.
        """
        config = self.config
        if sequence.key in self._by_key:
            raise Conflict(f"attempt {sequence.attempt} of request {sequence.request_id} is here already")
        if not sequence.prompt or len(sequence.prompt) >= config.limit_tokens:
            raise ContextLengthExceeded(
                f"a prompt of {len(sequence.prompt)} tokens: this instance takes 1 to {config.limit_tokens - 1}",
                param="prompt",
            )
        reason = sequence.finish_reason(config.limit_tokens)
        if reason is not None:
            sequence.finished = True
            self._ended.append(sequence.end(reason))
            return
        queued = self._queued()
        if queued.requests >= self._queue_factor * config.max_queued_requests:
            raise Overloaded(f"{queued.requests} requests are queued, the limit is {config.max_queued_requests}")
        # A queue that is empty takes any prompt that fits the pool, else a long one could never run.
        if queued.requests and queued.tokens + sequence.num_tokens > self._queue_factor * config.max_queued_tokens:
            raise Overloaded(f"{queued.tokens} tokens are queued, the limit is {config.max_queued_tokens}")
        if sequence.arrived_s is None:
            sequence.arrived_s = now_s
        sequence.id = self._next_id
        self._next_id += 1
        self._by_key[sequence.key] = sequence
        self._some_alone = self._some_alone or sequence.alone
        self._waiting.append(sequence)
        self._waiting_tokens += sequence.num_tokens

    def cancel(self, request_id: str, attempt: int) -> Sequence | None:
        """End a request as cancelled. Its blocks are free at once, or when the batch in flight completes."""
        sequence = self._by_key.get((request_id, attempt))
        if sequence is not None:
            self._end([sequence], "cancelled")
        return sequence

    def cancel_gateway(self, gone: Gone) -> list[Sequence]:
        """Cancel every request of gateways that are gone."""
        theirs = [s for s in self._by_key.values() if gone.had(s.gateway_id, s.gateway_incarnation)]
        self._end(theirs, "cancelled")
        return theirs

    def abort_all(self, error: ErrorInfo) -> list[Sequence]:
        """End every request with an error."""
        every = list(self._by_key.values())
        self._end(every, "error", error)
        return every

    def schedule(self, now_s: float = 0.0) -> ScheduledBatch | None:
        """The next batch, or None if there is nothing to compute. ``complete`` or ``fail`` must follow."""
        if self._in_flight is not None:
            raise RuntimeError("a batch is in flight")
        if not self._running and not self._may_admit():
            return None
        batch = self._schedule_in_turn(now_s) if self._some_alone else self._schedule_together(now_s)
        if batch is not None:
            self._prefill_tokens_total += batch.num_prefill_tokens
            self._decode_tokens_total += batch.num_decode_tokens
            self._in_flight = batch
        return batch

    def _schedule_in_turn(self, now_s: float) -> ScheduledBatch | None:
        batch = self._schedule_alone() if self._alone_next else None
        if batch is not None:
            self._alone_next = False
            return batch
        batch = self._schedule_together(now_s)
        if batch is None:
            return self._schedule_alone()
        self._alone_next = True
        self._some_alone = any(s.alone for s in (*self._running, *self._waiting))
        return batch

    def _schedule_alone(self) -> ScheduledBatch | None:
        """A step of one request that is computed alone: the next in order of arrival behind the last that had one."""
        candidates = [(s.id <= self._last_alone, s.id, s) for s in self._running if s.alone]
        for _, _, sequence in sorted(candidates, key=lambda c: c[:2]):
            slices: list[ScheduledSlice] = []
            preempted: list[Sequence] = []
            start = sequence.num_computed
            num_prefill_tokens = 0
            if len(sequence.tokens) - start > 1:
                num_prefill_tokens = self._prefill(sequence, self.config.max_batch_tokens, slices)
            else:
                full = start >= len(sequence.block_table) * self.pool.block_size
                if full and not self._grow(sequence, self._running.index(sequence) + 1, preempted):
                    continue
                slices.append(ScheduledSlice(sequence, start, 1, True))
            self._last_alone = sequence.id
            decodes = 0 if num_prefill_tokens else 1
            return ScheduledBatch(tuple(slices), num_prefill_tokens, decodes, tuple(preempted), alone=True)
        return None

    def _schedule_together(self, now_s: float) -> ScheduledBatch | None:
        budget = self.config.max_batch_tokens
        slices: list[ScheduledSlice] = []
        preempted: list[Sequence] = []
        block_size = self.pool.block_size
        running = self._running
        prefills: list[Sequence] = []
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            index += 1
            if sequence.alone:
                continue
            start = sequence.num_computed
            if len(sequence.tokens) - start > 1:
                prefills.append(sequence)
                continue
            if start >= len(sequence.block_table) * block_size and not self._grow(sequence, index, preempted):
                break
            slices.append(ScheduledSlice(sequence, start, 1, True))
            budget -= 1
        num_decode_tokens = len(slices)
        # A victim arrived later than the decode it yields to, so it is not among these.
        for sequence in prefills:
            if budget <= 0:
                break
            budget -= self._prefill(sequence, budget, slices)
        while budget > 0 and not preempted and (admitted := self._admit(now_s)) is not None:
            if not admitted.alone:
                budget -= self._prefill(admitted, budget, slices)
        if not slices:
            return None  # what is computed outside of steps leaves no room
        num_prefill_tokens = self.config.max_batch_tokens - budget - num_decode_tokens
        return ScheduledBatch(tuple(slices), num_prefill_tokens, num_decode_tokens, tuple(preempted))

    def complete(
        self, batch: ScheduledBatch, sampled: Rows[SampledToken], failures: Mapping[int, ErrorInfo] = NO_FAILURES
    ) -> list[TokenOutput]:
        """Take the tokens of the batch in flight, one per slice that samples, in their order.

        Slices in ``failures``, by their place in the batch, could not be computed: they have no token, and their
        requests end with that. Returns the new outputs. Requests that ended meanwhile get none: their blocks are freed
        here.
        """
        self._land(batch)
        outputs: list[TokenOutput] = []
        tokens = iter(sampled)
        ended = False
        for place, piece in enumerate(batch.slices):
            sequence = piece.sequence
            failure = failures.get(place)
            token = next(tokens) if piece.sample and failure is None else None
            if sequence.finished:
                self._free(sequence)
                continue
            if failure is not None:
                outputs.append(sequence.end("error", failure))
                self._forget(sequence)
                ended = True
                continue
            sequence.num_computed = piece.start + piece.num_tokens
            if token is None:
                continue
            outputs.append(self._take_token(sequence, token))
            ended = ended or sequence.finished
        if ended:
            self._running = [s for s in self._running if not s.finished]
        return outputs

    def fail(self, batch: ScheduledBatch, error: ErrorInfo) -> list[TokenOutput]:
        """The batch in flight could not be computed: its requests end with ``error``."""
        return self.complete(batch, (), dict.fromkeys(range(len(batch.slices)), error))

    def take_ended(self) -> list[TokenOutput]:
        """Terminal outputs of requests that ended outside a step (cancelled, aborted, nothing left to do)."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_prefill(self) -> bool:
        """Whether a running request's prefix is not computed yet."""
        return any(len(s.tokens) - s.num_computed > 1 for s in self._running)

    @property
    def has_decodes(self) -> bool:
        """Whether a running request waits for its next token."""
        return any(len(s.tokens) - s.num_computed == 1 for s in self._running)

    def load(self) -> SchedulerLoad:
        """The load now. O(running)."""
        running_tokens = known_tokens = num_prefilling = 0
        for sequence in self._running:
            running_tokens += sequence.num_computed
            remaining = len(sequence.tokens) - sequence.num_computed
            if remaining > 1:
                known_tokens += remaining
                num_prefilling += 1
        queued = self._queued()
        return SchedulerLoad(
            queued.requests,
            queued.tokens + known_tokens,
            len(self._running),
            running_tokens,
            self.pool.num_used,
            self.pool.num_blocks,
            self._prefill_tokens_total,
            self._decode_tokens_total,
            self._preemptions_total,
            queued.oldest_arrived_s,
            num_prefilling,
        )

    def check(self) -> None:
        """Assert the invariants that hold between calls. For tests."""
        in_flight = [p.sequence for p in self._in_flight.slices] if self._in_flight else []
        owners = {id(s): s.block_table for s in [*self._running, *self._waiting, *in_flight, *self._elsewhere()]}
        self.pool.check(owners.values())
        for name, sequences in (("running", self._running), ("waiting", self._waiting)):
            order = [s.id for s in sequences]
            assert order == sorted(order), f"{name} is not in order of arrival"
        assert self._num_seats >= 0
        assert self._waiting_tokens == sum(s.num_tokens for s in self._waiting)
        known = {s.key for s in [*self._running, *self._waiting, *self._elsewhere()] if not s.finished}
        assert set(self._by_key) <= known

    def _grow(self, sequence: Sequence, index: int, preempted: list[Sequence]) -> bool:
        """Give a decode its next block; ``running[index:]`` may be preempted for it."""
        while not self.pool.can_allocate(1):
            if len(self._running) <= index:
                return False
            victim = self._running.pop()
            self._free(victim)
            victim.num_computed = 0
            self._put_back(victim)
            self._preemptions_total += 1
            preempted.append(victim)
        self.pool.append(sequence.block_table)
        return True

    def _prefill(self, sequence: Sequence, budget: int, slices: list[ScheduledSlice]) -> int:
        remaining = len(sequence.tokens) - sequence.num_computed
        count = min(remaining, budget, self.config.prefill_chunk_tokens)
        slices.append(ScheduledSlice(sequence, sequence.num_computed, count, count == remaining))
        return count

    def _admit(self, now_s: float) -> Sequence | None:
        """Move the head of ``waiting`` to ``running`` if a seat and the blocks of its prefix are free."""
        if not self._may_admit() or self._num_seats < 1:
            return None
        sequence = self._waiting[0]
        need = self.pool.blocks_for(sequence.num_tokens)
        if not self.pool.can_allocate(need + (self._spare_blocks if self._running else 0)):
            return None
        self._waiting.popleft()
        self._waiting_tokens -= sequence.num_tokens
        sequence.block_table = self.pool.allocate(need)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now_s
        bisect.insort(self._running, sequence, key=arrival)
        return sequence

    def _may_admit(self) -> bool:
        """Whether the head of ``waiting`` may run here."""
        return bool(self._waiting)

    @property
    def _num_seats(self) -> int:
        return self.config.max_num_sequences - len(self._running)

    @property
    def _queue_factor(self) -> int:
        """How many instances work on this queue."""
        return 1

    def _queued(self) -> Queued:
        oldest_s = self._waiting[0].arrived_s if self._waiting else None
        return Queued(len(self._waiting), self._waiting_tokens, oldest_s)

    def _elsewhere(self) -> Iterable[Sequence]:
        """Requests that are neither running nor waiting here."""
        return ()

    def _put_back(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=arrival)
        self._waiting_tokens += sequence.num_tokens

    def _take_token(self, sequence: Sequence, token: SampledToken) -> TokenOutput:
        """The output of a token just sampled; an end forgets the sequence."""
        if token.error is not None:
            output = sequence.end("error", token.error)
            self._forget(sequence)
            return output
        sequence.append(token.token_id)
        reason = sequence.finish_reason(self.config.limit_tokens)
        output = sequence.emit(token.token_id, token.logprobs, reason)
        if reason is not None:
            self._forget(sequence)
        return output

    def _land(self, batch: ScheduledBatch) -> None:
        if batch is not self._in_flight:
            raise RuntimeError("this batch is not in flight")
        self._in_flight = None

    def _end(self, sequences: Iterable[Sequence], reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """End requests outside a step; those of the batch in flight keep their blocks until it lands."""
        flying = {id(p.sequence) for p in self._in_flight.slices} if self._in_flight else set()
        for sequence in sequences:
            self._ended.append(sequence.end(reason, error))
            if id(sequence) in flying or sequence.held:
                sequence.finished = True
                del self._by_key[sequence.key]
            else:
                self._forget(sequence)
        self._running = [s for s in self._running if not s.finished]
        if any(s.finished for s in self._waiting):
            self._waiting = deque(s for s in self._waiting if not s.finished)
            self._waiting_tokens = sum(s.num_tokens for s in self._waiting)

    def _forget(self, sequence: Sequence) -> None:
        sequence.finished = True
        del self._by_key[sequence.key]
        if not sequence.held:  # else they are freed by who holds it
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        # A new list, not a cleared one: an engine may still hold the old table.
        blocks, sequence.block_table = sequence.block_table, []
        self.pool.free(blocks)


def arrival(sequence: Sequence) -> int:
    """For sorting."""
    return sequence.id
