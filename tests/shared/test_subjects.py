from __future__ import annotations

from collections.abc import Callable

import pytest

from shared import subjects
from tests.shared.bus.memory import matches

FIXED = (
    subjects.gateway_heartbeat, subjects.load, subjects.queue, subjects.demand,
    subjects.scale_plans, subjects.drain_plans, subjects.progress, subjects.route_changes,
    subjects.scale_records,
)  # fmt: skip
NAMED = (
    subjects.tokens, subjects.worker_submit, subjects.worker_cancel, subjects.worker_ack, subjects.worker_resend,
    subjects.worker_plans,
)  # fmt: skip
OPERATIONS = {subjects.pool: subjects.POOL_OPERATIONS, subjects.planner: subjects.PLANNER_OPERATIONS}


def test_no_two_subjects_are_equal_and_all_carry_the_version() -> None:
    every = [build() for build in FIXED] + [build("heartbeat") for build in NAMED]
    every += [build(operation) for build, operations in OPERATIONS.items() for operation in operations]
    assert len(set(every)) == len(every)
    assert all(subject.startswith("blitz.v1.") for subject in every)


@pytest.mark.parametrize("build", [*NAMED, *OPERATIONS])
@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "a b", "a\r\nPUB x", "ä"])
def test_a_name_that_would_change_the_subject_is_refused(build: Callable[[str], str], name: str) -> None:
    with pytest.raises(ValueError, match="subject"):
        build(name)


@pytest.mark.parametrize("build", OPERATIONS)
def test_an_operation_that_is_in_no_list_has_no_subject(build: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match=r"no subject for the operation 'unheard_of': known are \w+"):
        build("unheard_of")


def test_the_plan_stream_takes_plans_and_nothing_else() -> None:
    taken = {build() for build in FIXED if matches(subjects.plans(), build())}
    assert taken == {subjects.scale_plans(), subjects.drain_plans()}


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.*.>", "a.b.c", True),
        ("a.*.>", "b.b.c", False),
    ],
)
def test_patterns_match_as_nats_does(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected
