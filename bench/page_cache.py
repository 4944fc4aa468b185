"""Files out of the page cache and into it, and how much of them is there."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from shared.errors import Unavailable

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_READ_BYTES = 8 << 20
_STAYS = 0.01
"""Share of the bytes that may stay when files count as dropped: readahead of a neighbour, a page in use."""
Method = str
"""``drop_caches`` or ``posix_fadvise``."""


class CacheStays(Unavailable):
    """The kernel keeps the files' pages: what would be read next does not come from a disk."""

    code = "cache_stays"


def drop(files: Iterable[Path], *, everything: bool = False) -> Method:
    """Take the files out of the page cache; how that was done.

    ``everything``: drop the machine's whole page cache where that is permitted, so that directory entries and metadata
    go as well. Raises ``CacheStays`` when pages stay (a file in tmpfs has no other place), ``OSError``.
    """
    files = tuple(files)
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            # Pages that are not written back yet would stay.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    method = "posix_fadvise"
    if everything:
        # Without root, or with /proc read-only, the files' own pages are gone all the same.
        with contextlib.suppress(OSError):
            os.sync()
            _DROP_CACHES.write_text("3\n", encoding="ascii")
            method = "drop_caches"
    num_bytes = sum(file.stat().st_size for file in files)
    resident = sum(resident_bytes(file) for file in files)
    if resident > _STAYS * num_bytes:
        raise CacheStays(
            f"{resident} of {num_bytes} bytes stay in the page cache: "
            "another process maps the files, or they lie in tmpfs"
        )
    return method


def warm(files: Iterable[Path]) -> None:
    """Read the files, so that they are in the page cache. Raises ``OSError``."""
    buffer = bytearray(_READ_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def resident_bytes(file: Path) -> int:
    """How much of a file is in the page cache, in whole pages. Raises ``OSError``."""
    num_bytes = file.stat().st_size
    if num_bytes == 0:
        return 0
    # A private writable mapping, because ``from_buffer`` takes nothing else; a page is copied when it is written only.
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=_READ_WRITE) as mapping:
        pages = (ctypes.c_ubyte * (-(-num_bytes // mmap.PAGESIZE)))()
        address = ctypes.c_char.from_buffer(mapping)
        failed = _libc().mincore(
            ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(num_bytes), ctypes.byref(pages)
        )
        del address  # a mapping that is still referred to cannot be closed
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(file))
        return min(num_bytes, sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE)


_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
