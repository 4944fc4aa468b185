"""Requests whose output is kept to a grammar: when their rows are computed, and what ends them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from services.worker.core.scheduling.guidance import Guidance
from services.worker.core.scheduling.schedule import Sampled, ScheduledBatch
from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.sequence import ActiveSequence
from shared.errors import UnsupportedParameter
from shared.messages.generation import Grammar
from tests.services.worker.core.scheduling.harness import config
from tests.services.worker.core.scheduling.pipeline import placed_request, token_at
from tests.services.worker.core.scheduling.test_two_in_flight_machine import TwoInFlight

GRAMMAR = Grammar(kind="regex", text="x")


class PlayedGuidance:
    """Its masks come when they are told to. Complete with so many tokens."""

    def __init__(self, sequence: ActiveSequence, *, complete_at: int = -1, ready: bool = False) -> None:
        self.sequence = sequence
        self.was_late = False
        self.is_ready = ready
        self.stays_ready = ready
        self.taken = list(sequence.output)
        self.complete_at = complete_at

    @property
    def is_complete(self) -> bool:
        return self.is_ready and len(self.taken) == self.complete_at

    def close(self) -> None:
        assert self.sequence.finished

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)
        assert self.taken == self.sequence.output, "each token once, in order"
        self.is_ready = self.stays_ready


class Guided(TwoInFlight):
    """All that may happen, every second request guided; masks come at any time."""

    all_come = False

    def __init__(self) -> None:
        super().__init__()
        self.guidances: list[PlayedGuidance] = []
        self.scheduler.table.guide = self.guide

    def guide(self, sequence: ActiveSequence) -> Guidance:
        guidance = PlayedGuidance(sequence, ready=self.all_come)
        self.guidances.append(guidance)
        return guidance

    def make(self, prompt_tokens: int, max_tokens: int, **changes: object) -> ActiveSequence:
        grammar = GRAMMAR if len(self.all) % 2 else None
        return super().make(prompt_tokens, max_tokens, grammar=grammar, **changes)

    @rule(which=st.integers(0, 7))
    def a_mask_comes(self, which: int) -> None:
        late = [guidance for guidance in self.guidances if not guidance.is_ready]
        if late:
            late[which % len(late)].is_ready = True

    def teardown(self) -> None:
        self.all_come = True
        for guidance in self.guidances:
            guidance.is_ready = guidance.stays_ready = True
        super().teardown()


TestGuided = Guided.TestCase
TestGuided.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


class Rig:
    def __init__(self, *guided: bool, complete_at: int = -1, **changes: int) -> None:
        self.scheduler = Scheduler(config(**changes))
        self.scheduler.table.guide = lambda s: self.guidance.setdefault(
            s.request_id, PlayedGuidance(s, complete_at=complete_at)
        )
        self.guidance: dict[str, PlayedGuidance] = {}
        for number, is_guided in enumerate(guided):
            request = placed_request(f"r{number}", 5, 4, grammar=GRAMMAR if is_guided else None)
            self.scheduler.add(request)

    def step(self, *late: str) -> list[tuple[str, int, int, bool]]:
        """What is computed; those are late."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        self.parts = self.scheduler.complete(
            batch, [self.sampled(piece, late) for piece in batch.slices if piece.sample]
        )
        self.scheduler.check()
        return [(p.sequence.request_id, p.start, p.num_tokens, p.sample) for p in batch.slices]

    def sampled(self, piece: ScheduledBatch, late: tuple[str, ...]) -> Sampled:
        name = piece.sequence.request_id
        if name in late:
            return Sampled(-1, is_late=True)
        return Sampled(token_at(name, piece.start + piece.num_tokens))


def test_a_prompt_is_computed_while_its_grammar_is_compiled_and_its_last_token_waits() -> None:
    rig = Rig(True)
    assert rig.step() == [("r0", 0, 4, False)]
    assert rig.step() == []
    rig.guidance["r0"].is_ready = True
    assert rig.step() == [("r0", 4, 1, True)]


def test_a_row_without_its_mask_sits_the_step_out_and_the_others_go_on() -> None:
    rig = Rig(False, True)
    rig.step()
    rig.guidance["r1"].is_ready = True
    rig.step()
    assert rig.step("r1") == [("r0", 6, 1, True), ("r1", 5, 1, True)]
    assert [part.request_id for part in rig.parts] == ["r0"]
    assert rig.step() == [("r0", 7, 1, True)], "it was late, and waits"
    rig.guidance["r1"].is_ready = True
    assert rig.step() == [("r1", 5, 1, True)]
    assert rig.parts[0].offset == 1


def test_a_complete_grammar_ends_the_answer_whatever_is_left() -> None:
    rig = Rig(True, complete_at=2)
    rig.step()
    rig.guidance["r0"].is_ready = True
    rig.step()
    rig.step()
    assert [part.finish_reason for part in rig.parts] == [None], "it is not known yet"
    rig.guidance["r0"].is_ready = True
    assert rig.step() == []
    (end,) = rig.scheduler.take_ended()
    assert (end.finish_reason, end.token_ids, end.offset) == ("stop", (), 2)
    assert (rig.scheduler.num_requests, rig.scheduler.table.ended_requests_total) == (0, 1)


def test_one_that_is_found_complete_in_a_step_ends_without_another_token() -> None:
    rig = Rig(True, complete_at=2)
    rig.step()
    rig.guidance["r0"].is_ready = True
    rig.step()
    rig.step()
    assert rig.guidance["r0"].was_late is False
    batch = rig.scheduler.schedule()
    assert batch is not None
    rig.guidance["r0"].is_ready = True
    (end,) = rig.scheduler.complete(batch, [Sampled(0)])
    assert (end.finish_reason, end.token_ids, end.offset) == ("stop", (), 2)
    assert rig.scheduler.num_requests == 0


def test_one_that_is_preempted_in_the_step_that_ends_it_is_not_computed_again() -> None:
    scheduler = Scheduler(config(num_blocks=4, block_size=4))
    older, alone = placed_request("older", 6, 50), placed_request("x", 4, 50, grammar=GRAMMAR, alone=100)
    guidance = PlayedGuidance(alone, ready=True)
    scheduler.table.guide = lambda _: guidance
    scheduler.add(older)
    scheduler.add(alone)
    for _ in range(20):
        full = scheduler.pool.num_used == scheduler.pool.num_blocks and older.num_computed == len(older.block_table) * 4
        if alone.block_table and full:
            guidance.complete_at = len(guidance.taken)
        batch = scheduler.schedule()
        assert batch is not None
        assert not any(s.finished for s in (*scheduler.table.waiting, *scheduler.table.running))
        if alone.finished:
            assert batch.preempted == (alone,)
            return
        pieces = [p for p in batch.slices if p.sample]
        scheduler.complete(batch, [Sampled(token_at(p.sequence.request_id, p.start + p.num_tokens)) for p in pieces])
    pytest.fail("it was never complete while the other needed its blocks")


def test_it_is_not_lent() -> None:
    rig = Rig(False, True)
    assert [s.request_id for s in rig.scheduler.lend()] == ["r0"]


def test_an_engine_without_grammars_refuses_it() -> None:
    scheduler = Scheduler(config())
    with pytest.raises(UnsupportedParameter, match="grammar"):
        scheduler.add(placed_request("r", grammar=GRAMMAR))
    assert scheduler.num_requests == 0
