"""What this process's control group lets it have: a container's cores and memory are those of its limits, not of the
machine. Both versions of cgroups are read; a machine with neither has no limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

T = TypeVar("T", int, float)

_ROOT = Path("/")
_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes no limit as the largest number that it knows, rounded to pages."""


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The narrowest of the process's group and those that it is in. None: there is none."""

    cores: float | None
    """CPU seconds per second."""
    memory_bytes: int | None


def limits(root: Path = _ROOT) -> GroupLimits:
    """Those of this process. ``root``: where ``/proc`` and the mounts are."""
    return GroupLimits(cores=_narrowest(root, "cpu", _cores), memory_bytes=_narrowest(root, "memory", _memory_bytes))


def num_cores(root: Path = _ROOT) -> int:
    """Whole cores that this process may use, by its affinity mask and its group's quota; at least one."""
    allowed, quota = len(os.sched_getaffinity(0)), limits(root).cores
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def memory_left(root: Path = _ROOT) -> float:
    """The share of its memory that the fullest of the process's groups may still take, 0 to 1; 1 without limits. Files
    that are only cached do not count as taken."""
    return min((left for folder in _groups(root, "memory") if (left := _left(folder)) is not None), default=1.0)


def _narrowest(root: Path, controller: str, read: Callable[[Path], T | None]) -> T | None:
    found = [limit for folder in _groups(root, controller) if (limit := read(folder)) is not None]
    return min(found, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it that can be seen, the innermost first."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        paths = dict(_paths((root / "proc/self/cgroup").read_text()))
    except OSError:
        return
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and controller not in options.split(",")):
            continue
        of, at = before.split(" ")[3:5]
        path = paths.get("" if kind == "cgroup2" else controller)
        if path is None:
            continue
        # A container may see its own group as the root, though its path is told as the host's.
        inside = PurePosixPath(path).relative_to(of) if PurePosixPath(path).is_relative_to(of) else PurePosixPath()
        top = root / at.lstrip("/")
        for folder in (inside, *inside.parents):
            yield top / folder


def _paths(text: str) -> Iterator[tuple[str, str]]:
    """Of this process's group by controller; by an empty name in version 2, which has one for all."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _cores(folder: Path) -> float | None:
    match _words(folder / "cpu.max"):
        case [quota, period] if quota != "max":
            return int(quota) / int(period)
    match _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us"):
        case [quota], [period] if int(quota) > 0:
            return int(quota) / int(period)
    return None


def _memory_bytes(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        match _words(folder / name):
            case [limit] if limit != "max" and int(limit) < _UNLIMITED_BYTES:
                return int(limit)
    return None


def _left(folder: Path) -> float | None:
    limit = _memory_bytes(folder)
    if not limit:
        return None
    for usage, cached in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        match _words(folder / usage):
            case [used]:
                stat = _words(folder / "memory.stat")
                reclaimable = dict(zip(stat[::2], stat[1::2], strict=False)).get(cached, "0")
                return max(0.0, 1 - max(0, int(used) - int(reclaimable)) / limit)
    return None


def _words(file: Path) -> list[str]:
    """Empty: there is no such file, or it may not be read."""
    try:
        return file.read_text().split()
    except OSError:
        return []
