"""What instances have computed, as they report it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shared.bus.base import Bus
from shared.load_feed import subscribe_load
from shared.messages.load import LoadReport

SETTLE_S = 0.5
"""Several reports: what was computed before is in the last one."""


class Computed:
    """Prompt tokens that instances computed. Event loop only."""

    def __init__(self) -> None:
        self._tokens: dict[str, dict[str, int]] = {}

    async def listen(self, bus: Bus) -> None:
        """Begin."""
        await subscribe_load(bus, self.on_load)

    def on_load(self, report: LoadReport) -> None:
        """An instance says its load."""
        self._tokens.setdefault(report.model, {})[report.instance_id] = report.prefill_tokens_total

    def of(self, model: str) -> dict[str, int]:
        """By instance, in all."""
        return dict(self._tokens.get(model, {}))

    async def settled(self, model: str) -> dict[str, int]:
        """The same, once what is over has been reported."""
        await asyncio.sleep(SETTLE_S)
        return self.of(model)


def since(earlier: Mapping[str, int], later: Mapping[str, int]) -> dict[str, int]:
    """What was computed in between, by instance."""
    return {instance: tokens - earlier.get(instance, 0) for instance, tokens in later.items()}
