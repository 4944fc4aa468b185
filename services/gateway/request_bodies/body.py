"""Request bodies, declared as structs with bounds: every refusal names the parameter, what is allowed, and the value.

What a field may be is declared once, in its type; the decoder checks it, and the text of a refusal comes from the
same type (or from its ``description``, for anything but a plain scalar). ``null`` counts as absent, as with OpenAI:
declare fields as ``T | None = None``. Fields that are not declared are skipped, unread.

Tokenizing megabytes takes seconds, so a prompt that is too large for any message to a worker is refused by its length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, inspect

from shared.errors import BadRequest, PayloadTooLarge

T = TypeVar("T")

MAX_FIELD_BYTES = 1024 * 1024
"""Of one field's JSON, unless the field has a limit of its own."""
MAX_SHOWN_CHARACTERS = 80
"""Of a wrong value, in an error's message."""

_PATH = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>[0-9]+|\.\.\.)\]")


def read_body(body: bytes, type_: type[T]) -> T:
    """The JSON object in ``body`` as a struct. Raises ``BadRequest``, ``PayloadTooLarge``."""
    _refuse_large_fields(body, type_)
    value: T = read_json(body, type_, "")
    return value


def read_json(raw: bytes | Raw, type_: Any, name: str) -> Any:
    """JSON that is declared as ``type_``; ``name`` is the parameter that it is the value of. Raises ``BadRequest``."""
    try:
        return _decoder(type_).decode(raw)
    except msgspec.ValidationError as error:
        raise _refusal(error, type_, raw, name) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error, type_, bytes(raw), name) from error


def read_fields(body: bytes, names: tuple[str, ...]) -> tuple[bytes, ...]:
    """The JSON of some of an object's fields, as it came; empty where absent. Raises ``BadRequest``."""
    found = read_json(body, _raw_struct(names), "")
    return tuple(bytes(value) for value in msgspec.structs.astuple(found))


def required(value: T | None, name: str) -> T:
    """``value``, unless it is absent. Raises ``BadRequest``."""
    if value is None:
        raise BadRequest(f"{name} is required", param=name)
    return value


def refuse_many_elements(json: bytes, limit: int, param: str) -> None:
    """Raises ``BadRequest`` for more than ``limit`` fields and items. Commas inside of strings do not count.

    For before anything is made of them: a decoder looks at an array's length only behind its end."""
    # Far from the limit, which is nearly always, one look is enough.
    if json.count(b",") < limit:
        return
    plain = json.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * limit:
        raise _too_many(limit, param)
    if sum(piece.count(b",") for piece in plain.split(b'"')[::2]) >= limit:
        raise _too_many(limit, param)


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    if isinstance(value, _Unshown):
        return value.kind
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return f"an array of {len(value)}" if isinstance(value, list) else "an object"


def shown(value: object) -> str:
    """A value as an error shows it: short scalars as they are, of all else the type."""
    if isinstance(value, str) and len(value) > MAX_SHOWN_CHARACTERS:
        return f"a string of {len(value)} characters"
    if not isinstance(value, int | float | str):
        return kind_of(value)
    text = repr(value)
    return text if len(text) <= 2 * MAX_SHOWN_CHARACTERS else kind_of(value)


def _refuse_large_fields(body: bytes, type_: Any) -> None:
    """Before anything is made of them. A field that is declared as raw JSON has a limit of its own."""
    if len(body) <= MAX_FIELD_BYTES:
        return
    names = _bounded_names(type_)
    for name, raw in zip(names, read_fields(body, names), strict=True):
        if len(raw) > MAX_FIELD_BYTES:
            raise PayloadTooLarge(f"{name} has {len(raw)} bytes; at most {MAX_FIELD_BYTES} are allowed", param=name)


@lru_cache(maxsize=256)
def _decoder(type_: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type_)


@lru_cache(maxsize=256)
def _raw_struct(names: tuple[str, ...]) -> Any:
    return msgspec.defstruct("Fields", [(name, Raw, Raw(b"")) for name in names])


