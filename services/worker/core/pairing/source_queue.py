"""What the source of a pair does not compute in steps: its requests in batches, those at the target and those that wait
for it. First come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from services.worker.core.pairing.batch import PromptBatch, packed
from services.worker.core.scheduling.schedule import SchedulerConfig
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.common import ErrorInfo, LivePolicy
from shared.messages.live import SplitBatch

SLOTS_SHARE = 4
"""A batch takes at most this part of an instance's slots: all of its requests need theirs at once."""
UNKNOWN_TOKEN_S = 1e-6
"""Without a measurement a batch's cost is only relative to the others'."""


class SourceQueue:
    """Of one pair. It knows what the target answered, not how it is asked."""

    def __init__(self, pair_id: str, num_layers: int, config: SchedulerConfig) -> None:
        self._pair_id = pair_id
        self._num_layers = num_layers
        self._config = config
        self._lent: deque[ActiveSequence] = deque()
        """Out of the scheduler's queue, and in no batch yet."""
        self.handed: dict[str, PromptBatch] = {}
        """At the target, by id, in first-come order."""
        self.backlog: deque[PromptBatch] = deque()
        """Not handed over yet, or never: behind all that is."""
        self.num_handed = 0
        self.pulled: set[str] = set()
        """Ids of batches of those that were pulled: the target does nothing more with them."""
        self._num_batches = 0
        self._unwanted: set[tuple[str, int]] = set()
        """Cancelled while the pair lasts, by request id and attempt: inside a step the scheduler does not know yet."""

    def lend(self, scheduler: Scheduler) -> None:
        """Take what waits in the scheduler and has not begun."""
        # Kept here at once: should the caller be cancelled, nothing is lost.
        self._lent.extend(scheduler.lend())

    def pack(self, token_s: float) -> None:
        """What was lent waits in batches from now on. ``token_s``: of a prompt token through all layers; 0: unknown."""
        config = self._config
        sequences = [self._lent.popleft() for _ in range(len(self._lent))]
        most_requests = max(1, config.max_num_sequences // SLOTS_SHARE)
        for pack in packed(sequences, config.prefill_chunk_tokens, most_requests):
            num_tokens = sum(s.num_tokens for s in pack)
            batch_id = f"{self._pair_id}-{self._num_batches}"
            self._num_batches += 1
            layer_s = (token_s or UNKNOWN_TOKEN_S) * num_tokens / self._num_layers
            self.backlog.append(PromptBatch(batch_id, -1, pack, layer_s))

    def next_to_hand(self) -> PromptBatch | None:
        """The batch to hand over now; ``took`` or ``refused`` must follow. It counts as the target's before that: a
        pull may bring it back before the answer comes."""
        while self.backlog and self.backlog[0].ended:
            self.backlog.popleft()  # all of its requests were cancelled
        if not self.backlog:
            return None
        batch = self.backlog.popleft()
        self.handed[batch.batch_id] = batch
        return batch

    def took(self, batch: PromptBatch) -> list[ActiveSequence]:
        """The target has it. Returns those of its requests that were cancelled before: it may not have heard of it."""
        batch.serial = self.num_handed
        self.num_handed += 1
        return [s for s in batch.sequences if s.finished or s.key in self._unwanted]

    def refused(self, batch: PromptBatch) -> None:
        """The target does not take it now: it waits here, before what comes behind it."""
        self.backlog.appendleft(self.handed.pop(batch.batch_id))

    def to_split(self, policy: LivePolicy, token_s: float) -> tuple[SplitBatch, ...]:
        """What the planner is to split; nothing where no split can gain: equal batches need none, and without a
        measurement (``token_s`` 0) there is none."""
        if policy != "zigzag" or not token_s or len({b.layer_s for b in self.handed.values()}) < 2:
            return ()
        return tuple(SplitBatch(batch_id=b.batch_id, layer_s=b.layer_s) for b in self.handed.values())

    @property
    def expected(self) -> PromptBatch | None:
        """The batch that probably is the next to be run here."""
        return next(iter([*self.handed.values(), *self.backlog]), None)

    def has_room(self, scheduler: Scheduler) -> bool:
        """Whether that one fits."""
        expected = self.expected
        return expected is None or scheduler.reservations.fits(expected.lengths)

    def holds(self, request_id: str, attempt: int) -> bool:
        """Whether a request is at the target, or on its way there."""
        return any(s.key == (request_id, attempt) for batch in self.handed.values() for s in batch.sequences)

    def unwanted(self, request_id: str, attempt: int) -> None:
        """A request that was accepted here was cancelled: ``took`` tells of it, wherever it is now."""
        self._unwanted.add((request_id, attempt))

    def begin(self, batch: PromptBatch, scheduler: Scheduler) -> bool:
        """It is to be run here: its requests get slots and blocks. False, and nothing changes, if there are none."""
        if not batch.ended and not scheduler.reservations.reserve(batch.sequences):
            return False
        batch.begun = True
        return True

    def taken_by_target(self, batch_ids: Iterable[str]) -> list[PromptBatch]:
        """These are the target's for good; those of which that is news."""
        return [self.handed.pop(i) for i in batch_ids if i in self.handed]

    def close(self, *, in_doubt: bool) -> tuple[list[PromptBatch], list[PromptBatch]]:
        """The pair is over: what is the source's, and of what nobody knows whose it is. ``in_doubt``: the target may
        own any of what it has and did not give."""
        doubtful = [b for b in self.handed.values() if b.batch_id not in self.pulled] if in_doubt else []
        back = [b for b in (*self.handed.values(), *self.backlog) if b not in doubtful]
        self.handed.clear()
        self.backlog.clear()
        return back, doubtful

    def restore(
        self,
        scheduler: Scheduler,
        back: Sequence[PromptBatch],
        doubtful: Sequence[PromptBatch],
        doubt: ErrorInfo | None,
    ) -> None:
        """After ``close``: what is the source's waits in the scheduler again, at its old places, and no more is lent.
        What is doubtful ends with ``doubt``."""
        scheduler.table.lending = False
        # Looked at here, not before: a batch may just have been begun.
        scheduler.take_back([s for batch in back if not batch.begun for s in batch.sequences])
        if doubt is not None:
            scheduler.abort([s for batch in doubtful for s in batch.sequences], doubt)
        scheduler.take_back([self._lent.popleft() for _ in range(len(self._lent))])
