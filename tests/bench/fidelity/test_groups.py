from __future__ import annotations

from typing import Any

import pytest

from bench.evaluate.windows import Window
from bench.fidelity.condensed import Condensed
from bench.fidelity.groups import groups, labels
from tests.bench.evaluate.runs import plan, run

LATE_S = 0.02
"""Of timers, in a void run."""


def condensed(system: str = "blitz", *, late_s: float = 0.001, **changes: Any) -> Condensed:
    return Condensed.of(run(plan(system, **changes), late_s=late_s))


def test_repetitions_of_a_system_in_a_window_belong_together() -> None:
    found = groups([condensed(system, repetition=r) for r in (1, 0) for system in ("sllm", "blitz")])
    assert [group.plan.system for group in found] == ["blitz", "sllm"]
    assert [[one.plan.repetition for one in group.runs] for group in found] == [[0, 1], [0, 1]]
    assert labels(found) == ["blitz, 10 s", "sllm, 10 s"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale_rate": 0.51234}, "0.5123 times the rate"),
        ({"model": "mistral-24b"}, "mistral-24b"),
        ({"settings": {"BLITZ_MONITOR_DOWN_WINDOW_S": "60"}}, "kept for 60 s"),
        ({"seed": 7}, "seed 7"),
        ({"workers": 4}, "4 workers"),
        ({"window": Window(10.0, 60.0)}, "window of 60 s"),
        ({"window": Window(20.0, 30.0)}, "20 s"),
        ({"instances": {"prefill": 6, "decode": 2}}, "6 prefill, 2 decode"),
        ({"digest": "other"}, ""),
    ],
)
def test_runs_that_differ_in_anything_else_do_not(changes: dict[str, Any], said: str) -> None:
    found = groups([condensed(), condensed(repetition=1), condensed(**changes)])
    assert sorted(len(group.runs) for group in found) == [1, 2]
    assert sum(said in label for label in labels(found)) == (1 if said else 2)


def test_the_order_of_settings_does_not_matter() -> None:
    settings = plan().settings
    turned = dict(reversed(settings.items()))
    assert list(turned) != list(settings)
    assert len(groups([condensed(), condensed(settings=turned, repetition=1)])) == 1


def test_void_runs_do_not_count_and_say_why() -> None:
    (found,) = groups([condensed(repetition=r, late_s=LATE_S if r == 1 else 0.001) for r in range(3)])
    assert [one.plan.repetition for one in found.runs] == [0, 2]
    assert [one.plan.repetition for one in found.void] == [1]
    assert found.counts == "2 runs, 1 void"
    assert "timers were late: p99 20.0 ms" in found.why


def test_a_group_may_have_no_run_that_counts() -> None:
    (found,) = groups([condensed(late_s=LATE_S)])
    assert (found.runs, found.counts) == ((), "0 runs, 1 void")


def test_without_void_runs_there_is_no_reason() -> None:
    (found,) = groups([condensed()])
    assert (found.counts, found.why) == ("1 run", "")
