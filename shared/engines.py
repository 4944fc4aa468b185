"""What the control plane knows of engines, by the name that a model's record has: what their instances can do. An
instance takes requests and gives tokens, whatever computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import BadRequest

NO_ENGINE = "none"
"""A worker's own where it has none, and serves with those of others alone."""
MAX_SHOWN = 80
"""Characters of a wrong name, in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Of one engine, or of several that are alike in these."""

    lends_layers: bool
    """An instance computes layers for one that still loads: live scaling, in pairs."""
    moves_kv: bool
    """Requests go on at another instance with their KV: disaggregated serving, other roles, migration. Without it an
    instance that goes sends them back with the tokens that they have."""
    serves_early: bool = False
    """An instance may take requests before it has all weights: its first tokens come with the last of them."""
    start_s: float = 0.0
    """Longest that an instance may take to start, beside its weights."""


LAYERED = EngineTraits(lends_layers=True, moves_kv=True)
"""Our own, which models have by default: they compute layer by layer, whichever of them a worker has."""

OTHERS: Mapping[str, EngineTraits] = {
    "vllm": EngineTraits(
        lends_layers=False,
        moves_kv=False,
        serves_early=True,
        # It imports, compiles, and measures its memory.
        start_s=600.0,
    ),
}
"""Engines of others, by the names that models and workers give."""


def check_engine(name: str) -> None:
    """Raises ``BadRequest`` unless it is empty, for our own, or names one of the others."""
    if name and name not in OTHERS:
        raise BadRequest(
            f"there is no engine {name[:MAX_SHOWN]!r} beside the system's own, but {', '.join(OTHERS)}", param="engine"
        )


def offer_of(name: str) -> str:
    """A model's engine as what a worker may lack, in words, with the setting by which it gets it."""
    return f"the engine {name} (BLITZ_WORKER_ENGINES)" if name else "the system's own engine (BLITZ_WORKER_ENGINE)"


def traits_of(name: str) -> EngineTraits:
    """Of a registered model's engine. One that a newer pool knows, and this process does not, can do nothing but
    serve."""
    if not name:
        return LAYERED
    return OTHERS.get(name) or EngineTraits(lends_layers=False, moves_kv=False)
