"""What was decided of a model's instances and why, in words for people: made once, and shown the same everywhere."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.messages.codec import Message
from shared.messages.common import Count, Figure, Role

MAX_DECISIONS = 100
"""In one message."""
Words = Annotated[str, Meta(max_length=2000)]


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One decision on the number of a model's instances in a role. Repeats of it are left out."""

    at_s: Figure
    """Unix time."""
    model: str
    role: Role
    asked_by: Literal["load", "hand", "room", "drain"]
    """``room``: another model has requests and no worker; ``drain``: a worker is to be free."""
    seen: Words
    """The load and what it needs, or what was asked for."""
    asked: Count
    """Instances."""
    there: Count
    """Those that served or were on their way."""
    wanted: Count
    """As many as were asked for, within the bound."""
    bound: Words = ""
    """The limit that made ``wanted`` another number than ``asked``; empty: none."""
    outcome: Literal["load", "revive", "mutate", "drain", "keep", "refuse"]
    """``revive``: instances that drained serve on; ``keep``: the bound left nothing to do; ``refuse``: nothing could be
    done."""
    chosen: Words
    """What was chosen, and by what; of a refusal, why."""
    cost: Words = ""
    otherwise: Words
    """What would have been without it."""
    plan_id: str = ""
    """Of the scale operation that carries it out; its record says what came of it."""


class DecisionsMade(Message, frozen=True, kw_only=True, tag="decisions_made.v1"):
    """New decisions, oldest first: what a planner tells its successors."""

    decisions: Annotated[tuple[DecisionRecord, ...], Meta(max_length=MAX_DECISIONS)]


class ListDecisions(Message, frozen=True, kw_only=True, tag="list_decisions.v1"):
    """Ask the planner for the newest decisions on a model."""

    model: str
    until_s: Figure | None = None
    """Only those that were made by then (Unix time)."""
    limit: Annotated[int, Meta(ge=1, le=MAX_DECISIONS)] = 10


class Decisions(Message, frozen=True, kw_only=True, tag="decisions.v1"):
    """Newest first."""

    decisions: tuple[DecisionRecord, ...]


class GetVerdicts(Message, frozen=True, kw_only=True, tag="get_verdicts.v1"):
    """Ask the monitor what a model needs now."""

    model: str


class RoleVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a model needs now in one role on which its load decides."""

    role: Role
    desired: Count
    """Instances, with what is kept for later."""
    needed: Figure
    """Load in instances, before rounding."""
    there: Count
    """Those that serve or are on their way."""
    seen: Words
    """The load, what each part of it needs, and for what more are kept."""
    bound: Words = ""
    """The limit that made ``desired`` another number than the load asks for; empty: none."""


class Verdicts(Message, frozen=True, kw_only=True, tag="verdicts.v1"):
    """Of the roles on which a model's load decides; none: the monitor does not know the model yet."""

    roles: tuple[RoleVerdict, ...]
