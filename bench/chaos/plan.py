"""What is done to the stack and when: kills and scale operations, all of it decided by the seed before it begins."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shared.errors import BadRequest
from shared.messages.common import LiveChoice, Role, Serving

OwnKind = Literal["worker", "planner", "monitor", "pool", "nats", "redis", "gateway"]
VllmKind = Literal["vllm_front", "vllm_core", "vllm_worker", "vllm_idle", "vllm_gate"]
Kind = OwnKind | VllmKind
KINDS: tuple[OwnKind, ...] = get_args(OwnKind)
"""What the stack itself consists of."""
VLLM_KINDS: tuple[VllmKind, ...] = get_args(VllmKind)
"""What a worker's vLLM consists of: our process in front of an engine, the engine's core, its worker, which computes;
a process that imports, or has imported and waits; and the one that computes, while requests wait in it for weights."""
MOMENTS: tuple[VllmKind, ...] = ("vllm_gate",)
"""What is seldom there, and is waited for."""
How = Literal["KILL", "TERM", "STOP"]

STOPPED_S = (5.0, 8.0)
"""How long a stopped process stays so."""
STANDS_STILL_S = 60.0
"""How long one NATS server of several does: longer than everything that gives others up."""
DRAINED_S = (2.0, 6.0)
"""How long a worker is out of use."""
_JITTER = (0.5, 1.5)
"""Of the time between two kills."""
_LIVE: tuple[LiveChoice, ...] = ("auto", "always", "never")
_SERVING: tuple[Serving, ...] = ("colocated", "disaggregated")


@dataclass(frozen=True, slots=True)
class Kill:
    """One signal to one member. ``at_s`` counts from the start of the chaos."""

    at_s: float
    kind: str
    member: str
    """Whom; if it is not running then, the next one of its kind that is."""
    how: How
    stopped_s: float = 0.0
    """With ``STOP``: how long until it is continued."""


@dataclass(frozen=True, slots=True)
class ScaleWish:
    """One scale operation to ask for."""

    at_s: float
    model: str
    role: Role
    instances: int
    live: LiveChoice


@dataclass(frozen=True, slots=True)
class ServingWish:
    """Serve a model another way from now on: its instances change roles under their requests."""

    at_s: float
    model: str
    serving: Serving


@dataclass(frozen=True, slots=True)
class DrainWish:
    """Take a worker out of use for a while: its requests move."""

    at_s: float
    worker: str
    for_s: float


Wish = ScaleWish | ServingWish | DrainWish


@dataclass(frozen=True, slots=True)
class Scalable:
    """What may be scaled: a model's instances of one role, between two numbers."""

    model: str
    role: Role
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class ClockStep:
    """A member's wall clock is set to be so far ahead (below 0: behind)."""

    at_s: float
    member: str
    ahead_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is done, in the order of time."""

    kills: tuple[Kill, ...]
    wishes: tuple[Wish, ...]
    steps: tuple[ClockStep, ...] = ()


def kind_of(name: str) -> str:
    """``worker-3`` is a worker."""
    return name.partition("-")[0]


def worker_of(name: str) -> str:
    """Of which worker a process is a part: ``worker-3`` and ``vllm_core-3`` of ``worker-3``; empty: of none."""
    kind, _, index = name.partition("-")
    return f"worker-{index}" if kind in ("worker", *VLLM_KINDS) else ""


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """``worker,planner`` as kinds; a kind named twice is killed twice as often. Raises ``BadRequest``."""
    kinds: list[Kind] = []
    known = (*KINDS, *VLLM_KINDS)
    for part in text.split(","):
        found = next((kind for kind in known if kind == part.strip()), None)
        if found is None:
            raise BadRequest(f"--kill takes some of {', '.join(known)}, not {part.strip()!r}", param="kill")
        kinds.append(found)
    return tuple(kinds)


def make_plan(
    seed: int,
    *,
    seconds: float,
    every_s: float,
    kinds: Sequence[Kind],
    members: Sequence[str],
    how: How,
    scalables: Sequence[Scalable],
    switched: Sequence[str] = (),
    drained: Sequence[str] = (),
    skewed: Sequence[str] = (),
    skew_s: float = 0.0,
) -> Plan:
    """The same for the same arguments. ``members``: names of the stack's processes. ``switched``: models that are
    served the one way and the other. ``drained``: workers that may be taken out of use. ``skewed``: whose clocks are
    set ahead by ``skew_s``, and then behind by as much, one after the other.

    Of several NATS servers one is killed or, in turn, stands still for ``STANDS_STILL_S``.

    Every kind has its turn in a random order before any has it again. Between two kills something is asked for: a scale
    operation, another way to serve, or a worker's drain. Raises ``BadRequest`` for a kind without members.
    """
    of_kind = {kind: sorted(name for name in members if kind_of(name) == kind) for kind in kinds}
    for kind, names in of_kind.items():
        if not names:
            raise BadRequest(f"the stack has no {kind} to kill", param="kill")
    # Streams of their own: another number of models changes no kill.
    killing, scaling = random.Random(f"kills-{seed}"), random.Random(f"scales-{seed}")
    turns = _turns(killing, kinds)
    kills: list[Kill] = []
    wishes: list[Wish] = []
    at_s = 0.0
    while True:
        gap_s = every_s * killing.uniform(*_JITTER)
        if at_s + gap_s > seconds:
            return Plan(tuple(kills), tuple(wishes), _steps(seconds, skewed, skew_s))
        if scalables:
            wishes.append(_wish(scaling, at_s + gap_s * scaling.random(), scalables, switched, drained))
        at_s += gap_s
        kind = next(turns)
        stopped_s = killing.uniform(*STOPPED_S)
        member = killing.choice(of_kind[kind])
        still = kind == "nats" and len(of_kind[kind]) > 1 and sum(kill.kind == "nats" for kill in kills) % 2 == 0
        if still:
            kills.append(Kill(at_s, kind, member, "STOP", STANDS_STILL_S))
        else:
            kills.append(Kill(at_s, kind, member, how, stopped_s if how == "STOP" else 0.0))


def _steps(seconds: float, members: Sequence[str], skew_s: float) -> tuple[ClockStep, ...]:
    """Each in turn is ahead, then behind; the next one's turn sets it right."""
    turn_s = seconds / max(1, 2 * len(members))
    steps: list[ClockStep] = []
    for index, member in enumerate(members):
        at_s = 2 * index * turn_s
        steps += [ClockStep(at_s, member, skew_s), ClockStep(at_s + turn_s, member, -skew_s)]
        steps.append(ClockStep(at_s + 2 * turn_s, member, 0.0))
    return tuple(steps)


def _turns(rng: random.Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    while True:
        yield from rng.sample(list(kinds), len(kinds))


def _wish(
    rng: random.Random, at_s: float, scalables: Sequence[Scalable], switched: Sequence[str], drained: Sequence[str]
) -> Wish:
    kinds = ["scale", *["serving"][: len(switched)], *["drain"][: len(drained)]]
    # Without a choice nothing is drawn: the plans of one seed stay as they are.
    kind = rng.choice(kinds) if len(kinds) > 1 else "scale"
    if kind == "serving":
        return ServingWish(at_s, rng.choice(switched), rng.choice(_SERVING))
    if kind == "drain":
        return DrainWish(at_s, rng.choice(drained), rng.uniform(*DRAINED_S))
    what = rng.choice(list(scalables))
    return ScaleWish(at_s, what.model, what.role, rng.randint(what.low, what.high), rng.choice(_LIVE))
