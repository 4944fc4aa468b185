from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest

from shared import subjects
from shared.subjects import Process
from tests.shared.bus.memory import matches

PARAMETERS = {
    name: {p.name: p.annotation for p in inspect.signature(build).parameters.values()}
    for name, build in vars(subjects).items()
    if inspect.isfunction(build) and build.__module__ == subjects.__name__ and not name.startswith(("_", "is_"))
}
FIXED = [getattr(subjects, name) for name, takes in PARAMETERS.items() if not takes]
OF_PROCESSES = [getattr(subjects, name) for name, takes in PARAMETERS.items() if "Process" in takes.values()]
HOLDERS = [subjects.worker_holder, subjects.gateway_holder]
OPERATIONS = {subjects.pool: subjects.POOL_OPERATIONS, subjects.planner: subjects.PLANNER_OPERATIONS}


def subjects_of(process: Process) -> Iterator[str]:
    """All that are one process's, of whatever kind."""
    for build in OF_PROCESSES:
        others = list(PARAMETERS[build.__name__])[1:]
        yield build(process, *["offer" for _ in others])
    for build in HOLDERS:
        yield build(*process)


def test_every_subject_is_of_a_process_of_an_operation_or_of_all() -> None:
    known = {build.__name__ for build in (*FIXED, *OF_PROCESSES, *HOLDERS, *OPERATIONS)}
    assert known == set(PARAMETERS), "a subject that names a process takes all of its name"
    assert {name for name in PARAMETERS if name.startswith("worker_")} <= {
        build.__name__ for build in (*OF_PROCESSES, *HOLDERS)
    }


def test_the_incarnation_is_in_every_subject_of_a_process() -> None:
    first, second = (list(subjects_of(Process("w", incarnation))) for incarnation in ("one", "two"))
    assert len(first) == len(OF_PROCESSES) + len(HOLDERS) > 20
    for old, new in zip(first, second, strict=True):
        tokens = old.split(".")
        assert tokens[tokens.index("w") + 1] == "one", old
        assert not matches(old, new)
        assert [token if token != "one" else "two" for token in tokens] == new.split(".")


def test_no_two_subjects_are_equal_and_all_carry_the_version() -> None:
    every = [build() for build in FIXED] + [*subjects_of(Process("heartbeat", "1"))]
    every += [build("w") for build in HOLDERS]
    every += [build(operation) for build, operations in OPERATIONS.items() for operation in operations]
    assert len(set(every)) == len(every)
    assert all(subject.startswith("blitz.v1.") for subject in every)


@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "a b", "a\r\nPUB x", "ä"])
def test_a_name_that_would_change_the_subject_is_refused(name: str) -> None:
    for build in OF_PROCESSES:
        others = ["offer" for _ in list(PARAMETERS[build.__name__])[1:]]
        for process in (Process(name, "1"), Process("w", name)):
            with pytest.raises(ValueError, match="subject"):
                build(process, *others)
    for build in (*HOLDERS, *OPERATIONS):
        with pytest.raises(ValueError, match="subject"):
            build(name)


@pytest.mark.parametrize("build", OPERATIONS)
def test_an_operation_that_is_in_no_list_has_no_subject(build: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match=r"no subject for the operation 'unheard_of': known are \w+"):
        build("unheard_of")


def test_the_plan_stream_takes_plans_and_nothing_else() -> None:
    taken = {build() for build in FIXED if matches(subjects.plans(), build())}
    assert taken == {
        subjects.plans(), subjects.scale_plans(), subjects.drain_plans(), subjects.mutate_plans(),
        subjects.zigzag_assignments(),
    }  # fmt: skip


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
