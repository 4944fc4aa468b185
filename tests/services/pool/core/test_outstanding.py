from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.pool.core.copies import Key
from services.pool.core.loads import LoadLimits, Loads
from services.pool.core.outstanding import (
    AVOID_MAX_S,
    AVOID_S,
    DROP_TIMEOUT_S,
    GIVEN_UP_S,
    HOLD_TIMEOUT_S,
    LEAVING_S,
    LOAD_TIMEOUT_S,
    OutstandingSteps,
)
from shared.messages.registry import WorkerHeartbeat
from tests.records import model
from tests.services.pool.host_copies import copy_of, holding

M = model("m")
KEY = ("w0", M.model_hash)


@dataclass(frozen=True)
class Known:
    """What is outstanding with ``KEY``."""

    holds: dict[Key, int]
    drops: frozenset[Key]
    avoided: frozenset[Key]
    given_up: frozenset[Key]
    overdue: frozenset[Key]
    leaving: frozenset[str]


class Steps(OutstandingSteps):
    """Told, as in the pool, of the reports that say something new, and of the time."""

    def __init__(self) -> None:
        self.loads = Loads(LoadLimits())
        super().__init__(self.loads)
        self._reports: dict[str, WorkerHeartbeat] = {}

    def see(self, reports: Sequence[WorkerHeartbeat], now_s: float) -> tuple[str, ...]:
        """All reports that there are; why holds failed."""
        failures: tuple[str, ...] = ()
        for worker_id in self._reports.keys() - {r.worker.worker_id for r in reports}:
            self.gone(worker_id)
        for report in reports:
            if self._reports.get(report.worker.worker_id) != report:
                copies = {c.model_hash: c for c in report.host_copies}
                failures += self.observe(report.worker, copies, now_s)
        self._reports = {r.worker.worker_id: r for r in reports}
        return failures + self.expire(now_s)

    def now(self) -> Known:
        return Known(
            holds={(KEY[0], h): n for h, n in self.holds(KEY[0]).items()},
            drops=frozenset({KEY}) if self.is_dropped(KEY) else frozenset(),
            avoided=frozenset({KEY}) if self.is_avoided(KEY) else frozenset(),
            given_up=frozenset({KEY}) if self.is_given_up() else frozenset(),
            overdue=frozenset({KEY}) if self.is_overdue(KEY) else frozenset(),
            leaving=frozenset({KEY[0]}) if self.is_leaving(KEY[0]) else frozenset(),
        )

    def is_given_up(self) -> bool:
        return self.is_going(KEY) and not self.is_leaving(KEY[0])


def sent() -> Steps:
    steps = Steps()
    steps.hold_sent(KEY, 100, 0.0)
    return steps


def test_a_hold_is_outstanding_until_the_copy_is_ready() -> None:
    steps = sent()
    assert steps.see([holding("w0")], 1.0) == ()
    assert steps.now().holds == {KEY: 100}
    steps.see([holding("w0", [copy_of(M, "loading")])], 100.0)
    assert steps.now().holds == {KEY: 100}
    steps.see([holding("w0", [copy_of(M)])], 200.0)
    assert steps.now().holds == {}
    assert steps.now().avoided == frozenset()


def test_a_hold_that_is_never_reported_is_tried_elsewhere_for_a_while() -> None:
    steps = sent()
    [failure] = steps.see([holding("w0")], HOLD_TIMEOUT_S)
    assert "worker w0" in failure
    assert (steps.now().holds, steps.now().avoided) == ({}, frozenset({KEY}))
    steps.see([holding("w0")], HOLD_TIMEOUT_S + AVOID_S)
    assert steps.now().avoided == frozenset()


def test_a_copy_that_vanishes_while_it_loads_is_tried_elsewhere_at_once() -> None:
    steps = sent()
    steps.see([holding("w0", [copy_of(M, "loading")])], 0.5)
    [failure] = steps.see([holding("w0")], 1.0)
    assert "lost it while loading" in failure
    assert steps.now().avoided == {KEY}


def test_a_cached_copy_does_not_fulfil_a_hold() -> None:
    steps = sent()
    steps.see([holding("w0", [copy_of(M, cached=True)])], 1.0)
    assert steps.now().holds == {KEY: 100}


def test_a_hold_of_a_dead_worker_is_forgotten() -> None:
    steps = sent()
    steps.drop_sent(KEY, 0.0)
    steps.see([holding("w0")], 0.5)
    assert steps.see([], 1.0) == ()
    assert (steps.now().holds, steps.now().drops | steps.now().avoided) == ({}, frozenset())


def test_a_drop_is_outstanding_until_the_copy_is_gone_or_its_time_is_over() -> None:
    steps = Steps()
    steps.drop_sent(KEY, 0.0)
    steps.see([holding("w0", [copy_of(M)])], 1.0)
    assert steps.now().drops == {KEY}
    steps.see([holding("w0", [copy_of(M)])], DROP_TIMEOUT_S)
    assert steps.now().drops == frozenset()
    steps.drop_sent(KEY, 20.0)
    steps.see([holding("w0")], 20.5)
    assert not steps.drop_over(KEY)


def test_a_wish_to_be_rid_of_a_copy_lapses_unless_it_is_repeated() -> None:
    steps = Steps()
    steps.give_up(KEY, 0.0)
    steps.see([holding("w0", [copy_of(M)])], GIVEN_UP_S - 1)
    assert steps.now().given_up == {KEY}
    steps.see([holding("w0", [copy_of(M)])], GIVEN_UP_S)
    assert steps.now().given_up == frozenset()


