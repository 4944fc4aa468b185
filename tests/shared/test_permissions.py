"""The table of who may do what, against the code that does it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import subjects
from shared.permissions import KINDS, TABLE, USERS, grant, inbox_prefix, user_names, user_of

SERVICES = Path(__file__).parents[2] / "services"
WITH_OPERATIONS = {"pool": subjects.POOL_OPERATIONS, "planner": subjects.PLANNER_OPERATIONS}


SENDS = {"publish", "request", "publish_event", "refuse_if_held", "_say"}
RECEIVES = {"subscribe", "respond", "subscribe_events", "hold"}


HELPERS = {"subscribe_load": (subjects.load, subjects.host_load)}
"""What functions of ``shared`` listen to on behalf of their callers."""


def calls(kind: str) -> Iterator[ast.Call]:
    for file in (SERVICES / kind).rglob("*.py"):
        yield from (n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.Call))


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def builds_subject(node: ast.expr) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "subjects"):
        return False
    # Not what only looks at a name.
    return bool(inspect.signature(getattr(subjects, node.func.attr)).return_annotation == "str")


def given(act: str, kind: str, build: ast.Call) -> bool:
    """Whether the table has this subject for this service; of operations that are not written out, any."""
    kinds = {"sends": lambda row: row.senders, "receives": lambda row: row.receivers}
    kinds["uses"] = lambda row: (*row.senders, *row.receivers)
    rows = [row for row in TABLE if row.build.__name__ == name_of(build) and kind in kinds[act](row)]
    operation = build.args[0] if build.args else None
    if name_of(build) in WITH_OPERATIONS and isinstance(operation, ast.Constant):
        rows = [row for row in rows if row.subject == row.build(operation.value)]
    return bool(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_uses_no_subject_that_the_table_does_not_give_it(kind: str) -> None:
    found = 0
    for call in calls(kind):
        if builds_subject(call):
            found += 1
            assert given("uses", kind, call), f"{kind} uses {ast.unparse(call)}"
        act = "sends" if name_of(call) in SENDS else "receives" if name_of(call) in RECEIVES else None
        for build_shared in HELPERS.get(name_of(call), ()):
            heard = next(row for row in TABLE if row.build is build_shared)
            assert kind in heard.receivers, f"{kind}: {ast.unparse(call)}"
        for build in call.args:
            if act is not None and builds_subject(build):
                assert isinstance(build, ast.Call)
                assert given(act, kind, build), f"{kind} {act}: {ast.unparse(call)}"
    assert found >= 3, "the search finds nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_no_permission_has_a_wildcard_that_reaches_another_kinds_subjects(kind: str) -> None:
    rights = grant(kind)
    assert inbox_prefix(kind) + ".>" in rights.subscribe
    for pattern in (*rights.publish, *rights.subscribe):
        if ">" in pattern:
            assert pattern == inbox_prefix(kind) + ".>"
        assert not pattern.startswith("*")


def test_each_user_has_two_names_that_are_nobody_elses() -> None:
    names = [name for user in USERS for name in user_names(user)]
    assert len(set(names)) == 2 * len(USERS)
    assert {name: user_of(name) for name in names} == {name: user for user in USERS for name in user_names(user)}
    assert [user_of(name) for name in ("", "gateway-3", "somebody")] == [None] * 3
