from __future__ import annotations

import msgspec
import pytest

from services.pool.core import id_owners
from services.pool.core.id_owners import IdOwners
from shared.messages.registry import WorkerHeartbeat
from tests.records import heartbeat


def of(incarnation: str, worker_id: str = "w0", *, leaving: bool = False) -> WorkerHeartbeat:
    report = heartbeat(worker_id)
    worker = msgspec.structs.replace(report.worker, incarnation=incarnation)
    return msgspec.structs.replace(report, worker=worker, leaving=leaving)


def test_the_first_process_to_report_holds_the_id_and_another_one_is_its_rival() -> None:
    known = IdOwners()
    assert known.rival(of("a")) is None
    known.take(of("a"))
    assert known.rival(of("a")) is None
    assert known.rival(of("b")) == "a"
    assert known.rival(of("b", "w1")) is None


def test_once_the_holder_is_dead_the_next_one_holds_the_id() -> None:
    known = IdOwners()
    known.take(of("a"))
    known.take(of("b"))
    assert known.rival(of("b")) is None
    assert known.rival(of("a")) == "b"


def test_a_process_that_leaves_gives_up_its_own_id_only() -> None:
    known = IdOwners()
    known.take(of("a"))
    assert known.rival(of("b", leaving=True)) is None
    known.take(of("b", leaving=True))
    assert known.rival(of("c")) == "a"
    known.take(of("a", leaving=True))
    assert known.rival(of("c")) is None


def test_what_is_remembered_is_bounded_and_the_longest_silent_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_owners, "MAX_OWNERS", 3)
    known = IdOwners()
    for name in ("w0", "w1", "w2"):
        known.take(of("a", name))
    known.take(of("a", "w0"))
    known.take(of("a", "w3"))
    rivals = {name: known.rival(of("b", name)) for name in ("w0", "w1", "w2", "w3")}
    assert rivals == {"w0": "a", "w1": None, "w2": "a", "w3": "a"}
