"""The scheduler with requests that another instance works on: in live scaling, and in disaggregated serving.

- While ``lending``, requests that have not begun are not admitted: ``lend`` takes them out, for another instance to run
  layers of. Those that have begun (and were preempted) stay, and go on here; so do those that are computed alone.
- A prefix that is computed outside of steps has its seat and blocks reserved first (``reserve``), and is adopted with
  its first token. The request may be one of this scheduler's own that was lent, or another instance's so far.
- Every lent request ends here like any other, unless it is returned, adopted, or disowned.
- A prefix may be adopted while KV of its first layers, which ran elsewhere, is still on its way (``kv_here``): it is
  *parked* with its first token, and its blocks are kept, until the KV is there (``kv_arrived``) or lost (``kv_lost``:
  then it is computed here again, as after a preemption).
- A request that another instance is to decode (``decode_at``) is *parked* with its first token: it keeps its seat and
  blocks and is not decoded, until it is unparked, or disowned and released.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace

from services.worker.scheduling.output import TokenOutput
from services.worker.scheduling.schedule import Queued, SampledToken, ScheduledBatch, SchedulerConfig, SchedulerLoad
from services.worker.scheduling.scheduler import NO_FAILURES, Scheduler, arrival
from services.worker.scheduling.sequence import Sequence
from shared.errors import Conflict
from shared.messages.common import ErrorInfo

LENT_QUEUE_FACTOR = 2
"""Two instances work on a queue that is lent: it may be twice as long."""


class LendingScheduler(Scheduler):
    """A scheduler that can lend its queue. As fast as the plain one while it does not."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.lending = False
        """Requests that have not begun wait for ``lend`` instead of being admitted."""
        self._held: dict[int, Sequence] = {}
        """With blocks for a prefix that is computed outside of steps, by identity."""
        self._parked: dict[int, Sequence] = {}
        """With a prefix that was computed, and is to be decoded elsewhere, by identity."""
        self._departing: list[tuple[Sequence, SampledToken]] = []
        self._incomplete: dict[int, SampledToken] = {}
        """First tokens of parked requests whose KV is on its way, and which another instance is to decode then."""

    @property
    def has_work(self) -> bool:
        """As the plain scheduler's, or there are requests for ``take_departing``."""
        return super().has_work or bool(self._departing)

    def lend(self) -> list[Sequence]:
        """Take the requests that have not begun out of the queue, in order. They stay accepted: ``return_lent``,
        ``adopt`` or ``disown`` must follow for each that is not cancelled meanwhile."""
        lent = [s for s in self._waiting if not _stays(s)]
        self._waiting = deque(s for s in self._waiting if _stays(s))
        self._waiting_tokens = sum(s.num_tokens for s in self._waiting)
        return lent

    def return_lent(self, sequences: Iterable[Sequence]) -> None:
        """Lent requests wait here again, at their old places; ended ones are left out."""
        for sequence in sequences:
            if not sequence.finished:
                self._put_back(sequence)

    def reserve(self, sequences: Rows[Sequence]) -> bool:
        """Seats and blocks for prefixes that are computed outside of steps, for all or, with False, for none.

        Requests that are another instance's so far get their place in the order of arrival here.
        """
        if not self.fits([s.num_tokens for s in sequences]):
            return False
        for sequence in sequences:
            if sequence.id < 0:
                sequence.id = self._next_id
                self._next_id += 1
            sequence.block_table = self.pool.allocate(self.pool.blocks_for(sequence.num_tokens))
            sequence.held = True
            self._held[id(sequence)] = sequence
        return True

    def fits(self, lengths: Rows[int]) -> bool:
        """Whether prefixes of so many tokens could be reserved now. Whatever runs keeps a block to grow into, and what
        was preempted comes first."""
        if (self._waiting and _has_begun(self._waiting[0])) or self._num_seats < len(lengths):
            return False
        return self.pool.can_allocate(sum(map(self.pool.blocks_for, lengths)) + len(self._running))

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Give reserved seats and blocks back."""
        for sequence in sequences:
            if sequence.held:
                self._let_go(sequence)
                self._free(sequence)

    def adopt(
        self,
        sequence: Sequence,
        token: SampledToken,
        now_s: float = 0.0,
        *,
        computed_here: bool = True,
        kv_here: bool = True,
    ) -> TokenOutput | None:
        """A reserved prefix was computed and its first token sampled: the request decodes here from now on.

        None if it ended meanwhile. ``computed_here``: its prefix counts as this scheduler's work. Without ``kv_here``
        its blocks are still written, whether it has ended or not: ``kv_arrived`` or ``kv_lost`` must follow. Raises
        ``Conflict`` for an attempt that is here already.
        """
        if sequence.finished:
            if kv_here:
                self.release([sequence])
            return None
        if self._by_key.setdefault(sequence.key, sequence) is not sequence:
            raise Conflict(f"attempt {sequence.attempt} of request {sequence.request_id} is here already")
        if kv_here:
            self._let_go(sequence)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now_s
        sequence.num_computed = sequence.num_tokens
        if computed_here:
            self._prefill_tokens_total += sequence.num_tokens
        output = self._take_token(sequence, token)
        if not kv_here and sequence.decode_at is not None:
            self._departing.pop()
            self._incomplete[id(sequence)] = token
        if output.finish_reason is None and (sequence.decode_at is not None or not kv_here):
            self._held.pop(id(sequence), None)
            self._park(sequence)
        elif output.finish_reason is None:
            bisect.insort(self._running, sequence, key=arrival)
        return output

    def kv_arrived(self, sequences: Iterable[Sequence]) -> None:
        """The KV of adopted prefixes is whole: those that have not ended decode, here or where they are to."""
        for sequence in sequences:
            token = self._incomplete.pop(id(sequence), None)
            if sequence.finished:
                self.release([sequence])
            elif token is not None:
                self._departing.append((sequence, token))
            else:
                self.unpark(sequence)

    def kv_lost(self, sequences: Rows[Sequence]) -> None:
        """The KV of adopted prefixes will not be whole: those that have not ended are computed again, with what they
        have put out."""
        for sequence in sequences:
            self._incomplete.pop(id(sequence), None)
            if not sequence.finished:
                sequence.num_computed = 0
                self._preemptions_total += 1
        self.readmit(sequences)

    def complete(
        self, batch: ScheduledBatch, sampled: Rows[SampledToken], failures: Mapping[int, ErrorInfo] = NO_FAILURES
    ) -> list[TokenOutput]:
        """As the plain scheduler; parks what is to be decoded elsewhere."""
        known = len(self._departing)
        outputs = super().complete(batch, sampled, failures)
        if len(self._departing) > known:
            parking = [s for s, _ in self._departing[known:] if not s.finished]
            for sequence in parking:
                self._park(sequence)
            self._running = [s for s in self._running if not s.held]
        return outputs

    def take_departing(self) -> list[tuple[Sequence, SampledToken]]:
        """Requests that are to be decoded elsewhere, with the first tokens that they got since the last call.

        Those that have not ended with it are parked.
        """
        departing, self._departing = self._departing, []
        return departing

    def unpark(self, sequence: Sequence) -> None:
        """A parked request is decoded here after all, unless it has ended: then its blocks are freed."""
        if sequence.finished:
            self.release([sequence])
        elif id(sequence) in self._parked:
            self._let_go(sequence)
            sequence.decode_at = None
            bisect.insort(self._running, sequence, key=arrival)

    def part_with(self, sequence: Sequence) -> None:
        """A parked request is decoded elsewhere now: it leaves without a word, if it has not ended."""
        if not sequence.finished:
            sequence.finished = True
            del self._by_key[sequence.key]
        self.release([sequence])

    def _park(self, sequence: Sequence) -> None:
        sequence.held = True
        self._parked[id(sequence)] = sequence

    def _take_token(self, sequence: Sequence, token: SampledToken) -> TokenOutput:
        if sequence.decode_at is not None:
            self._departing.append((sequence, token))
        return super()._take_token(sequence, token)

    def readmit(self, sequences: Iterable[Sequence]) -> None:
        """Reserved prefixes could not be computed outside of steps: they give their room back and wait here, at their
        places, to be computed in steps. Ended ones are released, adopted ones left alone."""
        for sequence in [s for s in sequences if s.held]:
            self.release([sequence])
            if not sequence.finished:
                self._by_key[sequence.key] = sequence
                self._put_back(sequence)

    def disown(self, sequences: Iterable[Sequence]) -> None:
        """Lent requests are another instance's for good: they leave without a word."""
        for sequence in sequences:
            if not sequence.finished:
                self._forget(sequence)

    def load(self) -> SchedulerLoad:
        """As the plain scheduler's; what is parked counts as running."""
        load = super().load()
        if not self._parked:
            return load
        num_tokens = sum(s.num_computed for s in self._parked.values())
        return replace(
            load,
            running_requests=load.running_requests + len(self._parked),
            running_tokens=load.running_tokens + num_tokens,
        )

    def abort(self, sequences: Iterable[Sequence], error: ErrorInfo) -> None:
        """End these requests with an error, those that have not ended."""
        self._end([s for s in sequences if not s.finished], "error", error)

    def _may_admit(self) -> bool:
        return bool(self._waiting) and (not self.lending or _stays(self._waiting[0]))

    @property
    def _num_seats(self) -> int:
        return super()._num_seats - len(self._held) - len(self._parked)

    @property
    def _queue_factor(self) -> int:
        return LENT_QUEUE_FACTOR if self.lending else 1

    def _queued(self) -> Queued:
        num_parked = sum(not s.finished for s in self._parked.values())
        if len(self._by_key) == len(self._running) + len(self._waiting) + num_parked:
            return super()._queued()  # nothing is lent
        queued = [s for s in self._by_key.values() if id(s) in self._held or not s.block_table]
        oldest_s = min((s.arrived_s for s in queued if s.arrived_s is not None), default=None)
        return Queued(len(queued), sum(s.num_tokens for s in queued), oldest_s)

    def _elsewhere(self) -> Iterable[Sequence]:
        lent = [s for s in self._by_key.values() if not s.block_table]
        return [*self._held.values(), *self._parked.values(), *lent]

    def _let_go(self, sequence: Sequence) -> None:
        sequence.held = False
        self._held.pop(id(sequence), None)
        self._parked.pop(id(sequence), None)


def _stays(sequence: Sequence) -> bool:
    """Whether it is not lent."""
    return sequence.alone or _has_begun(sequence)


def _has_begun(sequence: Sequence) -> bool:
    return sequence.first_scheduled_s is not None
