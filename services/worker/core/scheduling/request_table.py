"""The requests of one instance: who waits, who runs, and whose blocks are whose."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Sequence

from services.worker.core.scheduling.beginnings import Beginnings
from services.worker.core.scheduling.blocks import BlockPool
from services.worker.core.scheduling.guidance import Guidance
from services.worker.core.scheduling.prefix_cache import PrefixCache
from services.worker.core.scheduling.schedule import PartialBatch, Sampled, ScheduledBatch, SchedulerConfig
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import Internal, UnsupportedParameter
from shared.messages.common import ErrorInfo
from shared.messages.generation import StreamPart


class RequestTable:
    """What the scheduler and its reservations share.

    ``waiting`` and ``running`` are in order of arrival. An accepted request that is in neither is lent or reserved.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool | None = None) -> None:
        self.config = config
        if pool is None:
            make = PrefixCache if config.prefix_cache else BlockPool
            pool = make(config.num_blocks, config.block_size, config.prepared_blocks)
        self.pool = pool
        self.cache = pool if isinstance(pool, PrefixCache) else None
        self.guide: Callable[[ActiveSequence], Guidance] = guides_nobody
        """Begins to keep a request's output to its grammar. It is called once for each, here."""
        self.scores_prompts = False
        """Whether the engine gives log-probabilities of prompts."""
        self.complete: list[ActiveSequence] = []
        """Those found to need no further step, which have not been ended yet."""
        self.accepted: dict[tuple[str, int], ActiveSequence] = {}
        """Those that have not ended, by request id and attempt."""
        self.waiting: deque[ActiveSequence] = deque()
        self.waiting_tokens = 0
        self.running: list[ActiveSequence] = []
        self.lending = False
        """Requests that have not begun wait for ``Scheduler.lend`` instead of being admitted."""
        self.beginnings = Beginnings()
        """Of the prompts that have begun here and whose KV others may find."""
        self.cached_tokens_total = 0
        """Of prompts."""
        self.prefill_tokens_total = 0
        self.preemptions_total = 0
        self.ended_requests_total = 0
        self.ended_tokens_total = 0
        self.flight: list[ScheduledBatch | PartialBatch] = []
        """What the engine was given to compute and has not computed yet, oldest first."""
        self.held_back: set[int] = set()
        """Requests, by ``id``, that are in no further step until something was done with them."""
        self.torn: set[int] = set()
        """Requests, by ``id``, that were preempted while a step of them was in flight: what lands of them is a token at
        most, and they do not begin again before."""
        self.landing_blocks = 0
        """That are free once what touches them has landed."""
        self._landing: dict[int, list[int]] = {}
        """By what touches them last, by ``id``."""
        self._next_id = 0

    @property
    def may_admit(self) -> bool:
        """Whether the head of ``waiting`` may run here."""
        return bool(self.waiting) and (not self.lending or self.waiting[0].stays)

    @property
    def spare_blocks(self) -> int:
        """Kept free at admission so that a new prefill is not the next decode's victim."""
        return self.config.num_blocks // 100 if self.running else 0

    def number(self, sequence: ActiveSequence) -> None:
        """Give it its place in the order of arrival."""
        sequence.id = self._next_id
        self._next_id += 1

    def wait(self, sequence: ActiveSequence) -> None:
        """Put it into ``waiting``, at its place."""
        bisect.insort(self.waiting, sequence, key=_arrival)
        self.waiting_tokens += sequence.num_tokens

    def stop_waiting(self, leaves: Callable[[ActiveSequence], bool]) -> list[ActiveSequence]:
        """Take those that leave out of ``waiting``, in order."""
        left = [s for s in self.waiting if leaves(s)]
        if left:
            self.waiting = deque(s for s in self.waiting if not leaves(s))
            self.waiting_tokens = sum(s.num_tokens for s in self.waiting)
        return left

    def run(self, sequence: ActiveSequence) -> None:
        """Put it into ``running``, at its place."""
        bisect.insort(self.running, sequence, key=_arrival)

    def take_token(self, sequence: ActiveSequence, token: Sampled) -> StreamPart:
        """The output of a token just sampled; an end forgets the sequence."""
        if sequence.guidance is not None and sequence.guidance.is_complete:
            return self.completed(sequence)  # this token can be none but an end, or none where a model has no ends
        if token.error is not None:
            return self.failed(sequence, token.error, doubted=token.error.code == Internal.code)
        sequence.append(token.token_id)
        reason = sequence.finish_reason(self.config.limit_tokens)
        if sequence.guidance is not None and reason is None:
            sequence.guidance.accept(token.token_id)
        output = sequence.emit(token.token_id, token.logprobs, reason)
        if reason is not None:
            self.ended_by_itself(sequence)
        return output

    def failed(self, sequence: ActiveSequence, error: ErrorInfo, *, doubted: bool = True) -> StreamPart:
        """It cannot be computed. ``doubted``: its KV may be why, and who tries it again is not to find that."""
        if self.cache is not None and doubted:
            self.cache.doubt(sequence.block_table)
        output = sequence.end("error", error)
        self.forget(sequence)
        return output

    def completed(self, sequence: ActiveSequence) -> StreamPart:
        """Its grammar leaves nothing to put out."""
        output = sequence.end("stop")
        self.ended_by_itself(sequence)
        return output

    def ended_by_itself(self, sequence: ActiveSequence) -> None:
        """Its tokens have ended it."""
        self.ended_requests_total += 1
        self.ended_tokens_total += len(sequence.output)
        self.forget(sequence)

    def forget(self, sequence: ActiveSequence) -> None:
        """It has ended, or is another instance's. Its blocks are freed unless it is reserved: then ``release`` does."""
        sequence.finished = True
        if sequence.guidance is not None:
            sequence.guidance.close()
        del self.accepted[sequence.key]
        if not sequence.reserved:
            self.free(sequence)

    def free(self, sequence: ActiveSequence) -> None:
        """Give its blocks back to the pool, at once or when what touches them has landed."""
        # A new list, not a cleared one: an engine may still hold the old table.
        blocks, sequence.block_table = sequence.block_table, []
        sequence.num_remembered = 0
        for batch in reversed(self.flight):
            if blocks and batch.touches(sequence):
                self._landing.setdefault(id(batch), []).extend(blocks)
                self.landing_blocks += len(blocks)
                return
        self.pool.free(blocks)

    def found(self, sequence: ActiveSequence) -> list[int]:
        """Blocks of an earlier context that begins as this one does; its last token is not among theirs, which is to be
        computed, and of one that is scored none."""
        cache = self.cache
        if cache is None or not sequence.cache_root or sequence.is_scoring:
            return []
        size = cache.block_size
        return cache.find(sequence.block_keys((sequence.num_tokens - 1) // size, size))

    def allot(self, sequence: ActiveSequence, found: Sequence[int]) -> None:
        """Give it the blocks of its known context, of which there must be enough: those ``found`` are its first."""
        if self.cache is not None:
            self.cache.hold(found)  # first: they are not to be given up for the rest
        rest = self.pool.allocate(self.pool.blocks_for(sequence.num_tokens) - len(found))
        sequence.block_table, sequence.num_remembered = [*found, *rest], len(found)

    def place(self, sequence: ActiveSequence) -> None:
        """It is about to run: what is found of its context is computed."""
        self.allot(sequence, self.found(sequence))
        sequence.num_computed = sequence.num_remembered * self.pool.block_size
        if not sequence.has_begun:
            sequence.num_cached = min(sequence.num_computed, len(sequence.prompt))
            self.cached_tokens_total += sequence.num_cached
            if sequence.cache_root:
                self.beginnings.count(sequence.cache_root, sequence.prompt)

    def remember(self, sequence: ActiveSequence) -> None:
        """What is computed of it lies there in every layer: its full blocks may be found."""
        cache = self.cache
        if cache is None or not sequence.cache_root:
            return
        first, size = sequence.num_remembered, cache.block_size
        last = sequence.num_computed // size
        if last > first:
            keys = sequence.block_keys(last, size)
            for block, key in zip(sequence.block_table[first:last], keys[first:], strict=True):
                cache.remember(block, key)
            sequence.num_remembered = last

    def flies(self, sequence: ActiveSequence) -> bool:
        """Whether anything in flight touches its blocks."""
        return any(batch.touches(sequence) for batch in self.flight)

    def landed(self, batch: ScheduledBatch | PartialBatch) -> None:
        """Nothing is read or written by it any more: what has waited for that is free."""
        self.flight = [other for other in self.flight if other is not batch]
        blocks = self._landing.pop(id(batch), None)
        if blocks is not None:
            self.landing_blocks -= len(blocks)
            self.pool.free(blocks)

    @property
    def landing(self) -> Collection[list[int]]:
        """The blocks of ``landing_blocks``."""
        return self._landing.values()


class _NoGuidance:
    """Of an engine that has none."""

    was_late = False
    is_ready = True
    is_complete = False

    def accept(self, token_id: int) -> None:
        """Whatever it is."""

    def close(self) -> None:
        """There is nothing."""


NO_GRAMMARS = UnsupportedParameter("the engine of this model keeps no output to a grammar", param="response_format")


NO_PROMPT_LOGPROBS = UnsupportedParameter(
    "prompt_logprobs: the engine of this model gives no log-probabilities of prompts", param="prompt_logprobs"
)


def guides_nobody(_: ActiveSequence) -> Guidance:
    """Of an engine that has no grammars."""
    return _NoGuidance()


def _arrival(sequence: ActiveSequence) -> int:
    return sequence.id
