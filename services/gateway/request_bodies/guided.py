"""What an answer must be, in whichever of its forms a request says so: as a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from services.gateway.request_bodies.body import read_json, refuse_many_elements, required, shown
from services.gateway.request_bodies.expressions import check_expression, check_lark
from services.gateway.request_bodies.schema_check import SchemaError, enforced_schema
from shared.errors import BadRequest, PayloadTooLarge, UnsupportedParameter
from shared.messages.generation import MAX_GRAMMAR_BYTES, Grammar

MAX_FIELD_JSON_BYTES = 2 * MAX_GRAMMAR_BYTES
"""Of a field; a schema may also come as a string, with escapes."""
MAX_ELEMENTS = 16_384
MAX_CHOICES = 4096
MAX_CHOICE_BYTES = 1024
"""Forced text costs its length squared."""
MAX_PARAM_CHARACTERS = 256
"""Of the path into a schema, whose names a client has given."""
_LONGEST_UNSET_BYTES = 16

SchemaName = Annotated[
    str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$", description="1 to 64 letters, digits, underscores and hyphens")
]


class JsonSchemaFormat(msgspec.Struct):
    """OpenAI's ``json_schema``. ``strict`` or not, the schema is followed."""

    name: SchemaName | None = None
    description: str | None = None
    schema: Raw = Raw(b"null")
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's ``response_format``."""

    type: str | None = None
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's ``structured_outputs``."""

    json: Raw = Raw(b"null")
    regex: Raw = Raw(b"null")
    choice: Raw = Raw(b"null")
    grammar: Raw = Raw(b"null")
    json_object: bool | None = None
    structural_tag: Raw = Raw(b"null")
    whitespace_pattern: Raw = Raw(b"null")
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class GuidedFields(msgspec.Struct, kw_only=True):
    """The fields that say what an answer must be. At most one of them may."""

    response_format: Raw = Raw(b"null")
    guided_json: Raw = Raw(b"null")
    guided_regex: Raw = Raw(b"null")
    guided_choice: Raw = Raw(b"null")
    guided_grammar: Raw = Raw(b"null")
    structured_outputs: Raw = Raw(b"null")


@dataclass(frozen=True, slots=True)
class Guide:
    """A grammar, and the parameter that it came from."""

    grammar: Grammar
    param: str


JSON_OBJECT = Grammar(kind="json_schema", text='{"type":"object"}')


class FlatFormat(JsonSchemaFormat):
    """A format beside its schema, as other routes than chats have it."""

    type: str | None = None


def read_format(json: bytes, name: str) -> Guide | None:
    """``{"type": "text" | "json_object" | "json_schema", "schema": ...}``. Raises as ``read_guide``."""
    return _read(json, name, _flat_format)


def _flat_format(json: bytes, name: str) -> Guide | None:
    read: FlatFormat = read_json(json, FlatFormat, name)
    kind = required(read.type, f"{name}.type")
    if kind == "json_schema":
        return _schema(bytes(read.schema), f"{name}.schema")
    return _plain_format(kind, name)


def read_guide(body: GuidedFields) -> Guide | None:
    """None: the answer may be any text. Checks all but what compiling it finds (``check_grammar``).

    Raises ``BadRequest``, ``UnsupportedParameter`` and ``PayloadTooLarge``, naming the parameter."""
    found = [guide for name, read in _READERS.items() if (guide := _read(bytes(getattr(body, name)), name, read))]
    if len(found) > 1:
        names = " and ".join(guide.param.partition(".")[0] for guide in found)
        raise BadRequest(f"only one of {names} may be given", param=found[1].param)
    return found[0] if found else None


Reader = Callable[[bytes, str], Guide | None]


def _read(json: bytes, name: str, read: Reader) -> Guide | None:
    # What other systems take for absent, as elsewhere.
    if len(json) <= _LONGEST_UNSET_BYTES and not read_json(json, Any, name):
        return None
    if len(json) > MAX_FIELD_JSON_BYTES:
        raise PayloadTooLarge(f"{name} has {len(json)} bytes; at most {MAX_FIELD_JSON_BYTES} are allowed", param=name)
    refuse_many_elements(json, MAX_ELEMENTS, name)
    return read(json, name)


