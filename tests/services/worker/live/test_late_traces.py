"""Pairs of every kind (``traces``) whose engines compute later than they are called, in orders that differ by a seed.

Tokens are those of one engine, each request ends once, nothing is left, and no engine finds that somebody took for done
what was not. Where nothing is to go wrong, nothing does: what is not waited for is often only computed again.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from services.worker.device.late import LateOrder
from tests.services.worker.live.traces import CASES, LONG, SHORT, SOURCE, STATES, TARGET, Case, fail, trace

ORDERS: tuple[LateOrder, ...] = ("copies_first", "copies_last", "drawn")
NUM_SEEDS = int(os.environ.get("LATE_PAIR_SEEDS", "2"))
"""Of each case and order."""
LATE_CASES = CASES | {
    "target_engine_fails_later": replace(SHORT, when=STATES["cooperating"], act=fail(TARGET, later=True)),
    "target_engine_fails_later_dissolved": Case(
        layer_s=(0.004, 0.01), when=STATES["dissolved"], act=fail(TARGET, later=True)
    ),
    "source_engine_fails_later": replace(LONG, when=STATES["cooperating"], act=fail(SOURCE, later=True)),
    "source_engine_fails_later_kv_direct": replace(
        LONG, role="prefill", when=STATES["cooperating"], act=fail(SOURCE, later=True)
    ),
}


def goes_well(name: str) -> bool:
    case = CASES.get(name)
    return case is not None and case.when is None and not (case.lost_answers or case.lost_tensors or name == "declined")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LATE_CASES)
def test_a_pair_of_late_engines(name: str, order: LateOrder, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(1, NUM_SEEDS + 1):
        caplog.clear()
        report: Any = trace(LATE_CASES[name], seed, order)["report"]
        if goes_well(name):
            assert report["outcome"] == "dissolved"
            assert [record.getMessage() for record in caplog.records if record.levelname in {"WARNING", "ERROR"}] == []
