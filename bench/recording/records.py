"""The file of a recording: what was asked of cores, in order, and what they answered.

Values are as ``bench.recording.book`` writes them. Each record stands behind its length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

_LENGTH = struct.Struct("<I")
Kind = Literal["new", "call", "get", "set", "class", "function", "reach", "state"]
"""An object made, a method called, an attribute read or set, a class method or a function called; an object found
beneath another one; an object as it was in the end."""


class Callback(msgspec.Struct, array_like=True):
    """A call by the core of what it was given to call."""

    number: int
    args: list[Any]
    kwargs: dict[str, Any]
    inside: list[Record] = []
    """What that asked of cores in turn."""
    result: Any = None


class Record(msgspec.Struct, array_like=True):
    """One call of a shell. ``target``: the number of an object, or a class or module by name."""

    kind: Kind
    target: int | str
    name: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    inside: list[Callback] = []
    result: Any = None
    at_s: float = 0.0
    """Monotonic, for readers: no core is told."""

    def __str__(self) -> str:
        return f"{self.kind} {self.target} {self.name}".strip()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def packed(record: Record) -> bytes:
    """As it stands in the file."""
    data = _encoder.encode(record)
    return _LENGTH.pack(len(data)) + data


def same(one: object, other: object) -> bool:
    """Whether two written values are equal: that which is not a number, too, equals itself."""
    return _encoder.encode(one) == _encoder.encode(other)


def records(file: Path) -> Iterator[Record]:
    """In order. What a process that died began to write last is left out."""
    with file.open("rb") as source:
        while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            data = source.read(length)
            if len(data) < length:
                return
            yield _decoder.decode(data)
