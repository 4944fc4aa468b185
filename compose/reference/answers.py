"""The JSON of the administration routes and of profiles: the structs, with what stands below each field."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

import msgspec
from msgspec import inspect as types

from compose.reference.table import table
from shared.messages.admin import (
    AddModelBody,
    ModelStatus,
    PoolStatus,
    ScaleBody,
    SetModelBody,
    Status,
    TrafficStatus,
    WhyStatus,
)
from shared.messages.operations import ScaleRecord
from shared.messages.registry import GpuTimeReport
from shared.profile import Profile

Struct = type[msgspec.Struct]
_PAGES: tuple[tuple[str, Struct], ...] = (
    ("`POST /admin/models`: the body", AddModelBody),
    ("`PATCH /admin/models/{name}`: the body", SetModelBody),
    ("`POST /admin/models/{name}/scale`: the body", ScaleBody),
    ("`GET /admin/models`: each model", ModelStatus),
    ("`GET /admin/status`", Status),
    ("`GET /admin/pool`", PoolStatus),
    ("`GET /admin/traffic`", TrafficStatus),
    ("`GET /admin/gpu_time`", GpuTimeReport),
    ("`GET /admin/why/{name}`", WhyStatus),
    ("`GET /admin/scale/{plan_id}`: the record", ScaleRecord),
    ("Profiles", Profile),
)
_ENDLESS = 1e9
_PLAIN: dict[type, str] = {
    types.StrType: "string", types.IntType: "integer", types.FloatType: "number", types.BoolType: "boolean",
    types.NoneType: "null",
}  # fmt: skip


def answers_page() -> str:
    """``docs/reference/answers.md``. A struct stands below the first one that has it."""
    parts = ["# JSON of the administration routes and of profiles\n\n"]
    described: set[Struct] = set()
    for title, first in _PAGES:
        parts.append(f"## {title}\n\n")
        waiting = [first]
        while waiting:
            struct = waiting.pop(0)
            if struct in described:
                continue
            described.add(struct)
            told = _told(struct)
            rows = []
            for field in msgspec.structs.fields(struct):
                kind = types.type_info(field.type)
                waiting += _structs(kind)
                rows.append((f"`{field.encode_name}`", _shown(kind), told.get(field.name, "")))
            parts += [f"### {struct.__name__}\n\n", _first_words(struct), table(("field", "type", "meaning"), rows)]
    return "".join(parts).rstrip() + "\n"


def _told(struct: Struct) -> dict[str, str]:
    """What stands below the fields, those of the structs that it is made from included."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__[:-1]):
        if not base.__module__.startswith("shared."):
            continue
        name = ""
        for node in _class(base).body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    pass
                case ast.Expr(value=ast.Constant(value=str(text))) if name:
                    found[name] = _markdown(text)
    return found


def _class(struct: type) -> ast.ClassDef:
    made = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(made, ast.ClassDef)
    return made


def _first_words(struct: Struct) -> str:
    text = _markdown(struct.__doc__ or "").replace("See the module.", "")
    return f"{text}\n\n" if text else ""


def _markdown(text: str) -> str:
    return re.sub(r"\bNone\b", "null", " ".join(text.replace("``", "`").split()))


def _shown(kind: Any) -> str:
    """A type as a reader of JSON calls it."""
    match kind:
        case types.LiteralType(values=values):
            return ", ".join(f"`{value}`" if value else "empty" for value in values)
        case types.VarTupleType(item_type=item):
            return f"list of {_shown(item)}"
        case types.DictType():
            return "object"
        case types.Metadata(type=described):
            return _shown(described)
        case types.StructType(cls=struct):
            return f"[{struct.__name__}](#{struct.__name__.lower()})"
        case types.UnionType(types=members):
            return " or ".join(_shown(member) for member in members)
        case types.IntType() | types.FloatType():
            return _PLAIN[type(kind)] + _bounds(kind)
    return _PLAIN[type(kind)]


def _bounds(kind: types.IntType | types.FloatType) -> str:
    """Of a number; empty where none would ever be met."""
    most = kind.le if kind.le is not None and kind.le < _ENDLESS else None
    if kind.gt is not None:
        return f" > {kind.gt:.12g}" + ("" if most is None else f", ≤ {most:.12g}")
    if kind.ge is not None:
        return f" ≥ {kind.ge:.12g}" if most is None else f" from {kind.ge:.12g} to {most:.12g}"
    return ""


def _structs(kind: Any) -> list[Struct]:
    match kind:
        case types.VarTupleType(item_type=item):
            return _structs(item)
        case types.StructType(cls=struct):
            return [struct]
        case types.UnionType(types=members):
            return [struct for member in members for struct in _structs(member)]
    return []
