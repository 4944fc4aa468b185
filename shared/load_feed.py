"""Hearing the load of all workers, however it comes: each for itself, or those of a host together."""

from __future__ import annotations

from shared import subjects
from shared.bus.base import Bus, Listener, Subscription
from shared.messages.load import HostLoad, LoadReport


async def subscribe_load(bus: Bus, listener: Listener[LoadReport]) -> list[Subscription]:
    """Call ``listener`` for every report. Raises what ``Bus.subscribe`` raises."""

    def together(load: HostLoad) -> None:
        for report in load.reports:
            listener(report)

    return [
        await bus.subscribe(subjects.load(), LoadReport, listener),
        await bus.subscribe(subjects.host_load(), HostLoad, together),
    ]
