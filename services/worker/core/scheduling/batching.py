"""Which tokens an instance computes next: continuous batching with chunked prefill.

Rules, in order:

1. First come, first served. ``running`` and then ``waiting`` are always in order of arrival.
2. Each step has a budget of tokens: decode tokens take it first, then prefills that run, then
   new ones from the head of ``waiting``. A later request never starts before an earlier one. Where requests decode,
   prompts get no more than the objective for the time between two tokens leaves (``step_budget``).
3. All blocks of a context are taken when it starts, so that they are one run of the pool and a
   prefill never stops half-way for memory. Decodes take a block when they cross into it.
4. A decode that finds no block preempts the latest arrival: its blocks are freed, it returns
   to the head of ``waiting`` with its output kept, and computes prompt and output again. The
   latest arrival itself just waits. So the oldest request always advances, and nothing starves.
5. While a step is in flight, the next one can be made: a request goes on behind what is computed of it, from a token
   that is not known yet. Whose last token that is by its limits, or who is to be decoded elsewhere, is left out. Blocks
   that are touched are free when the step lands; who needs them waits.
6. A request that is to be computed alone is in no step with others. It is admitted like any other; then those that are
   alone and all others together take turns: every second step, while there is one, is one of those, in rotation.
"""

from __future__ import annotations

from services.worker.core.scheduling.guidance import Guidance
from services.worker.core.scheduling.request_table import RequestTable
from services.worker.core.scheduling.reservations import Reservations
from services.worker.core.scheduling.schedule import ScheduledBatch, ScheduledSlice
from services.worker.core.scheduling.sequence import ActiveSequence
from services.worker.core.scheduling.step_budget import StepBudget, StepBudgets

TELLING_TOKENS = 64
"""Of prompts behind prefixes that were there: in a step of fewer, what each step costs outweighs what they do."""


