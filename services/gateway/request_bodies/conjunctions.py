"""What a schema asks of one value at once, through ``allOf``, ``anyOf``, ``oneOf`` and references.

Of expressions that must all hold, and of multiples, a product of automata is made, before any limit of llguidance's
counts: five multiples in an ``allOf`` took more than 40 s of CPU. So they are counted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

MAX_EXPRESSIONS = 4
"""Of one value: with 16 it takes a second to find out whether anything follows them all."""
MAX_MULTIPLE = 128
"""A multiple of 100,000 has an automaton with as many states."""
MAX_CONSTANTS = 256
"""Of which each is tried with the expressions and multiples of the same value: 0.3 ms."""

_EXPRESSIONS = ("format", "pattern")


@dataclass(frozen=True, slots=True)
class _Demands:
    """Of one value, at most."""

    expressions: int = 0
    multiple: int = 1
    constants: int = 0

    def beside(self, other: _Demands) -> _Demands:
        """Both hold."""
        multiple = math.lcm(self.multiple, other.multiple)
        return _Demands(
            self.expressions + other.expressions,
            min(multiple, MAX_MULTIPLE + 1),
            self.constants + other.constants,
        )

    @property
    def too_much(self) -> str:
        """Why it is; empty if it is not."""
        if self.expressions > MAX_EXPRESSIONS:
            return f"{self.expressions} expressions and formats must hold of one value; at most {MAX_EXPRESSIONS} may"
        if self.multiple > MAX_MULTIPLE:
            return f"a value must be a multiple of several numbers, whose digits come to more than {MAX_MULTIPLE}"
        if self.constants > MAX_CONSTANTS and (self.expressions or self.multiple > 1):
            return f"{self.constants} constants beside an expression or multiple; at most {MAX_CONSTANTS} may be"
        return ""

    def or_else(self, other: _Demands) -> _Demands:
        """One of them holds."""
        return _Demands(
            max(self.expressions, other.expressions),
            max(self.multiple, other.multiple),
            max(self.constants, other.constants),
        )


NONE = _Demands()


class Conjunctions:
    """Of the schemas of one document, by where they are."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        """``schemas``: by their pointers, as references have them."""
        self._schemas = schemas
        self._values: dict[str, _Demands] = {}
        self._insides: dict[str, _Demands] = {}
        self._all = reduce(_Demands.beside, map(_own, schemas.values()), NONE)

    def why_not(self, pointer: str) -> str:
        """What is too much of one value; empty if nothing is."""
        # What only one schema asks of members and items was looked at where these are.
        several = [demands for demands in self._parts_inside(pointer) if demands != NONE]
        return self._value(pointer).too_much or (reduce(_Demands.beside, several).too_much if several[1:] else "")

    def _value(self, pointer: str) -> _Demands:
        """What is asked of what is there."""
        found = self._values.get(pointer)
        if found is None:
            # A schema that refers to itself asks for nothing more by that.
            self._values[pointer] = NONE
            schema = self._schemas.get(pointer, {})
            parts = [_own(schema), *self._joined(schema, pointer, self._value)]
            found = self._values[pointer] = reduce(_Demands.beside, parts)
        return found

    def _inside(self, pointer: str) -> _Demands:
        """What is asked of a member or an item of it."""
        found = self._insides.get(pointer)
        if found is None:
            # A schema that is inside of itself is so as often as one likes.
            self._insides[pointer] = self._all
            found = self._insides[pointer] = reduce(_Demands.beside, self._parts_inside(pointer))
        return found

    def _parts_inside(self, pointer: str) -> list[_Demands]:
        schema = self._schemas.get(pointer, {})
        return [self._of_members(schema, pointer), *self._joined(schema, pointer, self._inside)]

    def _joined(self, schema: Mapping[str, Any], pointer: str, read: Callable[[str], _Demands]) -> Iterator[_Demands]:
        """Of each schema that holds for the same value."""
        if "$ref" in schema:
            yield read("#" if schema["$ref"] == "#/" else schema["$ref"])
        for index in range(len(schema.get("allOf", ()))):
            yield read(f"{pointer}/allOf/{index}")
        for keyword in ("anyOf", "oneOf"):
            places = [f"{pointer}/{keyword}/{index}" for index in range(len(schema.get(keyword, ())))]
            yield _one_of(map(read, places))

    def _of_members(self, schema: Mapping[str, Any], pointer: str) -> _Demands:
        def of(keyword: str, names: Iterable[object]) -> _Demands:
            places = [f"{pointer}/{keyword}/{name}" for name in names]
            return _one_of(self._value(place).or_else(self._inside(place)) for place in places)

        single = [f"{pointer}/{keyword}" for keyword in ("additionalProperties", "items") if keyword in schema]
        others = _one_of(self._value(place).or_else(self._inside(place)) for place in single)
        others = others.or_else(of("prefixItems", range(len(schema.get("prefixItems", ())))))
        # A member may be one by its name and by a pattern.
        named = of("properties", schema.get("properties", ()))
        return others.or_else(named.beside(of("patternProperties", schema.get("patternProperties", ()))))


def _own(schema: Any) -> _Demands:
    if not isinstance(schema, dict):
        return NONE
    return _Demands(
        sum(keyword in schema for keyword in _EXPRESSIONS),
        digits_of(schema["multipleOf"]) if "multipleOf" in schema else 1,
        len(schema.get("enum", ())),
    )


def _one_of(demands: Iterable[_Demands]) -> _Demands:
    return reduce(_Demands.or_else, demands, NONE)


def digits_of(multiple: float) -> int:
    """Those of a multiple without the zeros behind them, but for those before the point."""
    return int(f"{multiple:.15g}".replace(".", "").replace("-", ""))