def _response_format(json: bytes, name: str) -> Guide | None:
    read: ResponseFormat = read_json(json, ResponseFormat, name)
    kind = required(read.type, f"{name}.type")
    if kind != "json_schema":
        return _plain_format(kind, name)
    schema = required(read.json_schema, f"{name}.json_schema")
    return _schema(bytes(schema.schema), f"{name}.json_schema.schema")


def _plain_format(kind: str, name: str) -> Guide | None:
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide(JSON_OBJECT, name)
    raise UnsupportedParameter(
        f"{name}: {shown(kind)} is not supported (text, json_object and json_schema are)", param=name
    )


def _schema(json: bytes, name: str) -> Guide:
    value = read_json(json, Any, name)
    if isinstance(value, str):
        value = read_json(value.encode(errors="surrogatepass"), Any, name)
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be a JSON schema, not {shown(value)}", param=name)
    text = msgspec.json.encode(read_schema(value, name)).decode()
    return Guide(bounded_grammar("json_schema", text, name), name)


def read_schema(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What of a JSON schema is enforced. Raises ``BadRequest`` for what of it would not be, naming where."""
    try:
        return enforced_schema(value)
    except SchemaError as error:
        at = (name + error.path)[:MAX_PARAM_CHARACTERS]
        raise BadRequest(f"{at}: {error}", param=at) from error
    except RecursionError as error:
        raise BadRequest(f"{name} is nested too deeply", param=name) from error


def _regex(json: bytes, name: str) -> Guide:
    text: str = read_json(json, _Text, name)
    try:
        check_expression(text)
    except ValueError as error:
        raise BadRequest(f"{name}: {error}", param=name) from error
    return Guide(bounded_grammar("regex", text, name), name)


def _choice(json: bytes, name: str) -> Guide:
    choices: list[str] = read_json(json, _Choices, name)
    for choice in choices:
        if len(choice.encode()) > MAX_CHOICE_BYTES:
            raise BadRequest(
                f"{name}: a choice of {len(choice)} characters is too long; at most {MAX_CHOICE_BYTES} bytes may be",
                param=name,
            )
    return Guide(bounded_grammar("choice", msgspec.json.encode(choices).decode(), name), name)


def _grammar(json: bytes, name: str) -> Guide:
    text: str = read_json(json, _Text, name)
    try:
        check_lark(text)
    except ValueError as error:
        raise BadRequest(f"{name}: {error}", param=name) from error
    return Guide(bounded_grammar("lark", text, name), name)


def _json_object(json: bytes, name: str) -> Guide | None:
    return Guide(JSON_OBJECT, name) if read_json(json, bool | None, name) else None


def _structured_outputs(json: bytes, name: str) -> Guide | None:
    read: StructuredOutputs = read_json(json, StructuredOutputs, name)
    for option in ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        value = getattr(read, option)
        if value and bytes(value if isinstance(value, Raw) else b"true") != b"null":
            raise UnsupportedParameter(f"{name}.{option} is not supported", param=f"{name}.{option}")
    inner = {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar}
    given = [key for key in inner if bytes(getattr(read, key)) != b"null"]
    given += ["json_object"] if read.json_object else []
    if len(given) != 1:
        what = " and ".join(f"{name}.{key}" for key in given) or "nothing"
        raise BadRequest(
            f"{name} must have one of json, regex, choice, grammar and json_object, not {what}", param=name
        )
    [key] = given
    if key == "json_object":
        return Guide(JSON_OBJECT, f"{name}.{key}")
    return inner[key](bytes(getattr(read, key)), f"{name}.{key}")


def bounded_grammar(kind: Any, text: str, name: str) -> Grammar:
    """Raises ``PayloadTooLarge`` naming the parameter."""
    size_bytes = len(text.encode())
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise PayloadTooLarge(f"{name} has {size_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", param=name)
    return Grammar(kind=kind, text=text)


_READERS: dict[str, Reader] = {
    "response_format": _response_format,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured_outputs,
}
_Text = Annotated[str, Meta(min_length=1)]
_Choices = Annotated[
    list[Annotated[str, Meta(min_length=1)]],
    Meta(
        min_length=1,
        max_length=MAX_CHOICES,
        description=f"a non-empty array of at most {MAX_CHOICES} non-empty strings",
    ),
]