class ContinuousBatching:
    """Of one scheduler, whose requests it admits, and preempts where decodes need blocks."""

    def __init__(self, table: RequestTable, reservations: Reservations, budgets: StepBudgets) -> None:
        self._table = table
        self._budgets = budgets
        self._reservations = reservations
        self._config = table.config
        self._some_alone = False
        self._alone_next = False
        self._last_alone = -1
        self._held_by_others = (-1, -1, 0)
        """Of the head of ``waiting`` by its number, as of so many changes of the cache: blocks that cost nothing."""

    @property
    def some_alone(self) -> bool:
        """Whether a request that is to be computed alone may be here."""
        return self._some_alone

    @property
    def can_admit(self) -> bool:
        """Whether a slot and blocks are free for the head of ``waiting``."""
        need = self.head_blocks()
        return need > 0 and self._table.pool.can_allocate(need)

    def accepted(self, sequence: ActiveSequence) -> None:
        """A request came."""
        self._some_alone = self._some_alone or sequence.alone

    def next_batch(self, now_s: float) -> ScheduledBatch | None:
        """None if there is nothing to compute, or no capacity for it."""
        if not self._table.running and not self._table.may_admit:
            return None
        if not self._some_alone:
            return self._together(now_s)
        return None if self._table.flight else self._in_turn(now_s)

    def _in_turn(self, now_s: float) -> ScheduledBatch | None:
        batch = self._alone() if self._alone_next else None
        if batch is not None:
            self._alone_next = False
            return batch
        batch = self._together(now_s)
        if batch is None:
            return self._alone()
        self._alone_next = True
        here = (*self._table.running, *self._table.waiting, *self._reservations.for_decode)
        self._some_alone = any(s.alone for s in here)
        return batch

    def _alone(self) -> ScheduledBatch | None:
        """A step of one request that is computed alone: the next in order of arrival behind the last that had one."""
        running = self._table.running
        held_back = self._table.held_back
        candidates = [(s.id <= self._last_alone, s.id, s) for s in running if s.alone and id(s) not in held_back]
        for _, _, sequence in sorted(candidates, key=lambda c: c[:2]):
            slices: list[ScheduledSlice] = []
            preempted: list[ActiveSequence] = []
            start = sequence.num_computed
            budget = self._budgets.next()
            if len(sequence.tokens) - start > 1:
                self._prefill(sequence, start, budget, slices)
            elif sequence.is_guided and not self._may_decode(sequence):
                continue
            else:
                full = start >= len(sequence.block_table) * self._table.pool.block_size
                if full and not self._grow(sequence, running.index(sequence) + 1, preempted):
                    continue
                slices.append(ScheduledSlice(sequence, start, 1, True))
            self._last_alone = sequence.id
            decodes = 0 if budget.num_tokens else 1
            return ScheduledBatch(
                tuple(slices), budget.num_tokens, decodes, tuple(preempted), budget.num_pairs, alone=True
            )
        return None

    def _together(self, now_s: float) -> ScheduledBatch | None:
        slices: list[ScheduledSlice] = []
        preempted: list[ActiveSequence] = []
        block_size = self._table.pool.block_size
        running, held_back = self._table.running, self._table.held_back
        ahead = self._ahead() if self._table.flight else None
        prefills: list[tuple[ActiveSequence, int]] = []
        index, max_batch_tokens = 0, self._config.max_batch_tokens
        while index < len(running) and len(slices) < max_batch_tokens:
            sequence = running[index]
            index += 1
            if (sequence.alone_tokens and sequence.alone) or (held_back and id(sequence) in held_back):
                continue
            start, known = sequence.num_computed, len(sequence.tokens)
            if ahead is not None and (piece := ahead.get(id(sequence))) is not None:
                start, known = piece.start + piece.num_tokens, known + piece.sample
                if piece.sample and (sequence.is_guided or self._ends_with_next(sequence)):
                    continue
            if known - start > 1:
                prefills.append((sequence, start))
                continue
            if sequence.is_guided and not self._may_decode(sequence):
                continue
            if start >= len(sequence.block_table) * block_size and not self._grow(sequence, index, preempted):
                break
            slices.append(ScheduledSlice(sequence, start, 1, True))
        num_decode_tokens = len(slices)
        budget = self._budgets.next(num_decode_tokens)
        some_cached = False
        # A victim arrived later than the decode it yields to, so it is not among these.
        for sequence, start in prefills:
            if not budget.room(start):
                break
            self._prefill(sequence, start, budget, slices)
        while budget.room() and not preempted and (admitted := self._admit(now_s)) is not None:
            if admitted.alone:
                continue
            if not budget.room(admitted.num_computed):
                break  # behind a long prefix a token costs more: it has its turn, and nobody later before it
            some_cached = some_cached or admitted.num_computed > 0
            self._prefill(admitted, admitted.num_computed, budget, slices)
        if not slices:
            return None  # what is computed outside of steps leaves no capacity
        is_rest = some_cached and budget.num_tokens < TELLING_TOKENS
        return ScheduledBatch(
            tuple(slices), budget.num_tokens, num_decode_tokens, tuple(preempted), budget.num_pairs, is_rest
        )

    def _ahead(self) -> dict[int, ScheduledSlice]:
        """What is in flight of whom, by ``id``."""
        return {
            id(piece.sequence): piece
            for batch in self._table.flight
            if isinstance(batch, ScheduledBatch)
            for piece in batch.slices
        }

    def _ends_with_next(self, sequence: ActiveSequence) -> bool:
        """Whether the token that is being sampled is its last one here."""
        at_limit = (
            len(sequence.output) + 1 >= sequence.params.max_tokens
            or len(sequence.tokens) + 1 >= self._config.limit_tokens
        )
        return at_limit or sequence.decode_at is not None

    def _grow(self, sequence: ActiveSequence, index: int, preempted: list[ActiveSequence]) -> bool:
        """Give a decode its next block; ``running[index:]`` may be preempted for it."""
        table = self._table
        while not table.pool.can_allocate(1):
            if len(table.running) <= index or table.landing_blocks:
                return False
            victim = table.running.pop()
            if table.flight and id(victim) in self._ahead():
                table.torn.add(id(victim))
            table.free(victim)
            victim.num_computed = 0
            table.wait(victim)
            table.preemptions_total += 1
            preempted.append(victim)
        table.pool.append(sequence.block_table)
        return True

    def head_blocks(self) -> int:
        """Blocks that have to be free for the head of ``waiting`` to be admitted; 0 if it waits for something else, or
        none waits."""
        table = self._table
        if not table.may_admit or self._reservations.free_slots < 1:
            return 0
        if (table.torn or table.held_back) and id(table.waiting[0]) in table.torn | table.held_back:
            return 0
        head, cache = table.waiting[0], table.cache
        need = table.pool.blocks_for(head.num_tokens) + table.spare_blocks
        if cache is None or table.pool.can_allocate(need):
            return need
        # Asked for at each step: the chain of a long prompt has thousands of blocks.
        if self._held_by_others[:2] != (head.id, cache.num_changes):
            self._held_by_others = head.id, cache.num_changes, cache.num_held(table.found(head))
        return need - self._held_by_others[2]

    def _admit(self, now_s: float) -> ActiveSequence | None:
        """Move the head of ``waiting`` to ``running`` if a slot and the blocks of its context are free."""
        table = self._table
        if not self.can_admit:
            return None
        sequence = table.waiting.popleft()
        table.waiting_tokens -= sequence.num_tokens
        table.place(sequence)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now_s
        table.run(sequence)
        return sequence

    def _prefill(self, sequence: ActiveSequence, start: int, budget: StepBudget, slices: list[ScheduledSlice]) -> None:
        """Give it its share of the step, of which something must be left. What is behind its last token waits for its
        mask: others may have been told by then that the context is computed."""
        remaining = len(sequence.tokens) - start
        wanted = remaining
        if sequence.is_guided and not self._guidance(sequence).is_ready:
            wanted -= 1
        count = budget.take(start, wanted)
        if count:
            slices.append(ScheduledSlice(sequence, start, count, count == remaining))

    def _guidance(self, sequence: ActiveSequence) -> Guidance:
        if sequence.guidance is None:
            sequence.guidance = self._table.guide(sequence)
        return sequence.guidance

    def _may_decode(self, sequence: ActiveSequence) -> bool:
        """Whether the mask of its next token is there, or may be by the time it is drawn."""
        guidance = self._guidance(sequence)
        if guidance.is_complete:
            self._table.complete.append(sequence)
            return False
        if guidance.is_ready:
            guidance.was_late = False
            return True
        return sequence.decodes and not guidance.was_late
