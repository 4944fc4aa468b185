"""What an answer is to be: a model with a union."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Circle(BaseModel):
    """A circle."""

    kind: Literal["circle"]
    radius: int


class Square(BaseModel):
    """A square."""

    kind: Literal["square"]
    side: int


class Drawing(BaseModel):
    """A drawing of one shape."""

    name: Literal["sketch", "plan"]
    shape: Circle | Square
