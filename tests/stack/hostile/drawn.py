"""Hostile messages, drawn by hypothesis from the message types themselves: true ones of the running stack with fields
changed, broken bytes, and headers and reply subjects that nobody should send."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from msgspec import inspect

from shared import subjects
from shared.bus.wire import ERROR_CODE, SERVICE_ERROR, TRACEPARENT
from shared.messages.codec import Message
from shared.messages.registry import InstanceInfo, ModelRecord, WorkerInfo
from shared.subjects import Process
from tests.stack.hostile.targets import Target

MAX_BYTES = 900_000
"""Of a message: well below the server's 1 MiB, with headers."""
MANY = 100_000
MAX_ROUNDS = 2


@dataclass(frozen=True)
class Facts:
    """True names and values of the stack under attack. ``names``: by the field that they may stand in."""

    workers: tuple[Process, ...]
    gateways: tuple[Process, ...]
    model: ModelRecord
    worker: WorkerInfo
    instance: InstanceInfo
    names: dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Shot:
    """One message, ready to send. ``reply``: None asks for an answer where the subject gives one."""

    target: Target
    subject: str
    payload: bytes
    headers: dict[str, str] | None = None
    reply: str | None = None

    def __str__(self) -> str:
        more = f" headers={str(self.headers)[:200]} reply={self.reply}" if self.headers or self.reply else ""
        try:
            said = repr(msgspec.msgpack.decode(self.payload))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            said = repr(self.payload)
        return f"{self.target.user} -> {self.subject}{more}: {said[:600]}"


