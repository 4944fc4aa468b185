"""Requests whose tokens depend on their text and the place alone, and an engine that has them computed in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.worker.core.scheduling.schedule import PartialBatch, Sampled, ScheduledBatch
from services.worker.core.scheduling.scheduler import NO_FAILURES, Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.messages.common import ErrorInfo
from shared.messages.generation import DecodePlace, Grammar, SamplingParams, StreamPart

VOCABULARY = 7
SHARED_TOKENS = 5
"""With which all texts of one first letter begin."""


def text_of(name: str, position: int) -> str:
    """Of a request called ``TEXT:NUMBER`` or ``TEXT:NUMBER@SCOPE``; others have a text of their own."""
    text, colon, _ = name.partition(":")
    return text[0] if colon and position < SHARED_TOKENS else text


def token_at(name: str, position: int) -> int:
    """Computed again, it is the same."""
    name = text_of(name, position)
    return (31 * sum(map(ord, name)) + 5 * position + position * position // 3) % VOCABULARY


def placed_request(
    name: str,
    prompt_tokens: int = 5,
    max_tokens: int = 4,
    *,
    gateway: str = "g",
    stops: Iterable[int] = (),
    min_tokens: int = 0,
    alone: int = 0,
    decode_at: DecodePlace | None = None,
    cache_root: bytes = b"",
    grammar: Grammar | None = None,
) -> ActiveSequence:
    return ActiveSequence(
        request_id=name,
        attempt=0,
        gateway_id=gateway,
        prompt=tuple(token_at(name, i) for i in range(prompt_tokens)),
        params=SamplingParams(
            max_tokens=max_tokens, seed=1, min_tokens=min_tokens, stop_token_ids=tuple(stops), grammar=grammar
        ),
        alone_tokens=alone,
        decode_at=decode_at,
        cache_root=cache_root,
    )


def wanted(sequence: ActiveSequence, limit_tokens: int) -> tuple[list[int], str]:
    """All that a client is to get, and how that ends."""
    params, output = sequence.params, list[int]()
    while True:
        position = len(sequence.prompt) + len(output)
        output.append(token_at(sequence.request_id, position))
        if len(output) > params.min_tokens and output[-1] in params.stop_token_ids:
            return output, "stop"
        if len(output) >= params.max_tokens or position + 1 >= limit_tokens:
            return output, "length"


@dataclass(slots=True)
class Touched:
    """The blocks of a sequence as something in flight was given them."""

    sequence: ActiveSequence
    table: list[int]
    """The list itself, by which a later table of the same sequence is told from this one."""
    blocks: tuple[int, ...]


class Pipeline:
    """What is in flight of one scheduler, and what its KV blocks hold. All that it is given is looked at: whether it
    can be computed when its turn comes, and whether what it touches stays its own until then."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.batches: list[ScheduledBatch] = []
        self._touched: dict[int, list[Touched]] = {}
        """By what is in flight, by ``id``."""
        self._cells: dict[tuple[int, int], object] = {}
        """What was written last, by block and place in it: whose token, and what it stands behind."""

    def schedule(self) -> ScheduledBatch | None:
        table = self.scheduler.table
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        assert batch.slices
        limit_tokens = self.scheduler.config.limit_tokens
        assert len({id(p.sequence) for p in batch.slices}) == len(batch.slices), "in a batch twice"
        for piece in batch.slices:
            sequence = piece.sequence
            assert not sequence.finished
            assert not sequence.reserved
            assert id(sequence) not in table.held_back, "it is held back"
            assert len(batch.slices) == 1 or not sequence.alone, "it is to be alone"
            assert not sequence.alone or not self._touched, "it is to be alone"
            ahead = [p for b in self.batches for p in b.slices if p.sequence is sequence]
            start, known = sequence.num_computed, sequence.num_tokens
            if ahead:
                start, known = ahead[-1].start + ahead[-1].num_tokens, known + ahead[-1].sample
                ends = known >= limit_tokens or known - len(sequence.prompt) >= sequence.params.max_tokens
                assert not ends, "its end is known"
                assert not ahead[-1].sample or sequence.decode_at is None, "it is decoded elsewhere"
            assert piece.start == start, "it goes on where what is in flight ends"
            if sequence.is_guided:
                assert not ahead or not ahead[-1].sample, "its mask cannot be known"
                guidance = sequence.guidance
                assert guidance is not None
                ready = guidance.is_ready or (sequence.decodes and not guidance.was_late)
                assert ready or not piece.sample, "it waits for its mask"
            assert 0 < piece.num_tokens <= known - start
            assert piece.sample == (piece.start + piece.num_tokens == known)
        assert all(not batch.touches(s) for s in batch.preempted)
        self.batches.append(batch)
        self._fly(batch, [p.sequence for p in batch.slices])
        return batch

    def fly_partial(self, sequences: Iterable[ActiveSequence]) -> PartialBatch:
        """Some layers of these are computed beside the steps."""
        batch = PartialBatch(tuple(sequences))
        self.scheduler.table.flight.append(batch)
        self._fly(batch, batch.sequences)
        return batch

    def land_partial(self, batch: PartialBatch) -> None:
        del self._touched[id(batch)]
        self.scheduler.table.landed(batch)

    def land(
        self, failures: Mapping[int, ErrorInfo] = NO_FAILURES, row_errors: Mapping[int, ErrorInfo] = NO_FAILURES
    ) -> list[StreamPart]:
        """The oldest batch is computed, all but those of its slices that fail. What was made behind one that fails is
        dropped before."""
        if failures and len(self.batches) > 1:
            self.drop()
        batch = self.batches.pop(0)
        sampled = []
        for place, (piece, touched) in enumerate(zip(batch.slices, self._touched.pop(id(batch)), strict=True)):
            if place not in failures:
                self._compute(touched, piece.start, piece.num_tokens)
                if piece.sample:
                    end, guidance = piece.start + piece.num_tokens, piece.sequence.guidance
                    token = Sampled(token_at(piece.sequence.request_id, end), error=row_errors.get(place))
                    late = guidance is not None and not guidance.is_ready
                    sampled.append(Sampled(-1, is_late=True) if late else token)
        return self.scheduler.complete(batch, sampled, failures)

    def drop(self) -> None:
        """The newest batch is not computed."""
        newest = self.batches.pop()
        del self._touched[id(newest)]
        self.scheduler.drop(newest)

    def received(self, sequence: ActiveSequence, num_tokens: int) -> None:
        """The KV of its first tokens was computed outside of steps."""
        self._compute(Touched(sequence, sequence.block_table, tuple(sequence.block_table)), 0, num_tokens)

    def check(self) -> None:
        """What anything in flight touches is in nobody else's hands, and not free."""
        table, reservations = self.scheduler.table, self.scheduler.reservations
        assert [b for b in table.flight if isinstance(b, ScheduledBatch)] == self.batches
        assert len(table.flight) == len(self._touched)
        owners: dict[int, list[ActiveSequence | None]] = {}
        holders = {id(s): s for s in [*table.running, *reservations.for_prefill, *reservations.for_decode]}
        for sequence in holders.values():
            for block in sequence.block_table:
                owners.setdefault(block, []).append(sequence)
        for block in (b for blocks in table.landing for b in blocks):
            owners.setdefault(block, []).append(None)
        assert table.cache is not None or all(len(found) == 1 for found in owners.values()), "it has two owners"
        assert len(owners) == self.scheduler.pool.num_used
        for touched in (t for every in self._touched.values() for t in every):
            is_its = touched.sequence.block_table is touched.table
            for place, block in enumerate(touched.blocks):
                assert block in owners, "it is free while it is touched"
                owner = touched.sequence if is_its else None
                assert owner in owners[block], "it is another's while it is touched"
                assert not is_its or touched.table[place] == block

    def _fly(self, batch: ScheduledBatch | PartialBatch, sequences: Iterable[ActiveSequence]) -> None:
        self._touched[id(batch)] = [Touched(s, s.block_table, tuple(s.block_table)) for s in sequences]

    def _compute(self, touched: Touched, start: int, count: int) -> None:
        sequence, size = touched.sequence, self.scheduler.pool.block_size
        places = [(touched.blocks[i // size], i % size) for i in range(start + count)]
        for position, place in enumerate(places[:start]):
            assert self._cells.get(place) == _cell(sequence, position), "what it attends to is not there"
        for position, place in enumerate(places[start:], start):
            self._cells[place] = _cell(sequence, position)


def _cell(sequence: ActiveSequence, position: int) -> object:
    """What is computed there depends on no more than this, and is seen by no other scope."""
    whose = sequence.request_id.rpartition("@")[2] if sequence.cache_root else sequence.request_id
    return whose, tuple(sequence.tokens[: position + 1])