@lru_cache(maxsize=32)
def _bounded_names(type_: Any) -> tuple[str, ...]:
    fields = msgspec.structs.fields(type_)
    return tuple(field.encode_name for field in fields if field.type is not Raw)


def _refusal(error: msgspec.ValidationError, type_: Any, raw: bytes | Raw, name: str) -> BadRequest:
    match = _PATH.search(str(error))
    steps = list(_STEP.finditer(match["path"])) if match is not None else []
    declared: inspect.Type = inspect.type_info(type_)
    if not steps and not name:
        return BadRequest(f"the request body must be a JSON object, not {_kind_of_json(bytes(raw))}")
    value: Any = None
    if steps and steps[0]["name"]:
        # Only the field at fault is decoded: the rest may be megabytes.
        [found] = read_fields(bytes(raw), (steps[0]["name"],))
        value = {steps[0]["name"]: _plain(found)}
    elif len(bytes(raw)) <= MAX_FIELD_BYTES:
        value = _plain(bytes(raw))
    for step in steps:
        inner = _inside(declared, step)
        if inner is None or _description(declared):
            break
        declared = inner
        name += step[0] if name else step[0].removeprefix(".")
        value = _value_inside(value, step)
    holds_any = any(isinstance(_bare(member), inspect.AnyType | inspect.DictType) for member in _members(declared))
    if holds_any and "out of range" in str(error):
        # Where inside of it is not said.
        return BadRequest(f"{name} has a number that is too large for 64 bits", param=name)
    return BadRequest(f"{name} must be {_wanted(declared)}, not {shown(value)}", param=name)


_TO_LONE_SURROGATE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+(?=\\u[dD])",
    re.DOTALL,
)
MAX_SEARCHED_BYTES = 64 * 1024
_ESCAPE_CHARACTERS = 6
"""Of ``\\uXXXX``."""


def _not_json(error: Exception, type_: Any, raw: bytes, name: str) -> BadRequest:
    # Of a long body the place is not looked for: a search by ``re`` stops all threads.
    searched = isinstance(error, msgspec.DecodeError) and len(raw) <= MAX_SEARCHED_BYTES
    lone = _TO_LONE_SURROGATE.match(raw) if searched else None
    if lone is None:
        return BadRequest(f"{name or 'the request body'} is not valid JSON: {error}", param=name or None)
    # The decoder does not say where it is: it is in the field that differs if another character takes its place.
    at, end = lone.end(), lone.end() + _ESCAPE_CHARACTERS
    names = () if name else tuple(field.encode_name for field in msgspec.structs.fields(type_))
    try:
        one, other = (read_fields(raw[:at] + letter + raw[end:], names) for letter in (b"a", b"b"))
        name = next((field for field, x, y in zip(names, one, other, strict=True) if x != y), name)
    except BadRequest:
        pass  # more than this is wrong with it
    return BadRequest(
        f"{name or 'the request body'} has half of a surrogate pair, which is no character: "
        f"{raw[at:end].decode(errors='replace')} at byte {at}",
        param=name or None,
    )


def _plain(raw: bytes) -> Any:
    """A value as it is; what is nested too deeply, or beyond what Python takes, as what it is at least."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Unshown(_kind_of_json(raw))


class _Unshown:
    """A value that is only known by its kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def _kind_of_json(raw: bytes) -> str:
    first = raw.lstrip()[:1]
    kinds = {b"[": "an array", b"{": "an object", b'"': "a string", b"t": "a boolean", b"f": "a boolean", b"n": "null"}
    return kinds.get(first, "a number")


def _members(declared: inspect.Type) -> tuple[inspect.Type, ...]:
    """The alternatives of a type, null aside."""
    if isinstance(declared, inspect.UnionType):
        return tuple(member for member in declared.types if not isinstance(member, inspect.NoneType))
    return (declared,)


