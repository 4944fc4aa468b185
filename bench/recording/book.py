"""Values as a recording writes them, and the objects that it knows by number.

Rules
- Messages and other values that never change are written once, and are a number from then on: a core may compare what
  it is given by identity.
- A frozen struct that a shell gives, and that no call of a core gave, is new: nothing tells who made it, and looking
  for each event of a machine in all that the machine has would take longer than the event.
- An object of a core that changes is a number, never a value: whoever plays has one of its own, of the same number.
- What a shell gives has numbers below zero, which are written down; what a core gives is counted from one, by both
  sides in the same order.
- What a core is given to call, and what it only passes on, is no value.
- An iterator that a core gives is a number; what comes out of it is asked for call by call: it may have no end.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

_PLAIN = (type(None), bool, int, float, str, bytes)
_MAPPINGS = (dict, collections.Counter, collections.defaultdict, collections.OrderedDict)
_LISTS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", collections.deque: "deque"}
_MAKERS: dict[str, Callable[[Iterable[Any]], Any]] = {tag: kind for kind, tag in _LISTS.items()}
_OURS = ("services.", "shared.")
SHARED_CORES = ("shared.zigzag",)
"""Packages that decide and belong to no service: the cores of several have objects of theirs."""
_MAX_VISITED = 50_000


class Opaque:
    """Something that is no value: the core may keep it and give it back, and look at nothing of it."""


def name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def named(name: str) -> Any:
    """The class of that name, or the module if it names one."""
    module, _, path = name.partition(":")
    if not module.startswith(_OURS):
        raise ValueError(f"{name!r} is not part of the services")
    found: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


def is_core(kind: type) -> bool:
    """Whether a class belongs to what decides."""
    return _facts(cast(Any, kind)).core


def is_fixed(kind: type) -> bool:
    """Whether instances of a class of ours never change."""
    return _facts(cast(Any, kind)).fixed


def is_stateful(kind: type) -> bool:
    """Whether instances are objects of a core that change."""
    return _facts(cast(Any, kind)).stateful


class _Facts(NamedTuple):
    core: bool
    fixed: bool
    stateful: bool
    sought: bool
    """One that a shell gives may be part of what a core has."""


@functools.cache
def _facts(kind: Any) -> _Facts:
    parts = kind.__module__.split(".")
    core = ".".join(parts[:2]) in SHARED_CORES or (len(parts) > 2 and parts[0] == "services" and parts[2] == "core")
    if is_struct := issubclass(kind, msgspec.Struct):
        fixed = kind.__struct_config__.frozen
    else:
        fixed = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[union-attr]
    stateful = core and not (fixed or issubclass(kind, BaseException | enum.Enum | tuple))
    return _Facts(core, fixed, stateful, core and not (fixed and is_struct))


class Book:
    """The objects of one recording, on either side. They are kept: a number is never given twice."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        """By ``id``."""
        self._objects: dict[int, Any] = {}
        self._stateful: dict[int, Any] = {}
        self._made_outside: dict[int, Any] = {}
        self._given = 0
        self._got = 0

    def __getitem__(self, number: int) -> Any:
        return self._objects[number]

    def number_of(self, value: object) -> int | None:
        """None: it is not known."""
        return self._numbers.get(id(value))

    def put(self, value: object, number: int) -> None:
        """This object has that number."""
        self._objects[number] = value
        if is_stateful(type(value)):
            self._stateful[number] = value
        self._numbers[id(value)] = number

    def is_made_outside(self, value: object) -> None:
        """A shell made it: it is not looked for in cores."""
        self._made_outside[id(value)] = value

    def give(self, value: object) -> int:
        """The number of an object that a shell gives, or has found."""
        self._given -= 1
        self.put(value, self._given)
        return self._given

    def _get(self, value: object) -> int:
        self._got += 1
        self.put(value, self._got)
        return self._got

    # --- what shells give --------------------------------------------------------------------

    def given(self, value: Any, find: Callable[[object], int | None]) -> Any:
        """An argument, written. ``find`` numbers an object of a core that is not known yet."""

        def write(part: Any) -> Any:
            kind = type(part)
            if (number := self._numbers.get(id(part))) is not None:
                return ["#", number]
            if kind.__module__.startswith(_OURS) and (is_fixed(kind) or is_stateful(kind)):
                sought = _facts(cast(Any, kind)).sought and id(part) not in self._made_outside
                if sought and (number := find(part)) is not None:
                    return ["#", number]
                fields = {name: write(each) for name, each in _state(part).items()}
                return ["new", self.give(part), name_of(kind), fields]
            return _written(part, write)

        return write(value)

    def read(self, data: Any, callback: Callable[[int], Any]) -> Any:
        """The argument that was written. ``callback``: what stands for what the core is given to call."""

        def value(part: Any) -> Any:
            if not isinstance(part, list):
                return part
            tag, *rest = part
            if tag == "#":
                return self._objects[rest[0]]
            if tag == "callable":
                return callback(rest[0])
            if tag == "new":
                number, kind, fields = rest
                made = _made(kind, {name: value(each) for name, each in fields.items()})
                self.put(made, number)
                return made
            return _read(tag, rest, value)

        return value(data)

    # --- what cores give ---------------------------------------------------------------------

    def answered(self, result: Any) -> Any:
        """What a call comes back with, written so that it can be compared, and used in later calls."""
        return ["iterator", self._get(result)] if isinstance(result, Iterator) else self.got(result)

    def got(self, value: Any) -> Any:
        """A part of it."""
        kind = type(value)
        if kind.__module__.startswith(_OURS) and is_core(kind) and (is_fixed(kind) or is_stateful(kind)):
            if (number := self._numbers.get(id(value))) is not None:
                return ["#", number]
            number = self._get(value)
            if is_stateful(kind):
                return ["core", number, name_of(kind)]
            return ["new", number, name_of(kind), {name: self.got(each) for name, each in _state(value).items()}]
        return _written(value, self.got)

    def states(self) -> Iterator[tuple[int, Any]]:
        """The cores' objects as they are now, by number, written; and those that they hold."""
        told: set[int] = set()
        while left := [number for number in self._stateful if number not in told]:
            for number in left:
                told.add(number)
                yield number, self.state(number)

    def state(self, number: int) -> Any:
        """One of them."""
        return {name: self.got(part) for name, part in _state(self._objects[number]).items()}

    # --- objects beneath others --------------------------------------------------------------

    def path_to(self, wanted: object) -> tuple[int, list[list[Any]]] | None:
        """How a shell may have come from an object that is known to one that is not."""
        seen: set[int] = set()
        waiting: collections.deque[tuple[int, list[list[Any]], Any]] = collections.deque(
            (number, [], known) for number, known in self._stateful.items()
        )
        while waiting and len(seen) < _MAX_VISITED:
            root, path, at = waiting.popleft()
            if id(at) in seen:
                continue
            seen.add(id(at))
            for step, part in _parts(at):
                if part is wanted:
                    return root, [*path, step]
                if is_stateful(type(part)) or isinstance(part, dict | list | tuple | collections.deque):
                    waiting.append((root, [*path, step], part))
        return None

    def walk(self, root: int, path: list[list[Any]]) -> Any:
        """To the end of such a path."""
        at = self._objects[root]
        for kind, step in path:
            if kind == "attribute":
                at = getattr(at, step)
            else:
                at = at[step] if kind == "index" else at[tuple(step) if isinstance(step, list) else step]
        return at


