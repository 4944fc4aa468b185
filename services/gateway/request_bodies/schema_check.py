"""Of a JSON schema, what is enforced: everything else is refused by its name, but for annotations.

What is enforced was tried keyword by keyword (``tests/services/gateway/request_bodies/test_schema_check.py``).
"""

from __future__ import annotations

from typing import Any

from services.gateway.request_bodies.body import shown
from services.gateway.request_bodies.conjunctions import MAX_MULTIPLE, Conjunctions, digits_of
from services.gateway.request_bodies.disjoint import Disjointness, with_tags
from services.gateway.request_bodies.expressions import check_expression

MAX_WEIGHT = 1024
"""Of a schema: its parts, and those of constants; bounds of numbers, formats and expressions count several times.
Compiling takes about 0.1 ms for each."""
MAX_DEPTH = 512
"""Schemas inside of each other, through references: each takes a few KiB of stack."""
MAX_VALUES = 4096
"""In all enums together."""
MAX_TEXT_BYTES = 1024
"""Of a name or a constant: what must be written as it is costs its length squared."""
MAX_ITEMS = 10_000
MAX_OPTIONAL = 240
"""Members of one object: each that may come next is four of the 1,000 items that a row may have."""
MAX_PATTERNS = 16
"""Of names: any two must be shown to have no name in common."""
MAX_ALTERNATIVES = 64
"""Of a ``oneOf``: any two are compared."""
MAX_COMPARED = 4096
"""Such pairs in all."""
_MAX_EXACT = 2**53

_SCHEMA = ("additionalProperties", "items")
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("$defs", "definitions", "patternProperties", "properties")
_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_OTHERS = ("$ref", "const", "enum", "format", "pattern", "required", "type")
ENFORCED = frozenset((*_SCHEMA, *_SCHEMAS, *_NAMED_SCHEMAS, *_NUMBERS, *_COUNTS, *_OTHERS))
ANNOTATIONS = frozenset(
    [
        "$comment", "$id", "$schema", "contentMediaType", "default", "deprecated", "description", "discriminator",
        "example", "examples", "externalDocs", "readOnly", "title", "writeOnly",
    ]
)  # fmt: skip
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_WEIGHTS = {"format": 6, "maximum": 6, "minimum": 6, "exclusiveMaximum": 6, "exclusiveMinimum": 6, "multipleOf": 12}
_WEIGHTS |= {"pattern": 6}


