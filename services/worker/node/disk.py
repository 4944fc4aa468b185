"""How fast the scratch disk reads, tried once with a small file."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import tempfile
import time
from pathlib import Path

log = logging.getLogger(__name__)

MIB = 1 << 20
_PIECE_BYTES = 8 * MIB
_MAX_BYTES = 64 * MIB
_PHASE_S = 0.25
"""Longest time to go on writing, and to go on reading. A piece under way is finished."""


def measure_ssd_gbps(directory: Path, *, max_bytes: int = _MAX_BYTES) -> float | None:
    """Read bandwidth of the file system at ``directory`` in Gb/s, past the page cache; None if that fails.

    Writes at most ``max_bytes`` and takes about half a second. Blocks: call it in a thread.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix=".blitzscale-speed-", dir=directory)
    except OSError as error:
        log.warning("cannot measure the disk at %s: %s", directory, error)
        return None
    try:
        # Gone from the directory at once: nothing is left behind even by a killed process.
        os.unlink(name)
        return _measure_gbps(descriptor, max_bytes)
    except OSError as error:
        log.warning("cannot measure the disk at %s: %s", directory, error)
        return None
    finally:
        os.close(descriptor)


def _measure_gbps(descriptor: int, max_bytes: int) -> float | None:
    # An anonymous map is aligned to pages, as direct I/O wants it. Random bytes: some file systems compress.
    with mmap.mmap(-1, _PIECE_BYTES) as buffer:
        buffer[:] = os.urandom(_PIECE_BYTES)
        with memoryview(buffer) as piece:
            num_bytes = _write(descriptor, piece, max_bytes)
            if _set_direct(descriptor, direct=True):
                try:
                    return _read_gbps(descriptor, piece, num_bytes)
                except OSError as error:
                    # Some file systems take the flag and refuse the reads.
                    log.info("direct reads are refused (%s): measuring without", error)
                    _set_direct(descriptor, direct=False)
            os.posix_fadvise(descriptor, 0, num_bytes, os.POSIX_FADV_DONTNEED)
            return _read_gbps(descriptor, piece, num_bytes)


def _write(descriptor: int, piece: memoryview, max_bytes: int) -> int:
    """Bytes on the disk. Synced piece by piece, so that a slow disk ends it early."""
    deadline_s = time.perf_counter() + _PHASE_S
    written = 0
    while written < max_bytes:
        count = os.pwrite(descriptor, piece, written)
        os.fsync(descriptor)
        written += count
        if count < len(piece) or time.perf_counter() > deadline_s:
            break
    return written


def _read_gbps(descriptor: int, piece: memoryview, num_bytes: int) -> float | None:
    started_s = time.perf_counter()
    done = 0
    elapsed_s = 0.0
    while done < num_bytes and elapsed_s < _PHASE_S:
        count = os.preadv(descriptor, [piece], done)
        if count == 0:
            break
        done += count
        elapsed_s = time.perf_counter() - started_s
    return done * 8e-9 / elapsed_s if done and elapsed_s > 0 else None


def _set_direct(descriptor: int, *, direct: bool) -> bool:
    """Whether the file's reads now go past the page cache, as asked."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags)
    except OSError:
        return False
    return True
