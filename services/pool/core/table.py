"""Entries by name, with the names in order, and what changed since when.

Each change of a registry gets a version, one count for all of its tables: readers ask for what came after theirs. Of
a ``SortedDict`` (``sortedcontainers``) only the order of the names would be used, and the rest would stay.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_GONE = 4096
"""Entries that went lately, for readers that ask for changes; a reader that asks for older ones reads everything."""


class Version:
    """Counts the changes of one registry."""

    def __init__(self) -> None:
        self.number = 1

    def next(self) -> int:
        self.number += 1
        return self.number


class Table(Generic[T]):
    """Finding is as quick as in a dictionary, and going on behind a name as in a sorted list."""

    def __init__(self, version: Version) -> None:
        self._version = version
        self._entries: dict[str, T] = {}
        self._names: list[str] = []
        self._latest: dict[str, int] = {}
        """The latest change of each entry, the newest last."""
        self._gone: deque[tuple[str, int]] = deque()
        self._gone_since = 0
        """Versions older than this may miss entries that went."""

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
        self.changed(name)

    def changed(self, name: str) -> None:
        """The entry has changed in place."""
        self._latest.pop(name, None)
        self._latest[name] = self._version.next()

    def pop(self, name: str) -> T | None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            del self._names[bisect_left(self._names, name)], self._latest[name]
            self._gone.append((name, self._version.next()))
            if len(self._gone) > MAX_GONE:
                self._gone_since = self._gone.popleft()[1]
        return entry

    def values(self) -> Iterator[T]:
        """In the order of names."""
        return (self._entries[name] for name in self._names)

    def names_after(self, name: str) -> list[str]:
        """Those behind this one, which need not be there; all of them behind ''."""
        return self._names[bisect_right(self._names, name) :]

    def knows(self, since: int) -> bool:
        """Whether it still knows every entry that went after that version."""
        return since >= self._gone_since

    def changed_since(self, since: int) -> tuple[str, ...]:
        """Names of the entries that are there and changed after that version, the latest first; 0: of all."""
        return _newer(reversed(self._latest.items()), since)

    def gone_since(self, since: int) -> tuple[str, ...]:
        """Names of the entries that went after that version, as often as they did, the latest first."""
        return _newer(reversed(self._gone), since)


def _newer(changes: Iterable[tuple[str, int]], since: int) -> tuple[str, ...]:
    return tuple(name for name, _ in takewhile(lambda change: change[1] > since, changes))
