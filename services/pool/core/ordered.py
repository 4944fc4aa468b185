"""Entries by name, with the names in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

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
