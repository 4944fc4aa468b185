"""Whose step is next beside a pair's batches."""

from __future__ import annotations

from services.worker.core.scheduling.scheduler import Scheduler
from services.worker.core.scheduling.turns import StepTurns
from tests.services.worker.core.scheduling.harness import config, request, step


def test_layers_come_first_but_for_decodes_that_have_waited() -> None:
    scheduler = Scheduler(config())
    turns = StepTurns(scheduler)
    scheduler.add(request("a"))
    assert not turns.is_own(0.1, 5.0), "a prompt can wait"
    step(scheduler)
    assert turns.is_own(0.1, 5.0)
    turns.stepped(5.0)
    assert not turns.is_own(0.1, 5.05)
    assert turns.is_own(0.1, 5.2)
