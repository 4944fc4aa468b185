"""Entries by name, with the names in order; and what changed since when."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")


class Ordered(Generic[T]):
    """Finding is as quick as in a dictionary, and going on behind a name as in a sorted list."""

    def __init__(self) -> None:
        self._entries: dict[str, T] = {}
        self._names: list[str] = []

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def get(self, name: str) -> T | None:
        return self._entries.get(name)

    def put(self, name: str, entry: T) -> None:
        if name not in self._entries:
            insort(self._names, name)
        self._entries[name] = entry

    def pop(self, name: str) -> T | None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            del self._names[bisect_left(self._names, name)]
        return entry

    def values(self) -> Iterator[T]:
        """In the order of names."""
        return (self._entries[name] for name in self._names)

    def names_after(self, name: str) -> list[str]:
        """Those behind this one, which need not be there; all of them behind ''."""
        return self._names[bisect_right(self._names, name) :]


Kind = Literal["model", "worker"]
MAX_GONE = 4096
"""Models and workers that went lately, for readers that ask for changes; who asks for older ones reads everything."""


@dataclass(frozen=True, slots=True)
class Names:
    """Of models, and ids of workers, the latest first."""

    models: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()


class ChangeLog:
    """Of every model and worker its latest change, and of the newest that went, when."""

    def __init__(self) -> None:
        self.version = 1
        self._latest: dict[tuple[Kind, str], int] = {}
        """The latest change last."""
        self._gone: deque[tuple[Kind, str, int]] = deque()
        self._gone_since = 0
        """Versions older than this may miss some that went."""

    def changed(self, kind: Kind, name: str) -> None:
        """It is new, or another than before."""
        self.version += 1
        self._latest.pop((kind, name), None)
        self._latest[kind, name] = self.version

    def went(self, kind: Kind, name: str) -> None:
        """It is no more."""
        self.version += 1
        self._latest.pop((kind, name), None)
        self._gone.append((kind, name, self.version))
        if len(self._gone) > MAX_GONE:
            self._gone_since = self._gone.popleft()[2]

    def knows(self, since: int) -> bool:
        """Whether everything that changed after that version, and went, is known."""
        return self._gone_since <= since <= self.version

    def changed_since(self, since: int) -> Names:
        """What is there and changed after that version; 0 for everything."""
        return _newer(((*key, version) for key, version in reversed(self._latest.items())), since)

    def gone_since(self, since: int) -> Names:
        """What went after that version, as often as it did."""
        return _newer(reversed(self._gone), since)


def _newer(changes: Iterable[tuple[Kind, str, int]], since: int) -> Names:
    """Of ``changes``, the latest first."""
    found: dict[Kind, list[str]] = {"model": [], "worker": []}
    for kind, name, version in changes:
        if version <= since:
            break
        found[kind].append(name)
    return Names(tuple(found["model"]), tuple(found["worker"]))
