"""The whole measurement, small: what matters is where bytes came from, not how fast."""

from __future__ import annotations

import fcntl

import pytest

from bench.lab import system
from bench.lab.network import LOCK
from bench.lab.plan import PREFIX, Rate
from bench.scaleout.measure import measure

pytestmark = [
    pytest.mark.root,
    pytest.mark.stack,
    pytest.mark.ucx,
    pytest.mark.skipif(bool(system.missing()), reason=system.missing() or "a lab can be made"),
]


@pytest.fixture(autouse=True)
def _one_lab_at_a_time() -> None:
    try:
        with LOCK.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pytest.skip("another lab runs on this machine")


async def test_copies_in_host_memory_are_one_per_model_and_one_per_host_with_a_cache() -> None:
    strategies = ("chain", "disk-cold", "host-cache")
    result = await measure(3, Rate.parse("500mbit"), 8, repetitions=1, strategies=strategies)
    document = result.document()
    assert document["chain_s"].keys() == document["host_cache_s"].keys() == document["disk_cold_s"].keys() == {"1", "2"}
    assert document["host_bytes_cached"] == result.model_bytes
    assert document["host_cache_bytes_cached"] >= 2 * result.model_bytes
    assert not [name for name in [*system.namespaces(), *system.links()] if name.startswith(PREFIX)]


async def test_a_plan_that_knows_of_a_stream_keeps_away_from_its_source() -> None:
    # Large beside what waits in sockets where a busy machine does not let the stream's receiver run.
    result = await measure(4, Rate.parse("500mbit"), 64, repetitions=1, strategies=(), background=True)
    assert result.background is not None
    assert result.background.median("naive", "busy_source_share") > 0.9
    assert result.background.median("planned", "busy_source_share") < 0.5
    assert result.background.document().keys() == {"planned", "naive"}
