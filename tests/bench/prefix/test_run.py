"""The whole measurement, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.prefix.run import Setting, measure


@pytest.mark.stack
@pytest.mark.ucx
async def test_every_request_is_answered_and_a_cache_finds_what_was_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLITZ_LEASE_S", "10")
    setting = Setting(("turns",), ("none", "affinity"), seeds=1, seconds=6.0, calibrated_s=4.0)
    sustained, runs = await measure(setting, tmp_path, say=lambda _: None)
    assert sustained["turns"] > 0
    none, affinity = runs
    assert [run.errors for run in runs] == [[], []]
    assert [len(run.lasting) for run in runs] == [3, 3]
    assert len(none.answers) == len(affinity.answers) >= 2
    found = [
        sum(one.streamed.usage.cached_tokens for one in run.answers if one.streamed.usage is not None)
        for run in (none, affinity)
    ]
    assert found[0] == 0
    assert found[1] > 0
    assert all(sum(run.computed.values()) > 0 and run.scaled_s > 0 for run in runs)
