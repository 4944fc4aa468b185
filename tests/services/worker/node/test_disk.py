"""The speed of the scratch disk."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.worker.node.disk import measure_ssd_gbps

MIB = 1 << 20


def test_a_disk_has_a_plausible_speed_and_keeps_nothing(tmp_path: Path) -> None:
    speed = measure_ssd_gbps(tmp_path, max_bytes=16 * MIB)
    assert speed is not None
    assert 0.001 < speed < 10_000
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_reads_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) * 1e-3)  # a slow disk ends the trial early
    dropped: list[int] = []
    real, control = os.posix_fadvise, fcntl.fcntl

    def fadvise(descriptor: int, offset: int, length: int, advice: int) -> None:
        dropped.append(length)
        real(descriptor, offset, length, advice)

    def no_direct(descriptor: int, operation: int, flags: int = 0) -> int:
        if operation == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, operation, flags)

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    monkeypatch.setattr(fcntl, "fcntl", no_direct)
    assert measure_ssd_gbps(tmp_path, max_bytes=16 * MIB) is not None
    assert dropped == [16 * MIB], "its pages leave the cache before they are read"


def test_direct_reads_that_are_refused_late_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert measure_ssd_gbps(tmp_path, max_bytes=8 * MIB) is not None


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_or_broken_disk_is_unknown_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with caplog.at_level(logging.WARNING):
        assert measure_ssd_gbps(tmp_path) is None
    assert str(tmp_path) in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert measure_ssd_gbps(tmp_path / "nowhere") is None
    assert "nowhere" in caplog.text


def test_a_slow_disk_ends_the_trial_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    now_s = 0.0
    real = os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal now_s
        now_s += 0.2
        written.append(len(data))
        return real(descriptor, data, offset)

    def clock() -> float:
        nonlocal now_s
        now_s += 1e-3
        return now_s

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr("time.perf_counter", clock)
    assert measure_ssd_gbps(tmp_path) is not None
    assert sum(written) == 16 * MIB
