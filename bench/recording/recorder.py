"""Writes down what shells ask of cores, and what comes back, while the services run as they are.

``recording`` puts itself between all code outside of ``services/*/core`` and the classes and functions inside. What a
core asks of itself is not recorded: a player's core does the same.

Several threads may ask: a worker's event loop and its engine's thread do. One call is carried out at a time, of
whatever core, and written before the next one: their order in the file is that in which cores changed, and nobody reads
one that is about to. So what a core is given to call must not wait for another thread that asks cores.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import msgspec

from bench.recording.book import SHARED_CORES, Book, is_fixed, is_stateful, name_of
from bench.recording.records import Callback, Kind, Record, packed

SERVICES = ("gateway", "monitor", "planner", "pool", "worker")
_CORES = {"worker": "services.worker.core.live"}
"""Of a service whose core is not recorded as a whole. What else is in a worker's core is not asked through calls alone:
the engine changes the scheduler's sequences itself."""


class _Place(threading.local):
    """Where a thread is."""

    def __init__(self) -> None:
        self.inside = False
        """Whether it is inside of a core."""
        self.callbacks: list[Callback] = []
        """Of the call of a shell that it is in."""
        self.sinks: list[list[Record]] = []
        """Of the callbacks that it is in."""


class _Asked:
    """An iterator of a core, of which each part is a call."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._ask()


class Recorder:
    """Belongs to the services of one process, whatever their threads."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("wb")
        self._book = Book()
        self._place = _Place()
        self._lock = threading.RLock()
        self._num_callables = 0
        self._undo: list[Callable[[], None]] = []

    # --- between shells and cores ------------------------------------------------------------

    def open(self, services: Sequence[str]) -> None:
        """From now on everything is recorded."""
        packages = [*(_CORES.get(name, f"services.{name}.core") for name in services), *SHARED_CORES]
        modules = [module for package in packages for module in _modules(package)]
        functions: dict[int, Any] = {}
        for module in modules:
            for name, value in list(vars(module).items()):
                if getattr(value, "__module__", "") != module.__name__ or name.startswith("_"):
                    continue
                if isinstance(value, type) and is_stateful(value):
                    self._stand_before(value)
                elif isinstance(value, type) and is_fixed(value):
                    self._watch_making(value)
                elif isinstance(value, FunctionType):
                    functions[id(value)] = self._wrapped("function", value, module.__name__)
        # By every name under which a shell knows them.
        shells = [module for name, module in list(sys.modules.items()) if name.startswith("services.")]
        for module in shells:
            for name, value in list(vars(module).items()):
                if id(value) in functions and isinstance(value, FunctionType):
                    self._set(module, name, functions[id(value)])

    def close(self) -> None:
        """Nothing is recorded any more. Does nothing when it is called again."""
        with self._lock:
            if not self._file.closed:
                self._file.flush()  # should the process be killed before it has told all that follows
                # What a shell changed without a word to the core shows here at the latest.
                for number, state in self._book.states():
                    self._write(Record("state", number, name_of(type(self._book[number])), result=state))
                self._file.close()
        while self._undo:
            self._undo.pop()()

    def _stand_before(self, kind: type) -> None:
        own = dict(vars(kind))
        if kind.__init__ is object.__init__:  # type: ignore[misc]
            self._set(kind, "__init__", self._wrapped("new", _made))
        for name, value in own.items():
            if name == "__init__":
                self._set(kind, name, self._wrapped("new", value))
            elif name.startswith("_"):
                continue
            elif isinstance(value, FunctionType):
                self._set(kind, name, self._wrapped("call", value))
            elif isinstance(value, classmethod | staticmethod):
                inner = self._wrapped("class", value.__func__, name_of(kind), bound=isinstance(value, classmethod))
                self._set(kind, name, type(value)(inner))
            elif isinstance(value, property) and value.fget is not None:
                self._set(kind, name, property(self._wrapped("get", value.fget, name=name), value.fset))
        if not hasattr(kind.__setattr__, "__wrapped__"):  # else a class above it has seen to that
            self._set(kind, "__setattr__", self._wrapped("set", kind.__setattr__))

    def _watch_making(self, kind: type) -> None:
        place, init = self._place, kind.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def make(self_: object, *args: Any, **kwargs: Any) -> None:
            init(self_, *args, **kwargs)
            if not place.inside:
                self._book.is_made_outside(self_)

        if not issubclass(kind, msgspec.Struct):
            self._set(kind, "__init__", make)

    def _set(self, owner: type | ModuleType, name: str, value: Any) -> None:
        had, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))

    def _wrapped(
        self, kind: Kind, function: Callable[..., Any], target: str = "", *, name: str = "", bound: bool = False
    ) -> Callable[..., Any]:
        place, called = self._place, name or function.__name__

        @functools.wraps(function)
        def ask(*args: Any, **kwargs: Any) -> Any:
            if place.inside:
                return function(*args, **kwargs)
            return self._ask(kind, function, target, called, args, kwargs, bound)

        return ask

    def _ask(
        self,
        kind: Kind,
        function: Callable[..., Any],
        target: int | str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound: bool,
    ) -> Any:
        first: tuple[Any, ...] = args[: kind in ("new", "call", "get", "set") or bound]
        # What runs through an iterator has read it.
        rest = [tuple(arg) if isinstance(arg, Iterator) else arg for arg in args[len(first) :]]
        kwargs = {key: tuple(arg) if isinstance(arg, Iterator) else arg for key, arg in kwargs.items()}
        with self._lock:
            if kind == "new":
                target, name = self._book.give(first[0]), name_of(type(first[0]))
            elif kind == "class":
                target = name_of(first[0]) if first else target
            elif first:
                target = self._number(first[0])
            record = Record(kind, target, name, at_s=time.monotonic())
            passed = []
            for arg in rest:
                written, own = self._given(arg)
                record.args.append(written)
                passed.append(own)
            for key, arg in kwargs.items():
                record.kwargs[key], kwargs[key] = self._given(arg)
            return self._call(record, functools.partial(function, *first, *passed, **kwargs))

    def _call(self, record: Record, function: Callable[[], Any]) -> Any:
        place = self._place
        place.inside, place.callbacks = True, record.inside
        try:
            result = function()
        except Exception as error:
            self._answered(record, error, raised=True)
            raise
        finally:
            place.inside, place.callbacks = False, []
        self._answered(record, result)
        if isinstance(result, Iterator):
            return _Asked(functools.partial(self._wrapped("call", next, name="__next__"), result))
        return result

    def _answered(self, record: Record, result: object, *, raised: bool = False) -> None:
        written = self._book.answered(result)
        record.result = ["raised", written] if raised else written
        self._write(record)

    def _write(self, record: Record) -> None:
        if self._place.sinks:
            self._place.sinks[-1].append(record)
        elif not self._file.closed:
            self._file.write(packed(record))

    # --- what is given -----------------------------------------------------------------------

    def _given(self, value: Any) -> tuple[Any, Any]:
        """As it is written, and as the core gets it."""
        if callable(value) and not isinstance(value, type):
            self._num_callables += 1
            return ["callable", self._num_callables], self._heard(value, self._num_callables)
        return self._book.given(value, self._find), value

    def _heard(self, value: Callable[..., Any], number: int) -> Callable[..., Any]:
        place = self._place

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not place.inside:
                return value(*args, **kwargs)
            given = [self._book.got(arg) for arg in args]
            callback = Callback(number, given, {key: self._book.got(arg) for key, arg in kwargs.items()})
            callbacks = place.callbacks
            callbacks.append(callback)
            place.inside = False
            place.sinks.append(callback.inside)
            try:
                result = value(*args, **kwargs)
                callback.result = self._book.given(result, self._find)
            finally:
                place.sinks.pop()
                place.inside, place.callbacks = True, callbacks
            return result

        return call

    def _number(self, own: object) -> int:
        number = self._book.number_of(own)
        number = number if number is not None else self._find(own)
        if number is None:
            # It was made before this began, or is kept where nobody can find it.
            number = self._book.give(own)
            self._write(Record("reach", 0, name_of(type(own)), [number, []]))
        return number

    def _find(self, own: object) -> int | None:
        """An object of a core that shells know only as a part of another one."""
        found = self._book.path_to(own)
        if found is None:
            return None
        root, path = found
        number = self._book.give(own)
        self._write(Record("reach", root, name_of(type(own)), [number, path]))
        return number


def _made(_: object) -> None:
    """Of a class that has nothing to do there."""


def _modules(package: str) -> Iterator[ModuleType]:
    root = importlib.import_module(package)
    yield root
    for found in pkgutil.walk_packages(root.__path__, f"{package}."):
        yield importlib.import_module(found.name)


@contextlib.contextmanager
def recording(file: Path, services: Sequence[str] = SERVICES) -> Iterator[Recorder]:
    """Within the block, what the shells of these services ask of their cores is written to a file. Services have to be
    made within it, too."""
    recorder = Recorder(file)
    try:
        recorder.open(services)
        yield recorder
    finally:
        recorder.close()
