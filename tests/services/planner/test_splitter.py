"""Splits of a pair's batches on demand, published as gates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from services.planner import splitter
from services.planner.core.live.split import SplitResult, assign
from services.planner.core.rounds.settings import LiveSettings
from shared import subjects
from shared.errors import BadRequest, Conflict, NotFound, Unavailable
from shared.messages.common import LivePolicy
from shared.messages.progress import ProgressEvent
from shared.zigzag.playback import Job
from tests.moved_clock import MovedClock
from tests.services.planner.core.live.some_pairs import report
from tests.services.planner.live_rig import LiveRig, break_assignments, eventually_ended
from tests.services.planner.rig import running
from tests.wait_until import WAIT_S, eventually


@pytest.fixture
async def rig() -> AsyncIterator[LiveRig]:
    async with running(LiveRig()) as made:
        assert isinstance(made, LiveRig)
        yield made


UNEQUAL = (8.0, 1.0, 1.0, 1.0, 4.0)
"""Seconds per layer of batches that the rules alone do not share as well as a split does."""


async def test_gates_that_help_are_published_as_the_next_revision(rig: LiveRig) -> None:
    first = await rig.paired()
    await rig.split(first.pair_id, UNEQUAL)
    await eventually(lambda: len(rig.assignments()) == 2)
    second = rig.assignments()[1]
    assert second.revision == 1
    assert {gate.batch_id for gate in second.gates} == {f"b{i}" for i in range(len(UNEQUAL))}
    assert all(0 <= gate.num_layers <= rig.model.basics.num_layers for gate in second.gates)
    assert msgspec.structs.replace(second, revision=0, gates=()) == first
    await eventually(lambda: rig.splits("gates") == 1)
    assert rig.metrics.get_sample_value("blitz_planner_split_seconds_count") == 1
    await rig.split(first.pair_id, UNEQUAL)
    await eventually(lambda: len(rig.assignments()) == 3)
    assert rig.assignments()[2].revision == 2


async def test_a_split_counts_on_the_layers_that_are_there(rig: LiveRig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await rig.paired()
    seen: list[Sequence[float]] = []

    def remember(jobs: Sequence[Job], loaded_at: Sequence[float], **times: float) -> SplitResult:
        seen.append(loaded_at)
        return assign(jobs, loaded_at, time_limit_s=0)

    monkeypatch.setattr(splitter, "assign", remember)
    await rig.report(first.plan_id, "layer_ready", first.target.worker_id, first.target.instance_id, layer=0)
    await rig.split(first.pair_id, UNEQUAL)
    await eventually(lambda: seen)
    assert seen[0][0] == 0.0
    assert seen[0][1] > 0.0


async def test_equal_batches_get_no_gates(rig: LiveRig) -> None:
    first = await rig.paired()
    await rig.split(first.pair_id, (1.0, 1.0, 1.0))
    await eventually(lambda: rig.splits("no_gain") == 1)
    assert len(rig.assignments()) == 1


async def test_a_split_of_an_unknown_pair_is_refused(rig: LiveRig) -> None:
    await rig.paired()
    with pytest.raises(NotFound, match="plan-x-w9"):
        await rig.split("plan-x-w9", UNEQUAL)


async def test_a_split_of_a_pair_that_has_ended_is_refused(rig: LiveRig) -> None:
    first = await rig.paired()
    await rig.client.publish(subjects.live_reports(), report(first))
    with pytest.raises(Conflict, match="dissolved"):
        await rig.split(first.pair_id, UNEQUAL)


async def test_a_split_of_times_that_cannot_be_is_refused(rig: LiveRig) -> None:
    first = await rig.paired()
    with pytest.raises(BadRequest, match="layer"):
        await rig.split(first.pair_id, (1.0, -1.0))


@pytest.mark.parametrize("policy", ["best_effort", "overlap", "stop_the_world"])
async def test_the_baselines_get_no_gates(policy: LivePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr(splitter, "assign", lambda *args, **kwargs: looked.append(args))
    async with running(LiveRig(LiveSettings(policy=policy))) as rig:
        assert isinstance(rig, LiveRig)
        first = await rig.paired()
        await rig.split(first.pair_id, UNEQUAL)
    assert looked == []
    assert len(rig.assignments()) == 1


class HeldAssign:
    """``assign``, as slow as the test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.seen: list[int] = []
        monkeypatch.setattr(splitter, "assign", self)

    def __call__(self, jobs: Sequence[Job], loaded_at: Sequence[float], **times: float) -> SplitResult:
        self.seen.append(len(jobs))
        self.begun.release()
        assert self.go_on.acquire(timeout=WAIT_S)
        return assign(jobs, loaded_at, **times)  # type: ignore[arg-type]


