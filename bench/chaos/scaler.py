"""Asks for the plan's operations, and counts what became of them: while everything dies, not all succeed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from bench.chaos.injected_fault import now_s
from bench.chaos.plan import DrainWish, ScaleWish, ServingWish, Wish
from shared.errors import BlitzError

Ask = Callable[[Wish], Awaitable[str]]
"""Asks for one operation and waits for its end, within bounds; how it ended. Raises ``BlitzError``."""


PATIENCE_S = 6.0
"""An operation that is refused because somebody is away is asked for again for so long."""
_AGAIN_S = 0.3


class Scaler:
    """``outcomes``: by what was asked for and how it ended (``prefill out done``, ``decode unavailable``)."""

    def __init__(self, ask: Ask, *, patience_s: float = PATIENCE_S) -> None:
        self._ask = ask
        self._patience_s = patience_s
        self.outcomes: Counter[str] = Counter()

    async def run(self, wishes: Sequence[Wish], *, start_s: float) -> None:
        """Returns when all have ended. They may overlap."""
        async with asyncio.TaskGroup() as asking:
            for wish in wishes:
                await asyncio.sleep(max(0.0, start_s + wish.at_s - now_s()))
                asking.create_task(self._one(wish))

    async def _one(self, wish: Wish) -> None:
        deadline_s = now_s() + self._patience_s
        while True:
            try:
                ended = await self._ask(wish)
            except BlitzError as error:
                # The planner, the pool or the gateway is away, or does not know the operation any more.
                if now_s() >= deadline_s:
                    self.outcomes[f"{name_of(wish)} {error.code}"] += 1
                    return
                await asyncio.sleep(_AGAIN_S)
                continue
            self.outcomes[f"{name_of(wish)} {ended}"] += 1
            return


def name_of(wish: Wish) -> str:
    """What is asked for, for people."""
    match wish:
        case ScaleWish():
            return wish.role
        case ServingWish():
            return wish.serving
        case DrainWish():
            return "drain"
