from __future__ import annotations

import pytest

from bench.lab.errors import LabFailed
from bench.scaleout.rows import CHAIN, DISK, DISK_COLD, HOST_CACHE, HOST_CACHE_MISS, ROWS, STRATEGIES


def test_what_must_be_read_from_disk_fails_when_it_was_not() -> None:
    for row in (DISK_COLD, HOST_CACHE_MISS):
        row.require_read(1.0)
        with pytest.raises(LabFailed, match=row.name):
            row.require_read(0.5)


def test_a_hit_fails_when_the_disk_was_read() -> None:
    HOST_CACHE.require_read(0.0)
    with pytest.raises(LabFailed, match="memory"):
        HOST_CACHE.require_read(0.5)


def test_where_the_page_cache_says_nothing_nothing_is_required() -> None:
    for row in (CHAIN, DISK):
        row.require_read(0.0)
        row.require_read(1.0)


def test_what_keeps_copies_on_the_hosts_is_measured_last() -> None:
    assert ROWS[-1] is HOST_CACHE
    assert STRATEGIES == ("chain", "star", "disk", "disk-cold", "host-cache")
    assert (HOST_CACHE.key, DISK_COLD.key) == ("host_cache", "disk_cold")