async def test_only_the_newest_request_of_a_pair_is_answered(rig: LiveRig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await rig.paired()
    held = HeldAssign(monkeypatch)
    await rig.split(first.pair_id, (*UNEQUAL, 2.0, 7.0))
    await asyncio.to_thread(held.begun.acquire, timeout=WAIT_S)
    await rig.split(first.pair_id, (*UNEQUAL, 2.0))
    await rig.split(first.pair_id, UNEQUAL)
    held.go_on.release()
    held.go_on.release()
    await eventually(lambda: rig.splits("gates") == 1)
    assert held.seen == [len(UNEQUAL) + 2, len(UNEQUAL)]
    assert [len(a.gates) for a in rig.assignments()] == [0, len(UNEQUAL)]


@pytest.mark.parametrize("event", ["loaded", "serving"])
async def test_a_target_that_has_everything_gets_no_gates(
    rig: LiveRig, monkeypatch: pytest.MonkeyPatch, event: ProgressEvent
) -> None:
    first = await rig.paired()
    held = HeldAssign(monkeypatch)
    await rig.split(first.pair_id, UNEQUAL)
    await asyncio.to_thread(held.begun.acquire, timeout=WAIT_S)
    await rig.report(first.plan_id, event, first.target.worker_id, first.target.instance_id)
    held.go_on.release()
    await eventually(lambda: rig.splits("late") == 1)
    await rig.split(first.pair_id, UNEQUAL)
    await eventually(lambda: rig.splits("late") == 2)
    assert len(held.seen) == 1, "the second is not even computed"
    assert len(rig.assignments()) == 1


async def test_plans_are_made_while_a_split_is_computed(rig: LiveRig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await rig.paired()
    held = HeldAssign(monkeypatch)
    await rig.split(first.pair_id, UNEQUAL)
    await asyncio.to_thread(held.begun.acquire, timeout=WAIT_S)
    await rig.scale(4, live="never")
    assert len(rig.plans()) == 2
    held.go_on.release()
    await eventually(lambda: rig.splits("gates") == 1)


async def test_gates_for_a_pair_that_ended_meanwhile_are_not_published(
    rig: LiveRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await rig.paired()
    held = HeldAssign(monkeypatch)
    await rig.split(first.pair_id, UNEQUAL)
    await asyncio.to_thread(held.begun.acquire, timeout=WAIT_S)
    await rig.client.publish(subjects.live_reports(), report(first))
    await eventually_ended(rig, first.plan_id)
    held.go_on.release()
    await eventually(lambda: rig.splits("late") == 1)
    assert len(rig.assignments()) == 1


@pytest.mark.parametrize(("share", "outcome"), [(0.9, "gates"), (1.1, "late")])
async def test_gates_that_gain_less_than_was_lost_meanwhile_are_not_published(
    rig: LiveRig, monkeypatch: pytest.MonkeyPatch, moved_clock: MovedClock, share: float, outcome: str
) -> None:
    first = await rig.paired()

    def slow(jobs: Sequence[Job], loaded_at: Sequence[float], **times: float) -> SplitResult:
        found = assign(jobs, loaded_at, **times)  # type: ignore[arg-type]
        moved_clock.move(share * (found.free.mean - found.played.mean))
        return found

    monkeypatch.setattr(splitter, "assign", slow)
    await rig.split(first.pair_id, UNEQUAL)
    await eventually(lambda: rig.splits(outcome) == 1)
    assert len(rig.assignments()) == (2 if outcome == "gates" else 1)


@pytest.mark.parametrize("error", [Unavailable("away"), RuntimeError("the solver broke")])
async def test_a_split_that_goes_wrong_harms_nobody(
    rig: LiveRig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    first = await rig.paired()

    def breaks(*args: object, **times: float) -> SplitResult:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(splitter, "assign", breaks)
        await rig.split(first.pair_id, UNEQUAL)
        await eventually(lambda: rig.splits("failed") == 1)
    await rig.split(first.pair_id, UNEQUAL)
    await eventually(lambda: rig.splits("gates") == 1)


async def test_gates_that_cannot_be_published_are_only_missing(rig: LiveRig) -> None:
    first = await rig.paired()
    break_assignments(rig)
    await rig.split(first.pair_id, UNEQUAL)
    await eventually(lambda: rig.splits("failed") == 1)
    assert (await rig.record(first.plan_id)).live[0].outcome == "running"
