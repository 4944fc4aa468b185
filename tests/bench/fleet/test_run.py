"""The whole measurement, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fleet.judge import same_texts
from bench.fleet.plan import Setting
from bench.fleet.run import measure


@pytest.mark.stack
async def test_models_take_turns_on_shared_workers_and_answer_as_on_workers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLITZ_LEASE_S", "10")  # a worker taken for dead would be one more load
    setting = Setting(models=3, workers=2, seconds=3.0, per_s=6.0, rotate_s=1.0, burst=6)
    results = await measure(setting, ("shared", "dedicated"), tmp_path, say=lambda _: None)
    shared, dedicated = results
    assert [r.document()["failed"] for r in results] == [0, 0]
    assert same_texts(results)
    assert shared.host_copies_max == 1
    assert 0 < shared.gpu_seconds <= 2 * shared.seconds * 1.05
    assert dedicated.document()["loads"] == 3
