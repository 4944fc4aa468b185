"""300 ordinary schemas: what Pydantic makes of models that are drawn."""

from __future__ import annotations

import datetime
import enum
import random
import uuid
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field, create_model

_NAMES = [
    "name", "title", "count", "price", "tags", "kind", "created", "id", "owner", "address", "street", "city", "zip",
    "items", "score", "active", "note", "e-mail", "größe", "first name", "parent", "status", "level", "value",
]  # fmt: skip


class Color(enum.Enum):
    red = "red"
    green = "green"
    blue = 'b"l\\ue'


class Level(enum.IntEnum):
    low = 1
    high = 10


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: int
    children: list[Tree] = Field(max_length=3)


def _scalar(draw: random.Random) -> Any:
    low = draw.randint(-50, 50)
    return draw.choice(
        [
            str, int, float, bool, type(None), Color, Level, datetime.datetime, datetime.date, datetime.time, uuid.UUID,
            datetime.timedelta, EmailStrField, Tree,
            Literal["a", "b", "c d"], Literal[1, "x", None], Literal[True],
            Annotated[str, Field(min_length=draw.randint(0, 3), max_length=draw.randint(3, 40))],
            Annotated[str, Field(pattern=draw.choice(["^[a-z]{2,8}$", r"^\d{3}-\d{4}$", "^(yes|no)$", "[0-9]"]))],
            Annotated[str, Field(pattern="^[a-z]+( [a-z]+)*$", max_length=30)],
            Annotated[int, Field(ge=low, le=low + draw.randint(0, 1000))],
            Annotated[int, Field(gt=0)], Annotated[int, Field(multiple_of=draw.choice([2, 5, 10]))],
            Annotated[float, Field(ge=0, lt=draw.choice([1, 99.5, 0.001]))], Annotated[float, Field(le=low)],
        ]
    )  # fmt: skip


EmailStrField = Annotated[str, Field(json_schema_extra={"format": "email"})]


def _type(draw: random.Random, depth: int) -> Any:
    if depth <= 0 or draw.random() < 0.5:
        return _scalar(draw)
    inner = _type(draw, depth - 1)
    match draw.randrange(7):
        case 0:
            return Optional[inner]  # noqa: UP045 - made while it runs
        case 1:
            return list[inner]  # type: ignore[valid-type]
        case 2:
            return Annotated[list[inner], Field(min_length=1, max_length=draw.randint(1, 5))]  # type: ignore[valid-type]
        case 3:
            return dict[str, inner]  # type: ignore[valid-type]
        case 4:
            return Union[inner, _type(draw, depth - 1)]  # noqa: UP007
        case 5:
            return tuple[inner, _scalar(draw)]  # type: ignore[misc]
        case _:
            return _tagged(draw, depth) if draw.random() < 0.5 else model(draw, depth - 1)


def _tagged(draw: random.Random, depth: int) -> Any:
    kinds = [model(draw, depth - 1, kind=kind) for kind in ("cat", "dog", "fish")[: draw.randint(2, 3)]]
    return Annotated[Union[tuple(kinds)], Field(discriminator="kind")]  # noqa: UP007 - made while it runs


def model(draw: random.Random, depth: int, kind: str = "") -> type[BaseModel]:
    fields: dict[str, Any] = {"kind": (Literal[kind], ...)} if kind else {}
    for number, alias in enumerate(draw.sample(_NAMES, draw.randint(1, 5))):
        if kind and alias == "kind":
            continue
        default = draw.choice([..., ..., None])
        fields[f"f{number}"] = (_type(draw, depth), Field(default, alias=alias, description="of it", examples=[1]))
    extra = draw.choice(["forbid", "forbid", "ignore"])
    config = ConfigDict(extra=extra, title=f"M{draw.randrange(10**9)}")
    return create_model(f"M{draw.randrange(10**9)}", __config__=config, **fields)


def schemas(count: int = 300) -> list[dict[str, Any]]:
    """The same ones each time."""
    draw = random.Random(7)
    return [model(draw, draw.randint(0, 3)).model_json_schema() for _ in range(count)]
