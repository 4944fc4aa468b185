from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.core.lateness import MAX_FAILURES, Known, why_late
from services.gateway.core.routes import ModelRoutes
from shared.messages.operations import RefusedLoad, ScaleRecords, Unplanned
from tests.services.gateway.checkpoint import model_record
from tests.services.gateway.core.routing import route

ROUTES = {name: route(name) for name in ("a", "b")}
FULL = ModelRoutes(model_record(Path("/m"), "m"), ROUTES)
NONE = ModelRoutes(FULL.record, {})
NOTHING = ScaleRecords(records=())
SHORT = Unplanned(model="m", role="colocated", wanted=3, why="no worker is spare", for_s=1.0)


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
