"""Who comes first in a round: what was asked for by hand, models with nothing, then who waits for longest. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shared.messages.common import Role
from shared.messages.registry import WorkerRecord

W = TypeVar("W")


class Wanted(Protocol):
    """What a request has to say for itself."""

    @property
    def model(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def triggered_at_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Asked(Generic[W]):
    """Something that waits, and what it asks for."""

    item: W
    request: Wanted
    by_hand: bool


def in_order(asked: Iterable[Asked[W]], workers_of: Callable[[str], Sequence[WorkerRecord]]) -> list[W]:
    """``workers_of``: those that have an instance of a model, or are leased for one."""

    def rank(one: Asked[W]) -> tuple[bool, bool, float, str, str]:
        request = one.request
        return not one.by_hand, bool(workers_of(request.model)), request.triggered_at_s, request.model, request.role

    return [one.item for one in sorted(asked, key=rank)]
