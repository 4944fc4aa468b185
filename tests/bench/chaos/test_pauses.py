from __future__ import annotations

from typing import Any

import pytest

from bench.chaos import observer as observing
from bench.chaos.injected_fault import InjectedFault
from bench.chaos.judge import Outcome
from bench.chaos.load import Record
from bench.chaos.observer import Observer
from bench.chaos.pauses import Pause, Prefill, pauses
from bench.chaos.plan import How
from bench.chaos.question import Question
from shared.messages.common import Role
from shared.messages.generation import StreamPart, TokenBatch
from shared.messages.load import LoadReport
from tests.processes import INCARNATION

PREFILL = Prefill(((10, 0.1), (110, 1.1)))


class World:
    """An observer at a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_s = 0.0
        self.observer = Observer(max_running=2)
        self.faults: list[InjectedFault] = []
        monkeypatch.setattr(observing, "now_s", lambda: self.at_s)

    def load(
        self,
        at_s: float,
        worker: str,
        *,
        running: int = 0,
        queued: int = 0,
        state: str = "serving",
        role: Role = "colocated",
        load_s: float = 1.0,
        tokens: int = 0,
    ) -> None:
        self.at_s = at_s
        self.observer.on_load(
            LoadReport(
                worker_id=worker,
                incarnation=INCARNATION,
                instance_id=f"i-{worker}",
                model="demo",
                state=state,  # type: ignore[arg-type]
                role=role,
                queued_requests=queued,
                queued_tokens=0,
                running_requests=running,
                running_tokens=0,
                prefill_tokens_total=tokens,
                decode_tokens_total=0,
                busy_s_total=0.0,
                kv_blocks_total=1,
                kv_blocks_used=0,
                kv_block_tokens=16,
                load_s=load_s,
            )
        )

    def token(self, at_s: float, worker: str) -> None:
        self.at_s = at_s
        part = StreamPart(request_id="cmpl-1-0", attempt=0, offset=0, token_ids=(7,))
        self.observer.on_tokens(
            TokenBatch(worker_id=worker, incarnation=INCARNATION, instance_id=f"i-{worker}", parts=(part,))
        )

    def inject(self, at_s: float, member: str, *, how: How = "KILL", over_s: float | None = None) -> None:
        fault = InjectedFault(member, member.partition("-")[0], how, at_s, over_s if over_s is not None else at_s)
        self.faults.append(fault)
        self.observer.fault_injected(fault)

    def pauses(self, *times_s: float) -> tuple[Pause, ...]:
        record = Record(
            question=Question(0, (1,) * 8, 9, ()),
            model="demo",
            stream=True,
            gateway="gateway",
            sent_s=0.0,
            ended_s=times_s[-1] + 0.1,
            response_id="cmpl-1",
            token_times_s=times_s,
            outcome=Outcome("right"),
        )
        return pauses([record], self.faults, self.observer, PREFILL)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(monkeypatch)
    made.load(0.0, "worker-0")
    made.load(0.0, "worker-1")
    made.token(1.0, "worker-0")
    return made


def test_a_pause_is_from_the_last_token_before_to_the_first_elsewhere(world: World) -> None:
    world.inject(2.0, "worker-0")
    world.token(3.5, "worker-1")
    # The token of 2.01 was on its way.
    (pause,) = world.pauses(1.0, 1.9, 2.01, 3.51, 3.6)
    assert pause.seconds == pytest.approx(1.5)
    assert pause.recompute_s == pytest.approx(0.11)
    assert pause.had_seats
    assert pause.beside == ()


def test_a_worker_whose_vllm_is_killed_is_struck_itself(world: World) -> None:
    world.inject(2.0, "vllm_core-0")
    world.inject(2.1, "vllm_idle-1")
    world.token(3.5, "worker-1")
    (pause,) = world.pauses(1.0, 1.9, 3.51)
    assert pause.had_seats
    assert pause.beside == ("vllm_idle-1",)


def test_a_worker_that_does_not_know_yet_that_its_vllm_was_killed_has_no_seat(world: World) -> None:
    world.inject(2.0, "vllm_worker-1")
    world.load(2.6, "worker-1")
    world.inject(3.0, "worker-0")
    world.token(4.0, "worker-1")
    (pause,) = world.pauses(1.0, 2.9, 4.01)
    assert not pause.had_seats


def test_streams_elsewhere_and_those_without_a_token_do_not_pause(world: World) -> None:
    world.inject(2.0, "worker-1")
    assert world.pauses(1.0, 3.0) == ()
    world.inject(2.5, "worker-0")
    assert world.pauses(2.6, 3.0) == ()


def test_a_model_without_a_free_seat_elsewhere_is_told_apart(world: World) -> None:
    world.load(1.5, "worker-1", running=2)
    world.inject(2.0, "worker-0")
    world.token(3.5, "worker-1")
    (pause,) = world.pauses(1.0, 1.9, 3.51)
    assert not pause.had_seats


def test_seats_of_a_worker_that_is_struck_itself_do_not_count(world: World) -> None:
    world.inject(2.0, "worker-0")
    world.inject(2.5, "worker-1")
    # Sent before it died.
    world.load(2.6, "worker-1")
    world.load(3.2, "worker-0")
    world.token(3.5, "worker-0")
    first, second = *world.pauses(1.0, 1.9, 3.51), None
    assert not first.had_seats
    assert first.beside == ("worker-1",)
    assert second is None


@pytest.mark.parametrize(("state", "role"), [("draining", "colocated"), ("live", "colocated"), ("serving", "decode")])
def test_who_takes_no_requests_has_no_seat(world: World, state: str, role: Role) -> None:
    world.load(1.5, "worker-1", state=state, role=role)
    world.inject(2.0, "worker-0")
    world.token(3.5, "worker-1")
    (pause,) = world.pauses(1.0, 1.9, 3.51)
    assert not pause.had_seats


def test_who_drains_and_ends_its_streams_lets_none_pause(world: World) -> None:
    world.inject(2.0, "worker-0", how="TERM", over_s=5.0)
    assert world.pauses(1.0, 1.9, 2.4, 2.9) == ()
    world.token(4.5, "worker-1")
    (pause,) = world.pauses(1.0, 1.9, 2.4, 4.0, 4.51)
    assert pause.seconds == pytest.approx(1.6)


def test_a_stopped_worker_may_go_on_itself(world: World) -> None:
    world.inject(2.0, "worker-0", how="STOP", over_s=8.0)
    (pause,) = world.pauses(1.0, 1.9, 8.1, 8.2)
    assert pause.seconds == pytest.approx(6.2)


def test_computing_again_is_estimated_between_the_samples_and_beyond() -> None:
    prefill = Prefill.of([(110, 1.1), (10, 0.3), (10, 0.1)])
    assert prefill == PREFILL
    assert prefill.seconds(1) == pytest.approx(0.1)
    assert prefill.seconds(60) == pytest.approx(0.6)
    assert prefill.seconds(220) == pytest.approx(2.2)


def test_requests_are_at_a_gate_until_something_is_computed(world: World) -> None:
    def seen(**how: Any) -> bool:
        world.load(world.at_s + 0.1, "worker-2", load_s=0.0, **how)
        return world.observer.at_a_gate("worker-2")

    assert not world.observer.at_a_gate("worker-2")
    assert not seen()
    assert seen(queued=1)
    assert not seen(running=1, tokens=20), "its weights were there"
    world.load(world.at_s, "worker-2", queued=1)
    assert not world.observer.at_a_gate("worker-2")
    assert seen(queued=1)
    world.at_s += 1.0
    assert not world.observer.at_a_gate("worker-2"), "nobody has heard of it"
