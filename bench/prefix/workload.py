"""What is asked when: Poisson arrivals of prompts that share their beginnings in four ways. Pure.

A plan depends on its seed and the rate alone, so that all systems get the same. Lengths are in tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, count
from types import MappingProxyType

from shared.errors import BadRequest

TOKEN_IDS = range(10, 250)
OUTPUT_TOKENS = (16, 24)
_TOLERANCE = 0.1
"""Of the number of requests."""
_ASKED = 50, 150
"""What a request adds to what it shares."""
_TURNS = 3, 6
_FIRST_TURN = 150, 500
_THINK_S = 1.0, 3.0
"""Between the times of two turns."""
_NUM_SYSTEM_PROMPTS = 6
_SYSTEM_PROMPT = 300, 700
_ASKED_PER_DOCUMENT = 6
"""On average."""
_DOCUMENT = 700, 1300
_ZIPF = 1.0
_ALONE = 200, 1000


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. ``at_s`` since the plan's begin."""

    number: int
    at_s: float
    tokens: tuple[int, ...]
    """The prompt; of a later turn, what comes behind the answer before it."""
    output_tokens: int
    after: int | None = None
    """The number of the turn before: its prompt and its answer come first, and it must have been answered."""


Plan = tuple[Planned, ...]
"""In the order of time; numbers are places in it."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A request whose number is not known yet; ``before``: the turn before."""

    at_s: float
    tokens: tuple[int, ...]
    output_tokens: int
    before: _Drawn | None = None


def make_plan(workload: str, seed: int, per_s: float, seconds: float) -> Plan:
    """Requests at ``per_s`` for so long.

    Few requests are by chance many more or fewer than they are on average, conversations most of all: what is not
    within a tenth of that (or one request) is drawn again, so that each seed's load is the one that is said. Raises
    ``BadRequest`` for a workload that there is not, and for less than one request.
    """
    if workload not in WORKLOADS:
        raise BadRequest(f"workloads are {', '.join(WORKLOADS)}, not {workload!r}", param="workload")
    expected = per_s * seconds
    if expected < 1:
        raise BadRequest(f"{per_s:g} requests per second for {seconds:g} s are less than one", param="seconds")
    drawn: list[_Drawn] = []
    for attempt in count():
        draw = random.Random(f"{workload}/{seed}/{attempt}")
        drawn = sorted(WORKLOADS[workload](draw, per_s, seconds), key=lambda one: one.at_s)
        if drawn and abs(len(drawn) - expected) <= max(1.0, _TOLERANCE * expected):
            break
    numbers = {id(one): number for number, one in enumerate(drawn)}
    return tuple(
        Planned(
            number,
            one.at_s,
            one.tokens,
            one.output_tokens,
            numbers[id(one.before)] if one.before is not None else None,
        )
        for number, one in enumerate(drawn)
    )


def prompts(plan: Plan, seed: int) -> tuple[tuple[int, ...], ...]:
    """The whole prompts, with invented answers: to be asked all the same, without waiting for any."""
    draw = random.Random(f"answers/{seed}")
    found: list[tuple[int, ...]] = []
    for one in plan:
        before: tuple[int, ...] = ()
        if one.after is not None:
            before = (*found[one.after], *draw.choices(TOKEN_IDS, k=plan[one.after].output_tokens))
        found.append((*before, *one.tokens))
    return tuple(found)


def _times(draw: random.Random, per_s: float, begin_s: float, end_s: float) -> list[float]:
    times = []
    at_s = begin_s + draw.expovariate(per_s)
    while at_s < end_s:
        times.append(at_s)
        at_s += draw.expovariate(per_s)
    return times


def _text(draw: random.Random, length: tuple[int, int]) -> tuple[int, ...]:
    return tuple(draw.choices(TOKEN_IDS, k=draw.randint(*length)))


def _turns(draw: random.Random, per_s: float, seconds: float) -> list[_Drawn]:
    """Conversations of some turns. So that there are as many turns a second at the begin as later, some had begun
    before: these come with their history, which no instance has seen."""
    longest_s = (_TURNS[1] - 1) * _THINK_S[1]
    per_conversation = sum(_TURNS) / 2
    drawn = []
    for began_s in _times(draw, per_s / per_conversation, -longest_s, seconds):
        at_s = began_s
        unseen: tuple[int, ...] = ()
        before: _Drawn | None = None
        for turn in range(draw.randint(*_TURNS)):
            said = _text(draw, _ASKED if turn else _FIRST_TURN)
            output_tokens = draw.randint(*OUTPUT_TOKENS)
            if at_s < 0:
                unseen = (*unseen, *said, *draw.choices(TOKEN_IDS, k=output_tokens))
            elif at_s < seconds:
                before = _Drawn(at_s, (*unseen, *said), output_tokens, before)
                unseen = ()
                drawn.append(before)
            at_s += draw.uniform(*_THINK_S)
    return drawn


def _system(draw: random.Random, per_s: float, seconds: float) -> list[_Drawn]:
    """A few system prompts, some of them popular, each with a question of its own behind it."""
    return _about(draw, per_s, seconds, [_text(draw, _SYSTEM_PROMPT) for _ in range(_NUM_SYSTEM_PROMPTS)])


def _documents(draw: random.Random, per_s: float, seconds: float) -> list[_Drawn]:
    """Long documents that are asked about several times."""
    number = max(2, round(per_s * seconds / _ASKED_PER_DOCUMENT))
    return _about(draw, per_s, seconds, [_text(draw, _DOCUMENT) for _ in range(number)])


def _none(draw: random.Random, per_s: float, seconds: float) -> list[_Drawn]:
    """Nothing is shared."""
    return [
        _Drawn(at_s, _text(draw, _ALONE), draw.randint(*OUTPUT_TOKENS)) for at_s in _times(draw, per_s, 0.0, seconds)
    ]


def _about(draw: random.Random, per_s: float, seconds: float, shared: list[tuple[int, ...]]) -> list[_Drawn]:
    """Requests that begin with one of these, by a Zipf law."""
    bounds = list(accumulate(1 / (rank + 1) ** _ZIPF for rank in range(len(shared))))
    drawn = []
    for at_s in _times(draw, per_s, 0.0, seconds):
        (beginning,) = draw.choices(shared, cum_weights=bounds)
        drawn.append(_Drawn(at_s, beginning + _text(draw, _ASKED), draw.randint(*OUTPUT_TOKENS)))
    return drawn


WORKLOADS: Mapping[str, Callable[[random.Random, float, float], list[_Drawn]]] = MappingProxyType(
    {"turns": _turns, "system": _system, "documents": _documents, "none": _none}
)


def chosen(names: str) -> tuple[str, ...]:
    """Of a list with commas, in the order of the table. Raises ``BadRequest``."""
    asked = {name.strip() for name in names.split(",") if name.strip()}
    if not asked or not asked <= set(WORKLOADS):
        raise BadRequest(f"workloads must be of {', '.join(WORKLOADS)}, not {names!r}", param="workload")
    return tuple(name for name in WORKLOADS if name in asked)