INTS = st.sampled_from(
    [0, -1, 1, 2, 255, 2**31, -(2**31), 2**53, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**63, 2**64 - 1]
) | st.integers(min_value=-(2**63), max_value=2**64 - 1)
FLOATS = (
    st.sampled_from(
        [0.0, -0.0, -1.0, 1.5, float("nan"), float("inf"), float("-inf"), 1.8e308, -1e308, 5e-324, 1e18, 4e9, -4e9]
    )
    | st.floats()
)
TEXTS = st.sampled_from(
    ["", ".", "*", ">", "a.b", "a b", "a.*", "a.>", "$SYS.REQ", "_INBOX.pool.x", "../../etc/passwd", "/", "/proc/self",
     "\0", "a\0b", "\r\nPUB x 1\r\n", "é" * 40, "\U0001f600", "x" * 300, "x" * 70_000, "0", "-1", "nan", "auto", "None"]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # fmt: skip
BYTES = st.sampled_from([b"", b"\0", b"\xff" * 300, b"x" * 100_000]) | st.binary(max_size=64)
WRONG = st.sampled_from(
    [None, True, 3, -2.5, "text", b"bytes", [], {}, [1, "a", None], {"kind": "x"}, [[[[[]]]]], "\ud7ff", {1: 2}]
)


def weighted(*ways: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """One of them, each as often as its weight says."""
    return st.sampled_from([way for weight, way in ways for _ in range(weight)]).flatmap(lambda way: way)


def base(found: inspect.Type, name: str, facts: Facts) -> Any:
    """A message of the right types, with true names where it has any."""
    known = facts.names.get(name)
    match found:
        case inspect.StructType():
            for true in (facts.model, facts.worker, facts.instance):
                if found.cls is type(true):
                    return msgspec.to_builtins(true, builtin_types=(bytes,))
            fields = {f.encode_name: base(f.type, f.name, facts) for f in found.fields}
            return fields | ({found.tag_field: found.tag} if found.tag_field else {})
        case inspect.LiteralType():
            return found.values[0]
        case inspect.UnionType():
            return base(next(t for t in found.types if not isinstance(t, inspect.NoneType)), name, facts)
        case inspect.VarTupleType() | inspect.ListType():
            return [base(found.item_type, name, facts)]
        case inspect.TupleType():
            return [base(item, name, facts) for item in found.item_types]
        case inspect.DictType():
            return {base(found.key_type, name, facts): base(found.value_type, name, facts)}
        case inspect.StrType():
            return known[0] if known else f"a-{name}"
        case inspect.BytesType():
            return known[0] if known else b"\x01"
        case inspect.IntType():
            return known[0] if known else 1
        case inspect.FloatType():
            return (
                time.time() + (60.0 if name.startswith(("expires", "give_up")) else 0.0)
                if name[-5:] == "_at_s"
                else 1.0
            )
        case inspect.BoolType():
            return False
        case inspect.Metadata():
            return base(found.type, name, facts)
    raise TypeError(f"no message has {found}")


Path = tuple[Any, ...]


def places(found: inspect.Type, made: Any, path: Path = (), name: str = "") -> Iterator[tuple[Path, inspect.Type, str]]:
    """Every field in a message made by ``base``, however deep, with its type and name."""
    if path:
        yield path, found, name
    match found:
        case inspect.StructType():
            for field in found.fields:
                if isinstance(made, dict) and field.encode_name in made:
                    yield from places(field.type, made[field.encode_name], (*path, field.encode_name), field.name)
        case inspect.UnionType():
            for inner in found.types:
                if not isinstance(inner, inspect.NoneType) and made is not None:
                    yield from list(places(inner, made, path, name))[1 if path else 0 :]
        case inspect.VarTupleType():
            if made:
                yield from places(found.item_type, made[0], (*path, 0), name)
        case inspect.TupleType():
            for index, item in enumerate(found.item_types):
                yield from places(item, made[index], (*path, index), name)


def odd(found: inspect.Type, made: Any, name: str, facts: Facts) -> st.SearchStrategy[Any]:
    """Values for a field of that type: of the type, and none that anybody meant."""
    match found:
        case inspect.IntType():
            return INTS
        case inspect.FloatType():
            return FLOATS
        case inspect.StrType():
            known = facts.names.get(name)
            return TEXTS | st.sampled_from(known) if known else TEXTS
        case inspect.BytesType():
            return BYTES
        case inspect.BoolType():
            return st.booleans()
        case inspect.LiteralType():
            return st.sampled_from([*found.values, "nothing-known"])
        case inspect.UnionType():
            inner = next(t for t in found.types if not isinstance(t, inspect.NoneType))
            return st.none() | odd(inner, made, name, facts)
        case inspect.VarTupleType():
            item = made[0] if made else base(found.item_type, name, facts)
            each = max(1, len(msgspec.msgpack.encode(item)))
            counts = [0, 2, 3, 500, min(MANY, MAX_BYTES // 2 // each)]
            same = st.sampled_from(counts).map(lambda count: [item] * count)
            return same | st.lists(odd(found.item_type, item, name, facts), min_size=1, max_size=3)
        case inspect.TupleType():
            return st.tuples(*(odd(t, m, name, facts) for t, m in zip(found.item_types, made, strict=True))).map(list)
    return WRONG


def bodies(kind: type[Message], facts: Facts) -> st.SearchStrategy[bytes]:
    """True messages of a kind with up to four fields changed, also to what no such field may be."""
    info = inspect.type_info(kind)
    true = base(info, "", facts)
    found = list(places(info, true))
    if not found:
        return st.just(msgspec.msgpack.encode(true))
    ways = {path: odd(t, _at(true, path), name, facts) for path, t, name in found}

    def change(path: Path) -> st.SearchStrategy[tuple[Path, Any]]:
        return st.tuples(st.just(path), weighted((15, ways[path]), (1, WRONG)))

    one = st.sampled_from(list(ways)).flatmap(change)
    return st.builds(lambda changes, drop: _changed(true, changes, drop), st.lists(one, max_size=4), st.integers(0, 19))


def _at(made: Any, path: Path) -> Any:
    for step in path:
        made = made[step]
    return made


def _changed(true: Any, changes: list[tuple[Path, Any]], drop: int) -> bytes:
    made = copy.deepcopy(true)
    for number, (path, value) in enumerate(changes):
        try:
            inside = _at(made, path[:-1])
            if drop == number and isinstance(inside, dict):
                inside.pop(path[-1], None)
            else:
                inside[path[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue  # a change before took the place of what it was in
    return msgspec.msgpack.encode(made)


def _broken(drawn: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Cut, doubled, or with a byte changed."""

    def broken(body: bytes, at: int, byte: int, how: int) -> bytes:
        at %= len(body) + 1
        return (body[:at], body + body, body[:at] + bytes([byte]) + body[at + 1 :])[how]

    return st.builds(broken, drawn, st.integers(0, 2**20), st.integers(0, 255), st.integers(0, 2))


RAW = st.one_of(
    st.binary(max_size=200),
    WRONG.map(msgspec.msgpack.encode),
    WRONG.filter(lambda v: v != b"bytes").map(lambda v: json.dumps(v, default=str).encode()),
    st.sampled_from(
        [b"", b"\x91" * 5000, b"\x81\xa1a" * 5000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
         b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\xc1",
         b"\xa4\xff\xfe\xfd\xfc", b"\x00" * MAX_BYTES, b"{" * 5000, b"null"]
    ),
)  # fmt: skip

_HEADERS = st.sampled_from(
    [
            {TRACEPARENT: "00-" + "0" * 32 + "-" + "0" * 16 + "-00"},
            {TRACEPARENT: "ff-zz-!!-x"}, {TRACEPARENT: ""}, {TRACEPARENT: "x" * 60_000},
            {TRACEPARENT: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=" + "b" * 9000},
            {"baggage": "a=b," * 2000}, {ERROR_CODE: "internal", SERVICE_ERROR: "x"}, {"X": "\u00e9"},
            {"Nats-Msg-Id": "the-same"}, {"Nats-Expected-Last-Sequence": "1"}, {"Nats-Rollup": "all"},
            {"Nats-TTL": "1s"}, {"Status": "503"},
    ]
)  # fmt: skip
HEADERS = weighted((7, st.none()), (1, _HEADERS))


def replies(facts: Facts) -> st.SearchStrategy[str | None]:
    """Mostly none; else somebody's inbox, or a subject on which a service listens."""
    worker, gateway = facts.workers[0], facts.gateways[0]
    theirs = st.sampled_from(
        ["_INBOX.pool.aaaa", "_INBOX.gateway.aaaa.b", "nobody.listens", subjects.pool("heartbeat"),
         subjects.pool("snapshot"), subjects.planner("scale"), subjects.worker_submit(worker), subjects.load(),
         subjects.tokens(gateway), subjects.scale_records(), subjects.scale_plans(),
         subjects.worker_plans(worker),
         subjects.gateway_heartbeat(), "$JS.API.STREAM.INFO.BLITZ_PLANS", "$JS.ACK.BLITZ_PLANS.a.1.1.1.1.0"]
    )  # fmt: skip
    return weighted((7, st.none()), (1, theirs))


def addressed(target: Target, facts: Facts, dice: random.Random) -> str:
    """The subject, with the names of those that listen."""
    if not target.addressee:
        return target.subject
    process = dice.choice(facts.workers if target.addressee == "worker" else facts.gateways)
    return target.subject.replace("*", process.id, 1).replace("*", process.incarnation, 1)


def shots(target: Target, count: int, facts: Facts, *, without: Callable[[Shot, Facts], bool]) -> list[Shot]:
    """``count`` messages for a target, as hypothesis draws them, but those of which ``without`` says so."""
    true = bodies(target.takes, facts)
    payloads = weighted((8, true), (1, _broken(true)), (1, RAW))
    drawn: dict[tuple[bytes, str], Shot] = {}
    dice = random.Random(target.name)

    def keep(payload: bytes, headers: dict[str, str] | None, reply: str | None) -> None:
        shot = Shot(target, addressed(target, facts, dice), payload, headers, reply)
        if len(payload) <= MAX_BYTES and len(drawn) < count and not without(shot, facts):
            drawn.setdefault((payload, str((headers, reply))), shot)

    for round_number in range(MAX_ROUNDS):
        if len(drawn) < count:
            draw = settings(
                max_examples=count + count // 4, database=None, phases=[Phase.generate], deadline=None,
                suppress_health_check=list(HealthCheck),
            )(given(payloads, HEADERS, replies(facts))(keep))  # fmt: skip
            seed(round_number)(draw)()
    found = list(drawn.values())
    while len(found) < count:
        # Of a message without fields there are no more.
        found += found[: count - len(found)]
    return found
