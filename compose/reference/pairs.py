"""What the machines of a pair know: the states of the pair and of its batches, what happens, and what is done."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from compose.reference.table import table
from services.worker.core.live import life, machine, source_words, target_words
from services.worker.core.live.batch import MOVES
from services.worker.core.live.machine import Machine
from services.worker.core.live.source import SourceMachine
from services.worker.core.live.target import TargetMachine


def pairs_page() -> str:
    """``docs/reference/pairs.md``."""
    states = (
        (f"`{a}`", ", ".join(f"`{b}`" for b in life.PairState if b in after)) for a, after in life.TRANSITIONS.items()
    )
    moves = ((f"`{a}`", f"`{b}`", when) for a, after in MOVES.items() for b, when in after.items())
    members = (("source", source_words, SourceMachine), ("target", target_words, TargetMachine))
    return (
        "".join(
            [
                "# The machines of a pair\n\n",
                "Of [live scaling](../live-scaling.md). A machine handles events and gives actions; what an action\n"
                "lands with is an event, too.\n\n",
                "## States of a pair, at either member\n\n",
                table(("state", "then"), states),
                "## Whose a batch is, as the source knows\n\n",
                table(("from", "to", "when"), moves),
                *(_member(name, module, made) for name, module, made in members),
            ]
        ).rstrip()
        + "\n"
    )


def _member(name: str, module: ModuleType, made: type[Machine]) -> str:
    events = ((f"`{event.__name__}`", _words(event)) for event in made.handlers)
    kinds = [kind for owner in (module, machine) for kind in _actions(owner) if owner is module or _used(kind, made)]
    actions = ((f"`{kind.__name__}`", "engine" if kind.on_engine else "event loop", _words(kind)) for kind in kinds)
    return "".join(
        [
            f"## The {name}\n\n",
            table(("event", "meaning"), events),
            table(("action", "where", "meaning"), actions),
        ]
    )


def _actions(module: ModuleType) -> list[Any]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, machine.Action) and value.__module__ == module.__name__
        if value is not machine.Action
    ]


def _used(kind: type, made: type[Machine]) -> bool:
    known = vars(sys.modules[made.__module__])
    return known.get(kind.__name__) is kind or kind is machine.RefuseQuestion


def _words(kind: type) -> str:
    return " ".join((kind.__doc__ or "").replace("``", "`").split())