def _bare(declared: inspect.Type) -> inspect.Type:
    return declared.type if isinstance(declared, inspect.Metadata) else declared


def _description(declared: inspect.Type) -> str:
    """What the declaration itself says; empty if it says nothing."""
    for member in (declared, *_members(declared)):
        if isinstance(member, inspect.Metadata) and member.extra_json_schema:
            return str(member.extra_json_schema.get("description", ""))
    return ""


def _inside(declared: inspect.Type, step: re.Match[str]) -> inspect.Type | None:
    """The type of a field or an item, None where the path leads out of what is declared."""
    for member in map(_bare, _members(declared)):
        if step["name"] and isinstance(member, inspect.StructType):
            return next((field.type for field in member.fields if field.encode_name == step["name"]), None)
        if step["index"] and isinstance(member, inspect.ListType):
            return member.item_type
    return None


def _value_inside(value: Any, step: re.Match[str]) -> Any:
    if step["name"]:
        return value.get(step["name"]) if isinstance(value, dict) else None
    index = int(step["index"])
    return value[index] if isinstance(value, list) and index < len(value) else None


def _wanted(declared: inspect.Type) -> str:
    return _description(declared) or " or ".join(_wanted_of(member) for member in map(_bare, _members(declared)))


def _wanted_of(member: inspect.Type) -> str:
    if isinstance(member, inspect.BoolType):
        return "a boolean"
    if isinstance(member, inspect.IntType | inspect.FloatType):
        return _wanted_number(member)
    if isinstance(member, inspect.StrType):
        if member.max_length is not None:
            return f"a string of {member.min_length or 0} to {member.max_length} characters"
        return "a non-empty string" if member.min_length else "a string"
    if isinstance(member, inspect.LiteralType):
        return " or ".join(repr(value) for value in member.values)
    if isinstance(member, inspect.ListType):
        return "an array" if member.max_length is None else f"an array of at most {member.max_length}"
    return "an object"


def _wanted_number(member: inspect.IntType | inspect.FloatType) -> str:
    what = "an integer" if isinstance(member, inspect.IntType) else "a number"
    if member.gt is not None:
        return f"{what} above {member.gt:g} and at most {member.le or 0:g}"
    if member.ge is None:
        return what
    if member.le is None:
        return f"{what} from {member.ge}"
    if isinstance(member, inspect.IntType):
        return f"{what} from {member.ge} to {member.le}"
    return f"{what} from {member.ge:g} to {member.le:g}"


def _too_many(limit: int, param: str) -> BadRequest:
    return BadRequest(f"{param} has too many fields and items; at most {limit} are allowed", param=param)


_MAX_UTF8_BYTES = 4
"""Of one character."""


def refuse_large_text(text: str, *, max_bytes: int, param: str) -> None:
    """Raises ``PayloadTooLarge`` for one prompt's text of more than ``max_bytes`` in UTF-8."""
    if len(text) * _MAX_UTF8_BYTES <= max_bytes:
        return
    size_bytes = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    if size_bytes > max_bytes:
        raise PayloadTooLarge(
            f"a prompt of {size_bytes} bytes of text is too large; at most {max_bytes} are allowed", param=param
        )


def refuse_many_ids(count: int, *, max_bytes: int, param: str) -> None:
    """Raises ``PayloadTooLarge`` for more ids than ``max_bytes``: each takes a byte or more on the wire."""
    if count > max_bytes:
        raise PayloadTooLarge(
            f"a prompt of {count} token ids is too large; at most {max_bytes} bytes are allowed", param=param
        )


def refuse_unknown_ids(token_ids: Sequence[int], *, vocab_size: int, param: str) -> None:
    """Raises ``BadRequest`` for ids, at least one, that are not all in the vocabulary."""
    wrong = next((i for i in (min(token_ids), max(token_ids)) if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise BadRequest(f"{param}: token id {wrong} is outside 0..{vocab_size - 1}", param=param)
