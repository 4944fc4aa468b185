"""Slots and blocks of requests whose KV is computed, received or sent outside of the scheduler's steps.

- *Reserved for prefill* (``reserve``): the context is computed outside of steps, or by another instance. The request
  may be one of this scheduler's own that was lent, or another instance's so far. It ends with ``adopt``,
  ``compute_here`` or ``release``.
- *Held for decode*: the context is computed, a token behind it is known, and the request is not decoded here now.
  Either another instance is to decode it (``decode_at``, or it was decoded here and moves: ``hold_to_move``):
  ``decode_here`` or ``release_to_decoder`` ends that. Or KV of its first layers, which ran elsewhere, is still on its
  way: ``kv_arrived`` or ``kv_lost`` ends that.

Both have a slot and blocks, which stay theirs when the request ends, since a transfer may be reading or writing the
blocks: ``release`` frees them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from services.worker.core.scheduling.request_table import RequestTable
from services.worker.core.scheduling.schedule import Sampled
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import Conflict
from shared.messages.generation import StreamPart


class Reservations:
    """Of one scheduler."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._for_prefill: dict[int, ActiveSequence] = {}
        """By identity: another instance's request may have the key of one that is here."""
        self._for_decode: dict[int, ActiveSequence] = {}
        """By identity."""
        self._prefilled: list[tuple[ActiveSequence, Sampled]] = []
        self._incomplete: dict[int, Sampled] = {}
        """First tokens of held requests whose KV is on its way, and which another instance is to decode then."""

    @property
    def for_prefill(self) -> Collection[ActiveSequence]:
        return self._for_prefill.values()

    @property
    def for_decode(self) -> Collection[ActiveSequence]:
        return self._for_decode.values()

    @property
    def has_prefilled(self) -> bool:
        """Whether there are requests for ``take_prefilled``."""
        return bool(self._prefilled)

    @property
    def free_slots(self) -> int:
        """Sequences that could be admitted, or reserved, beside those that are."""
        table = self._table
        return table.config.max_num_sequences - len(table.running) - len(self._for_prefill) - len(self._for_decode)

    def fits(self, lengths: Sequence[int], *, spare_blocks: int = 0) -> bool:
        """Whether contexts of so many tokens could be reserved now. Each running request keeps a block to grow into,
        all together at least ``spare_blocks``, and what was preempted comes first."""
        table = self._table
        if (table.waiting and table.waiting[0].has_begun) or self.free_slots < len(lengths):
            return False
        spare_blocks = max(spare_blocks, len(table.running))
        return table.pool.can_allocate(sum(map(table.pool.blocks_for, lengths)) + spare_blocks)

    def reserve(
        self, sequences: Sequence[ActiveSequence], *, behind_waiting: bool = False, remembered: bool = False
    ) -> bool:
        """Slots and blocks for contexts that are computed outside of steps, for all or, with False, for none.

        Requests that are another instance's so far get their place in the order of arrival here. ``behind_waiting``:
        what waits here to be computed keeps a slot and what it takes to admit the first of it, or it would never begin
        where others bring as much as ends. ``remembered``: what the cache has of them is computed, and nobody is to
        write it (``num_remembered`` blocks).
        """
        table = self._table
        first = [table.waiting[0].num_tokens] if behind_waiting and table.may_admit else []
        spare_blocks = table.spare_blocks if first else 0
        if not self.fits([*first, *(s.num_tokens for s in sequences)], spare_blocks=spare_blocks):
            return False
        for sequence in sequences:
            if sequence.id < 0:
                table.number(sequence)
            table.allot(sequence, table.found(sequence) if remembered else ())
            sequence.reserved = True
            self._for_prefill[id(sequence)] = sequence
        return True

    def extend(self, sequence: ActiveSequence, token_ids: Sequence[int]) -> bool:
        """A reserved context got longer where it is computed. False, and nothing changes, if blocks are lacking. Raises
        ``Conflict`` unless it is reserved for prefill."""
        if id(sequence) not in self._for_prefill:
            raise Conflict(f"attempt {sequence.attempt} of request {sequence.request_id} has no reservation here")
        pool = self._table.pool
        missing = pool.blocks_for(sequence.num_tokens + len(token_ids)) - len(sequence.block_table)
        if not pool.can_allocate(missing):
            return False
        for _ in range(missing):
            pool.append(sequence.block_table)
        for token_id in token_ids:
            sequence.append(token_id)
        return True

    def release(self, sequences: Iterable[ActiveSequence]) -> None:
        """Give reserved slots and blocks back."""
        for sequence in sequences:
            if sequence.reserved:
                self._drop(sequence)
                self._table.free(sequence)

    def adopt(
        self,
        sequence: ActiveSequence,
        token: Sampled,
        now_s: float = 0.0,
        *,
        computed_here: bool = True,
        kv_here: bool = True,
    ) -> StreamPart | None:
        """A reserved context was computed and its first token sampled: the request decodes here from now on.

        None if it has ended. ``computed_here``: its context counts as this instance's work. Without ``kv_here``
        its blocks are still written, whether it has ended or not: ``kv_arrived`` or ``kv_lost`` must follow. Raises
        ``Conflict`` for an attempt that is here already.
        """
        table = self._table
        if sequence.finished:
            if kv_here:
                self.release([sequence])
            return None
        if table.accepted.setdefault(sequence.key, sequence) is not sequence:
            raise Conflict(f"attempt {sequence.attempt} of request {sequence.request_id} is here already")
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = now_s
        sequence.num_computed = sequence.num_tokens
        if computed_here:
            table.prefill_tokens_total += sequence.num_tokens
        if kv_here:
            self._drop(sequence)
            output = table.take_token(sequence, token)
            if sequence.decode_at is not None:
                self.hold_for_decode(sequence, token)
            elif not sequence.finished:
                table.run(sequence)
            return output
        output = table.take_token(sequence, token)
        if sequence.decode_at is not None:
            self._incomplete[id(sequence)] = token
        if not sequence.finished:
            self._for_prefill.pop(id(sequence), None)
            self._hold(sequence)
        return output

    def compute_here(self, sequences: Iterable[ActiveSequence]) -> None:
        """Reserved contexts could not be computed outside of steps: they give their slots and blocks back, and wait at
        their places to be computed in steps. Ended ones are released, adopted ones left alone."""
        for sequence in [s for s in sequences if s.reserved]:
            self.release([sequence])
            if not sequence.finished:
                self._table.accepted[sequence.key] = sequence
                self._table.wait(sequence)

    def kv_arrived(self, sequences: Iterable[ActiveSequence]) -> None:
        """The KV of adopted contexts is whole: those that have not ended decode, here or where they are to."""
        for sequence in sequences:
            token = self._incomplete.pop(id(sequence), None)
            if token is None or sequence.finished:
                self.decode_here(sequence)
            else:
                self._prefilled.append((sequence, token))

    def kv_lost(self, sequences: Sequence[ActiveSequence]) -> None:
        """The KV of adopted contexts will not be whole: those that have not ended are computed again, with what they
        have put out."""
        for sequence in sequences:
            self._incomplete.pop(id(sequence), None)
            if not sequence.finished:
                sequence.num_computed = 0
                self._table.preemptions_total += 1
        self.compute_here(sequences)

    def hold_for_decode(self, sequence: ActiveSequence, token: Sampled) -> None:
        """The first token of a request that another instance is to decode: unless it has ended with it, it keeps its
        slot and blocks, and is not decoded."""
        self._prefilled.append((sequence, token))
        if not sequence.finished:
            self._hold(sequence)

    def hold_to_move(self, sequence: ActiveSequence) -> bool:
        """A request that is decoded here is to be decoded elsewhere: it keeps its slot and blocks, and is in no step.
        False if it is not decoded here now: it has ended, was preempted, or its context is not computed. Not to be
        called while anything in flight touches it."""
        running = self._table.running
        if sequence.reserved or not sequence.decodes or sequence not in running:
            return False
        running.remove(sequence)
        self._hold(sequence)
        return True

    def take_prefilled(self) -> list[tuple[ActiveSequence, Sampled]]:
        """Requests that are to be decoded elsewhere, with the first tokens that they got since the last call.

        Those that have not ended with it are held.
        """
        prefilled, self._prefilled = self._prefilled, []
        return prefilled

    def decode_here(self, sequence: ActiveSequence) -> None:
        """A held request is decoded here after all, unless it has ended: then its blocks are freed."""
        if sequence.finished:
            self.release([sequence])
        elif id(sequence) in self._for_decode:
            self._drop(sequence)
            sequence.decode_at = None
            self._table.run(sequence)

    def release_to_decoder(self, sequence: ActiveSequence) -> None:
        """A held request is decoded elsewhere now: it leaves without a word, if it has not ended."""
        if not sequence.finished:
            self._table.forget(sequence)
        self.release([sequence])

    def release_held(self, sequence: ActiveSequence) -> None:
        """Free what a request holds that has ended while it was held for decode, if it was."""
        if id(sequence) in self._for_decode:
            self.release([sequence])

    def token_of(self, sequence: ActiveSequence) -> Sampled | None:
        """The first token of an adopted context that another instance is to decode, and whose KV is not whole here."""
        return self._incomplete.get(id(sequence))

    def leave(self, sequence: ActiveSequence) -> None:
        """One of those is decoded elsewhere now, and got its KV there: it leaves without a word, if it has not ended.
        Its blocks are kept until ``kv_arrived`` or ``kv_lost``."""
        self._incomplete.pop(id(sequence), None)
        if not sequence.finished:
            self._table.forget(sequence)

    def stay(self, sequence: ActiveSequence) -> None:
        """A reserved or adopted context is decoded here, not elsewhere, once its KV is whole."""
        self._incomplete.pop(id(sequence), None)
        sequence.decode_at = None

    def _hold(self, sequence: ActiveSequence) -> None:
        sequence.reserved = True
        self._for_decode[id(sequence)] = sequence

    def _drop(self, sequence: ActiveSequence) -> None:
        sequence.reserved = False
        self._for_prefill.pop(id(sequence), None)
        self._for_decode.pop(id(sequence), None)
