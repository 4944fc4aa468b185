"""Answers as models write them, read by a parser of calls in pieces of any length."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.gateway.core.tools.deltas import ParsedText
from services.gateway.core.tools.parser import ToolParser

NAMES = frozenset({"weather", "add", "send_mail", "now", "geo.find"})


@dataclass
class Read:
    """What came of a text: text for the client, and calls as (name, arguments)."""

    texts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    pieces: list[list[str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def calls(self) -> list[list[str]]:
        return [[name, "".join(pieces)] for name, pieces in zip(self.names, self.pieces, strict=True)]

    def add(self, parsed: ParsedText) -> None:
        self.texts.append(parsed.text)
        for delta in parsed.calls:
            if delta.name:
                assert delta.index == len(self.names)
                assert delta.arguments == ""
                self.names.append(delta.name)
                self.ids.append(delta.call_id)
                self.pieces.append([])
            else:
                assert delta.index == len(self.names) - 1
                assert delta.arguments
                self.pieces[-1].append(delta.arguments)


def parser_of(kind: type[ToolParser], *, parallel: bool = True) -> ToolParser:
    ids = itertools.count()
    return kind(NAMES, lambda: f"id{next(ids)}", parallel=parallel)


def read(parser: ToolParser, pieces: Iterable[str]) -> Read:
    found = Read()
    for piece in pieces:
        found.add(parser.push(piece))
    found.add(parser.flush())
    return found