def avoided_s(steps: Steps, since_s: float) -> float:
    """How long the worker is avoided from ``since_s`` on, in whole seconds."""
    now_s = since_s
    while KEY in steps.now().avoided:
        now_s += 1.0
        steps.see([holding("w0")], now_s)
    return now_s - since_s


def test_a_worker_that_fails_again_and_again_is_asked_more_and_more_rarely() -> None:
    steps = Steps()
    now_s, waits = 0.0, []
    for _ in range(7):
        steps.hold_failed(KEY, now_s)
        steps.see([holding("w0")], now_s)
        waits.append(avoided_s(steps, now_s))
        now_s += waits[-1]
    assert waits == [AVOID_S, 20.0, 40.0, 80.0, 160.0, AVOID_MAX_S, AVOID_MAX_S]
    steps.hold_sent(KEY, 100, now_s)
    steps.see([holding("w0", [copy_of(M)])], now_s)
    steps.hold_failed(KEY, now_s)
    assert avoided_s(steps, now_s) == AVOID_S, "a success ends the series"


def test_a_copy_that_loads_for_ever_does_not_count_and_its_worker_is_avoided() -> None:
    steps = sent()
    loading = [holding("w0", [copy_of(M, "loading")])]
    assert steps.see(loading, 1.0) == ()
    assert steps.see(loading, 1.0 + LOAD_TIMEOUT_S) == ()
    [failure] = steps.see(loading, 1.1 + LOAD_TIMEOUT_S)
    assert "worker w0" in failure
    assert (steps.now().holds, steps.now().avoided, steps.now().overdue) == ({}, frozenset({KEY}), frozenset({KEY}))
    assert steps.see(loading, 500.0) == (), "said once"
    steps.see([holding("w0", [copy_of(M)])], 501.0)
    assert steps.now().overdue == frozenset()


def test_a_large_copy_has_the_time_that_its_bytes_take_on_a_slow_link() -> None:
    steps = Steps()
    large = model("m", weights_bytes=25_000_000_000)  # 2000 s at 0.1 Gbit/s
    loading = [holding("w0", [copy_of(large, "loading")])]
    steps.see(loading, 0.0)
    assert steps.see(loading, 2000.0) == ()
    assert len(steps.see(loading, 2000.1)) == 1


def test_a_copy_that_is_loaded_anew_has_its_time_anew() -> None:
    steps = Steps()
    steps.see([holding("w0", [copy_of(M, "loading", serial=1)])], 0.0)
    steps.see([holding("w0", [copy_of(M, "loading", serial=2)])], 100.0)
    assert steps.see([holding("w0", [copy_of(M, "loading", serial=2)])], 200.0) == ()


def test_a_worker_leaves_until_it_is_silent_or_comes_back_as_another_process() -> None:
    steps = Steps()
    report = holding("w0")
    steps.leaves("w0", report.worker.incarnation, 0.0)
    steps.see([report], 1.0)
    assert steps.now().leaving == {"w0"}
    steps.see([report], LEAVING_S)
    assert steps.now().leaving == frozenset()
    steps.leaves("w0", report.worker.incarnation, 20.0)
    another = msgspec.structs.replace(report.worker, incarnation="a later process")
    steps.see([msgspec.structs.replace(report, worker=another)], 20.5)
    assert steps.now().leaving == frozenset()


def test_a_copy_loads_from_its_hold_until_it_is_ready_lost_refused_or_overdue() -> None:
    loading = [holding("w0", [copy_of(M, "loading")])]
    ready = sent()
    ready.see(loading, 1.0)
    assert len(ready.loads) == 1
    ready.see([holding("w0", [copy_of(M)])], 2.0)
    lost = sent()
    lost.see(loading, 1.0)
    lost.see([holding("w0")], 2.0)
    refused = sent()
    refused.hold_failed(KEY, 1.0)
    silent = sent()
    silent.see([holding("w0")], HOLD_TIMEOUT_S)
    overdue = sent()
    overdue.see(loading, 1.0)
    overdue.see(loading, 1.1 + LOAD_TIMEOUT_S)
    dead = sent()
    dead.see(loading, 1.0)
    dead.see([], 2.0)
    not_sent = sent()
    not_sent.hold_not_sent(KEY)
    assert [len(s.loads) for s in (ready, lost, refused, silent, overdue, dead, not_sent)] == [0] * 7
    assert not not_sent.is_avoided(KEY)


def test_a_copy_that_is_seen_to_load_counts_though_nobody_here_asked_for_it() -> None:
    steps = Steps()
    steps.see([holding("w0", [copy_of(M, "loading")])], 1.0)
    assert len(steps.loads) == 1
    steps.see([holding("w0", [copy_of(M, "loading", cached=True)])], 2.0)
    assert len(steps.loads) == 0


def test_nothing_is_kept_of_what_is_over() -> None:
    steps = sent()
    steps.drop_sent(("w0", "other"), 0.0)
    steps.give_up(("w0", "third"), 0.0)
    steps.see([holding("w0")], HOLD_TIMEOUT_S)
    for now_s in (20.0, 40.0, 400.0, 800.0):
        steps.see([holding("w0")], now_s)
    assert (steps.num_busy, steps.assigned_workers(M.model_hash), steps.avoided(M.model_hash)) == (0, [], [])
    assert steps.entries == {}
