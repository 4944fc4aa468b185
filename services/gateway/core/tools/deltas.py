"""What a parser of answers gives out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of the call number ``index`` of an answer. The first one of a call has its id and name, and no arguments;
    the others a piece of the arguments' JSON each."""

    index: int
    call_id: str
    name: str
    arguments: str


class ParsedText(NamedTuple):
    """What became certain with some text."""

    text: str
    """For the client."""
    calls: tuple[CallDelta, ...]
    thought: str = ""
    """Before both."""


NOTHING = ParsedText("", ())