def _parts(of: Any) -> Iterator[tuple[list[Any], Any]]:
    if isinstance(of, dict):
        for key, part in of.items():
            if isinstance(key, str | int) or (isinstance(key, tuple) and all(isinstance(k, str | int) for k in key)):
                yield ["key", key], part
    elif isinstance(of, list | tuple | collections.deque):
        for index, part in enumerate(of):
            yield ["index", index], part
    else:
        for name, part in _state(of).items():
            yield ["attribute", name], part


def _state(of: Any) -> dict[str, Any]:
    """Its fields; of what changes, whatever it has."""
    if isinstance(of, msgspec.Struct):
        return {name: getattr(of, name) for name in of.__struct_fields__}
    if dataclasses.is_dataclass(of) and is_fixed(type(of)):
        return {f.name: getattr(of, f.name) for f in dataclasses.fields(of)}
    names = [name for kind in type(of).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(of, name) for name in names if hasattr(of, name)} | dict(getattr(of, "__dict__", {}))


def _made(kind_name: str, fields: Mapping[str, Any]) -> Any:
    kind = named(kind_name)
    if issubclass(kind, msgspec.Struct):
        return kind(**fields)
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _written(value: Any, write: Callable[[Any], Any]) -> Any:
    """What is the same in both directions."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _LISTS or isinstance(value, KeysView | ValuesView):
        parts = [write(part) for part in value]
        if isinstance(value, Set) and not isinstance(value, KeysView):
            parts.sort(key=msgspec.msgpack.encode)
        return ["keys" if isinstance(value, KeysView) else _LISTS.get(kind, "tuple"), parts]
    if kind in _MAPPINGS or (isinstance(value, Mapping) and kind.__module__ in ("builtins", "types")):
        return ["dict", [[write(key), write(part)] for key, part in value.items()]]
    if isinstance(value, enum.Enum):
        return ["enum", name_of(kind), value.name]
    if isinstance(value, BaseException):
        own = {name: write(part) for name, part in vars(value).items() if not name.startswith("__")}
        return ["error", name_of(kind), [write(part) for part in value.args], own]
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, type) and value.__module__.startswith(_OURS):
        return ["type", name_of(value)]
    if kind.__module__.startswith(_OURS):
        if isinstance(value, tuple):
            return ["named", name_of(kind), [write(part) for part in value]]
        if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
            return ["value", name_of(kind), {name: write(part) for name, part in _state(value).items()}]
    return ["opaque"]


def _read(tag: str, rest: list[Any], value: Callable[[Any], Any]) -> Any:
    if tag in _MAKERS:
        return _MAKERS[tag](value(part) for part in rest[0])
    if tag == "keys":
        return dict.fromkeys(value(part) for part in rest[0]).keys()
    if tag == "dict":
        return {value(key): value(part) for key, part in rest[0]}
    if tag == "enum":
        return named(rest[0])[rest[1]]
    if tag == "named":
        return named(rest[0])(*(value(part) for part in rest[1]))
    if tag == "value":
        return _made(rest[0], {name: value(part) for name, part in rest[1].items()})
    if tag == "path":
        return Path(rest[0])
    if tag == "error":
        kind, args, own = rest
        if not kind.startswith(_OURS):
            return RuntimeError(kind, *(value(part) for part in args))
        error = named(kind).__new__(named(kind), *(value(part) for part in args))
        vars(error).update({name: value(part) for name, part in own.items()})
        return error
    if tag == "type":
        return named(rest[0])
    return Opaque()
