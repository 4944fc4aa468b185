"""Scale operations by hand, and how soon every gateway uses what they make.

Each is made on a model without an instance, for which a request waits at every gateway. A gateway sends it on when it
knows the route: so the time between a worker's report that it serves and the last gateway's request there is the time
after which all gateways know.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.control.load import Clients
from compose.admin import AdminClient
from shared.errors import BlitzError

_PARK_S = 0.03
"""Before the operation: the requests are at the gateways then."""


@dataclass(frozen=True, slots=True)
class Parked:
    """Requests that wait for a model's first instance. Unix time."""

    model: str
    sent_s: float
    answered: bool


class Scaler:
    """``outcomes``: what became of the operations."""

    def __init__(self, urls: Sequence[str], clients: Clients, models: Sequence[str], *, out_s: float) -> None:
        """``out_s``: how long an instance stays."""
        self._admins = [AdminClient(url) for url in urls]
        self._clients = clients
        self._models = tuple(models)
        self._out_s = out_s
        self.outcomes: Counter[str] = Counter()
        self.parked: list[Parked] = []

    async def close(self) -> None:
        for admin in self._admins:
            await admin.close()

    async def run(self, rate: float, seconds: float) -> None:
        """As many operations out as in. Returns when all have ended."""
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for index in range(max(1, round(rate * seconds / 2))):
                await asyncio.sleep(max(0.0, start_s + index * 2 / rate - time.perf_counter()))
                tasks.create_task(self._out_and_in(index))

    async def _out_and_in(self, index: int) -> None:
        model, admin = self._models[index % len(self._models)], self._admins[index % len(self._admins)]
        sent_s = time.time()
        waiting = [asyncio.create_task(self._clients.ask(i, model)) for i in range(len(self._admins))]
        await asyncio.sleep(_PARK_S)
        await self._scale(admin, model, 1)
        answered = await asyncio.gather(*waiting)
        self.parked.append(Parked(model, sent_s, all(answered)))
        await asyncio.sleep(self._out_s)
        await self._scale(admin, model, 0)

    async def _scale(self, admin: AdminClient, model: str, instances: int) -> None:
        direction = "out" if instances else "in"
        try:
            await admin.scale(model, instances, hold_s=2 * self._out_s if instances else 0.0, live="never")
        except BlitzError as error:
            self.outcomes[f"{direction} {error.code}"] += 1
        else:
            self.outcomes[direction] += 1
