"""Asks for the plan's scale operations, and counts what became of them: while everything dies, not all succeed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from bench.chaos.plan import ScaleWish
from bench.chaos.strike import now_s
from shared.errors import BlitzError
from shared.messages.scaling import ScaleRecord

Ask = Callable[[ScaleWish], Awaitable[ScaleRecord]]
"""Asks for one operation and waits for its end, within bounds. Raises ``BlitzError``."""


class Scaler:
    """``outcomes``: by role, direction where there was one, and end (``prefill out done``, ``decode unavailable``)."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.outcomes: Counter[str] = Counter()

    async def run(self, wishes: Sequence[ScaleWish], *, start_s: float) -> None:
        """Returns when all have ended. They may overlap."""
        async with asyncio.TaskGroup() as asking:
            for wish in wishes:
                await asyncio.sleep(max(0.0, start_s + wish.at_s - now_s()))
                asking.create_task(self._one(wish))

    async def _one(self, wish: ScaleWish) -> None:
        try:
            record = await self._ask(wish)
        except BlitzError as error:
            # The planner, the pool or the gateway is away, or does not know the operation any more.
            self.outcomes[f"{wish.role} {error.code}"] += 1
            return
        self.outcomes[f"{wish.role} {record.direction} {record.status}"] += 1