class SchemaError(ValueError):
    """A schema that cannot be enforced; ``path`` is where."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def enforced_schema(schema: Any) -> dict[str, Any]:
    """What of ``schema`` says how an answer must be, without its annotations. Raises ``SchemaError``."""
    schema = with_tags(schema)
    check = _Check(schema)
    cleaned = check.schema(schema, "", "#")
    check.references()
    return cleaned if isinstance(cleaned, dict) else {}


class _Check:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._weight = self._values = self._patterns = 0
        self._heights: dict[str, int] = {}
        """Of the schema at each place that a reference may name."""
        self._schemas: dict[str, dict[str, Any]] = {}
        self._paths: dict[str, str] = {}
        """Of these, by the same places."""
        self._references: dict[str, str] = {}
        self._one_ofs: list[tuple[str, list[Any]]] = []

    def schema(self, schema: Any, path: str, pointer: str) -> Any:
        """Without annotations. ``path`` as in messages, ``pointer`` as in references."""
        self._weigh(1, path)
        if isinstance(schema, bool):
            if not path and not schema:
                raise SchemaError(path, "false allows no answer")
            self._heights[pointer] = 1
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(path, f"a schema must be an object, not {shown(schema)}")
        self._schemas[pointer], self._paths[pointer] = schema, path
        cleaned: dict[str, Any] = {}
        heights = [0]
        for keyword, value in schema.items():
            if keyword in ANNOTATIONS:
                continue
            at = f"{path}.{keyword}"
            if keyword not in ENFORCED:
                raise SchemaError(at, f"the keyword {shown(keyword)} is not supported")
            self._weigh(_WEIGHTS.get(keyword, 0), at)
            cleaned[keyword] = self._keyword(keyword, value, schema, at, f"{pointer}/{keyword}", heights)
        self._heights[pointer] = 1 + max(heights)
        return cleaned

    def references(self) -> None:
        """Of what was seen, whether every reference leads to a schema, how deep they lead, and what needs them."""
        for at, reference in self._references.items():
            if reference not in self._heights:
                raise SchemaError(at, f"{shown(reference)} is no schema of this one")
        depth = self._heights["#"] + sum(self._heights[found] for found in set(self._references.values()))
        if depth > MAX_DEPTH:
            raise SchemaError("", f"schemas are nested {depth} deep; at most {MAX_DEPTH} are allowed")
        conjunctions = Conjunctions(self._schemas)
        for pointer, path in self._paths.items():
            why = conjunctions.why_not(pointer)
            if why:
                raise SchemaError(path, why)
        disjointness, num_compared = Disjointness(self._root), 0
        for at, alternatives in self._one_ofs:
            num_compared += len(alternatives) * (len(alternatives) - 1) // 2
            if num_compared > MAX_COMPARED:
                raise SchemaError(at, f"too many alternatives; at most {MAX_COMPARED} pairs of them may be in a schema")
            pairs = ((i, j) for j in range(len(alternatives)) for i in range(j))
            for i, j in pairs:
                if not disjointness.are_disjoint(alternatives[i], alternatives[j]):
                    raise SchemaError(at, f"{i} and {j} may both hold, which is not checked: use anyOf")

    def _weigh(self, weight: int, path: str) -> None:
        self._weight += weight
        if self._weight > MAX_WEIGHT:
            raise SchemaError(path, f"the schema is too large; at most {MAX_WEIGHT} parts are allowed")

    def _keyword(
        self, keyword: str, value: Any, schema: dict[str, Any], at: str, pointer: str, heights: list[int]
    ) -> Any:
        if keyword in _SCHEMA:
            return self._inner(value, at, pointer, heights)
        if keyword in _SCHEMAS:
            _check(isinstance(value, list) and value, at, "a non-empty array of schemas", value)
            if keyword == "oneOf":
                _check(len(value) <= MAX_ALTERNATIVES, at, f"an array of at most {MAX_ALTERNATIVES}", value)
                self._one_ofs.append((at, value))
            return [self._inner(v, f"{at}[{i}]", f"{pointer}/{i}", heights) for i, v in enumerate(value)]
        if keyword in _NAMED_SCHEMAS:
            _check(isinstance(value, dict), at, "an object", value)
            if keyword == "patternProperties":
                self._name_patterns(value, at)
            if keyword == "properties":
                optional = len(value) - sum(name in value for name in set(map(str, _list(schema.get("required")))))
                _check(
                    optional <= MAX_OPTIONAL, at, f"an object with at most {MAX_OPTIONAL} that are not required", value
                )
            for name in value:
                _text(name, at)
            return {n: self._inner(v, f"{at}.{n}", f"{pointer}/{n}", heights) for n, v in value.items()}
        if keyword in _NUMBERS:
            _check(_is_number(value), at, f"a number from -{_MAX_EXACT} to {_MAX_EXACT}", value)
            if keyword == "multipleOf":
                _multiple(value, at)
        elif keyword in _COUNTS:
            most = MAX_ITEMS if keyword.endswith(("Items", "Properties")) else _MAX_EXACT
            is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
            _check(is_count, at, f"an integer from 0 to {most}", value)
            if keyword == "minProperties":
                _min_properties(value, schema, at)
        else:
            self._other(keyword, value, at)
        return value

    def _inner(self, schema: Any, path: str, pointer: str, heights: list[int]) -> Any:
        cleaned = self.schema(schema, path, pointer)
        heights.append(self._heights[pointer])
        return cleaned

    def _other(self, keyword: str, value: Any, at: str) -> None:
        match keyword:
            case "$ref":
                _check(isinstance(value, str) and value[:1] == "#" and not set("~%") & set(value), at, "#/...", value)
                self._references[at] = "#" if value == "#/" else value
            case "const":
                self._constant(value, at)
            case "enum":
                _check(isinstance(value, list) and value, at, "a non-empty array", value)
                for item in value:
                    self._constant(item, at)
            case "format":
                _check(value in FORMATS, at, f"one of {', '.join(FORMATS)}", value)
            case "pattern":
                _expression(value, at)
            case "required":
                is_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
                _check(is_names, at, "an array of names", value)
                for name in value:
                    self._weigh(1, at)
                    _text(name, at)
            case "type":
                types = value if isinstance(value, list) and value else [value]
                _check(all(isinstance(t, str) and t in TYPES for t in types), at, f"of {', '.join(TYPES)}", value)

    def _name_patterns(self, patterns: dict[str, Any], at: str) -> None:
        self._patterns += len(patterns)
        _check(self._patterns <= MAX_PATTERNS, at, f"at most {MAX_PATTERNS} in a schema", patterns)
        for pattern in patterns:
            _expression(pattern, at)

    def _constant(self, value: Any, at: str) -> None:
        self._values += 1
        _check(self._values <= MAX_VALUES, at, f"at most {MAX_VALUES} constants in a schema", value)
        if isinstance(value, dict | list):
            self._weigh(1 + len(value), at)
            for inner in value.values() if isinstance(value, dict) else value:
                self._constant(inner, at)
            for name in value if isinstance(value, dict) else ():
                _text(name, at)
        elif isinstance(value, str):
            _text(value, at)
        elif value is not None and not isinstance(value, bool):
            _check(_is_number(value), at, f"a number from -{_MAX_EXACT} to {_MAX_EXACT}", value)


def _check(holds: object, at: str, wanted: str, value: Any) -> None:
    if not holds:
        raise SchemaError(at, f"must be {wanted}, not {shown(value)}")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MAX_EXACT <= value <= _MAX_EXACT


def _multiple(value: float, at: str) -> None:
    _check("e" not in f"{value:.15g}", at, "a number with few digits", value)
    is_taken = value > 0 and digits_of(value) <= MAX_MULTIPLE
    _check(is_taken, at, f"a positive number whose digits are at most {MAX_MULTIPLE}", value)


def _min_properties(least: int, schema: dict[str, Any], at: str) -> None:
    """More names than are required may be the same one twice."""
    most = 1 + len(set(map(str, _list(schema.get("required")))))
    _check(least <= most, at, f"at most {most}, one above what is required", least)


def _text(value: str, at: str) -> None:
    if len(value.encode()) > MAX_TEXT_BYTES:
        raise SchemaError(
            at, f"a text of {len(value)} characters is too long; at most {MAX_TEXT_BYTES} bytes are allowed"
        )


def _expression(value: Any, at: str) -> None:
    _check(isinstance(value, str), at, "a string", value)
    try:
        check_expression(value)
    except ValueError as error:
        raise SchemaError(at, str(error)) from error
