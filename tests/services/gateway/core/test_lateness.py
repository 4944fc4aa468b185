from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.gateway.core.lateness import MAX_FAILURES, Known, is_hopeless, no_room_timeout_s, why_late
from services.gateway.core.routes import ModelRoutes
from shared.messages.operations import RefusedLoad, ScaleRecords, Unplanned
from tests.services.gateway.checkpoint import model_record
from tests.services.gateway.core.routing import route

ROUTES = {name: route(name) for name in ("a", "b")}
FULL = ModelRoutes(model_record(Path("/m"), "m"), ROUTES)
NONE = ModelRoutes(FULL.record, {})
NOTHING = ScaleRecords(records=())
SHORT = Unplanned(model="m", role="colocated", wanted=3, why="no worker is spare", for_s=1.0)


def said(**changes: bool) -> ScaleRecords:
    return ScaleRecords(records=(), unplanned=(msgspec.structs.replace(SHORT, **changes),))


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (Known(FULL, True, NOTHING), "its instances (2) are full"),
        (Known(NONE, True, NOTHING), "it has none that serves yet"),
        (Known(None, True, NOTHING), "it has none that serves yet"),
        (Known(NONE, False, NOTHING), "it has none, and no worker is registered"),
        (Known(NONE, True, None), "it has none, and no planner answers"),
        (
            Known(FULL, True, ScaleRecords(records=(), unplanned=(SHORT,))),
            "its instances (2) are full, and more could not be started: no worker is spare (wanted: 3 colocated)",
        ),
    ],
)
def test_the_reason_is_what_is_known(known: Known, why: str) -> None:
    assert why_late("m", known) == why


def test_however_many_workers_failed_few_are_named() -> None:
    refused = tuple(RefusedLoad(worker_id=f"w{i}", model="m", why="bad", for_s=1.0, failures=1) for i in range(9))
    why = why_late("m", Known(NONE, True, ScaleRecords(records=(), refused=refused)))
    assert why.count("failed to load it") == MAX_FAILURES


@pytest.mark.parametrize(("own_s", "timeout_s"), [(None, 10.0), (0.0, 0.0), (60.0, 60.0)])
def test_a_model_waits_for_room_as_long_as_it_says_or_else_as_the_gateway_does(
    own_s: float | None, timeout_s: float
) -> None:
    record = msgspec.structs.replace(NONE.record, no_room_timeout_s=own_s)
    assert no_room_timeout_s(ModelRoutes(record, {}), 10.0) == timeout_s
    assert no_room_timeout_s(None, 10.0) == 10.0


def test_without_patience_what_the_planner_says_first_is_enough() -> None:
    refused = msgspec.structs.replace(SHORT, for_s=0.0)
    known = Known(NONE, True, ScaleRecords(records=(), unplanned=(refused,)))
    assert is_hopeless("m", known, 0.0)
    assert not is_hopeless("m", known, 0.1)
    for harmless in (NOTHING, None, said(coming=True), said(undecided=True)):
        assert not is_hopeless("m", Known(NONE, True, harmless), 0.0)
