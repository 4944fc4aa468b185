"""Plays a recording to cores of its own, and compares everything that they answer with what was answered then.

There is no event loop, no network and no clock: the times that cores hear are those that were recorded. Thus a
difference is a decision that hangs on something else: a clock, chance, the order of a set, or a shell that reached
into a core.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.recording.book import Book, named
from bench.recording.records import Callback, Record, records, same

_short = reprlib.Repr()
_short.maxother = _short.maxstring = 400


@dataclass(frozen=True, slots=True)
class Difference:
    """Where cores first answered something else, and what."""

    index: int
    """Of the call of a shell, from 0."""
    call: str
    """With what was given."""
    recorded: Any
    played: Any

    def __str__(self) -> str:
        return f"call {self.index}, {self.call}:\n  recorded {self.recorded!r}\n  played   {self.played!r}"


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it. ``num_calls``: by what was called."""

    num_calls: dict[str, int]
    difference: Difference | None

    @property
    def total(self) -> int:
        return sum(self.num_calls.values())


class Differs(Exception):
    """A core did not do what it did then."""

    def __init__(self, what: str, recorded: Any, played: Any) -> None:
        super().__init__(what)
        self.what = what
        self.recorded = recorded
        self.played = played
        self.given = ""


class Player:
    """One process's cores."""

    def __init__(self) -> None:
        self._book = Book()
        self._callbacks: list[Callback] = []
        """That the present call is still to make."""
        self._differs: Differs | None = None
        self._num_calls: dict[str, int] = {}

    def play(self, recording: Iterable[Record]) -> Played:
        """Until the end, or the first difference."""
        for index, record in enumerate(recording):
            try:
                self._play(record)
            except Differs as differs:
                call = f"{record}{differs.given} {differs.what}".strip()
                found = Difference(index, call, differs.recorded, differs.played)
                return Played(self._num_calls, found)
        return Played(self._num_calls, None)

    def _play(self, record: Record) -> None:
        if record.kind == "reach":
            self._reach(record)
            return
        if record.kind == "state":
            assert isinstance(record.target, int)
            if not same(record.result, played := self._book.state(record.target)):
                changed = {name for name in record.result if not same(record.result[name], played.get(name))}
                raise Differs(
                    "in the end",
                    {name: record.result[name] for name in changed},
                    {name: played.get(name) for name in changed},
                )
            return
        args = [self._read(arg) for arg in record.args]
        kwargs = {key: self._read(arg) for key, arg in record.kwargs.items()}
        try:
            self._compare(record, args, kwargs)
        except Differs as differs:
            differs.given = "" if record.kind == "get" else _shown(args, kwargs)
            raise

    def _compare(self, record: Record, args: list[Any], kwargs: dict[str, Any]) -> None:
        before, self._callbacks = self._callbacks, [*record.inside]
        try:
            played = self._book.answered(self._ask(record, args, kwargs))
        except Exception as error:  # noqa: BLE001 - what a core raises is an answer like any other
            played = ["raised", self._book.got(error)]
        left, self._callbacks = self._callbacks, before
        if self._differs is not None:
            raise self._differs  # also where a core went on after it
        if left:
            raise Differs("did not call back", [left[0].number, left[0].args], None)
        if not same(record.result, played):
            raise Differs("", record.result, played)

    def _ask(self, record: Record, args: list[Any], kwargs: dict[str, Any]) -> Any:
        name = record.name
        if record.kind == "new":
            assert isinstance(record.target, int)
            kind = named(name)
            made = object.__new__(kind)
            self._book.put(made, record.target)
            self._count(kind.__name__)
            return made.__init__(*args, **kwargs)
        target = self._book[record.target] if isinstance(record.target, int) else named(record.target)
        owner = target if isinstance(target, type | ModuleType) else type(target)
        self._count(f"{owner.__name__.rpartition('.')[2]}.{name}")
        if record.kind == "set":
            return setattr(target, *args)
        found = getattr(target, name)
        return found if record.kind == "get" else found(*args, **kwargs)

    def _reach(self, record: Record) -> None:
        number, path = record.args
        try:
            assert isinstance(record.target, int)
            self._book.put(self._book.walk(record.target, path), number)
        except (AttributeError, KeyError, IndexError) as error:
            raise Differs(f"by {path}", "an object that was there", repr(error)) from error

    def _count(self, call: str) -> None:
        self._num_calls[call] = self._num_calls.get(call, 0) + 1

    # --- what cores call ---------------------------------------------------------------------

    def _read(self, data: Any) -> Any:
        return self._book.read(data, lambda number: lambda *args, **kwargs: self._called(number, args, kwargs))

    def _called(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        played = [number, [self._book.got(arg) for arg in args], {k: self._book.got(arg) for k, arg in kwargs.items()}]
        callback = self._callbacks.pop(0) if self._callbacks else None
        recorded = [callback.number, callback.args, callback.kwargs] if callback is not None else None
        if callback is None or not same(recorded, played):
            self._differs = self._differs or Differs("called back", recorded, played)
            raise self._differs
        for record in callback.inside:
            self._play(record)
        return self._read(callback.result)


def _shown(args: list[Any], kwargs: dict[str, Any]) -> str:
    parts = [*map(_short.repr, args), *(f"{key}={_short.repr(arg)}" for key, arg in kwargs.items())]
    return f"({', '.join(parts)})"


def play(file: Path) -> Played:
    """The recording of one process."""
    return Player().play(records(file))
