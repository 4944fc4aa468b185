"""Which gateways there are, which of them take requests now, and when each was killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.chaos.injected_fault import InjectedFault
from bench.stream_client import Endpoint, StreamClient, StreamFailed

_POLL_S = 0.05
_HEALTH_S = 2.0


@dataclass(slots=True)
class Gateway:
    """One gateway. ``client``'s connections are to the process that runs now."""

    name: str
    url: str
    client: StreamClient
    down: bool = False
    faults: list[InjectedFault] = field(default_factory=list)


class Gateways:
    """Belongs to one event loop. A gateway that was killed takes requests again once it says that it is healthy."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._gateways = {name: Gateway(name, url, StreamClient(Endpoint.of(url))) for name, url in urls.items()}
        self._changed = asyncio.Event()

    def __getitem__(self, name: str) -> Gateway:
        return self._gateways[name]

    def fault_injected(self, fault: InjectedFault) -> None:
        """Before the signal is sent. A stopped gateway keeps its place: what is sent to it waits in its socket."""
        gateway = self._gateways.get(fault.member)
        if gateway is None or not fault.ends:
            return
        gateway.faults.append(fault)
        gateway.down = True
        gateway.client.close()

    def choose(self, rng: random.Random) -> Gateway | None:
        """One that takes requests; None: there is none now."""
        up = [gateway for gateway in self._gateways.values() if not gateway.down]
        return rng.choice(up) if up else None

    async def wait_up(self) -> None:
        """Return when one takes requests."""
        while all(gateway.down for gateway in self._gateways.values()):
            self._changed.clear()
            await self._changed.wait()

    async def revive(self, name: str) -> None:
        """Return when a gateway whose process was started again is healthy; it takes requests from then on."""
        gateway = self._gateways[name]
        while not await self._healthy(gateway):
            await asyncio.sleep(_POLL_S)
        gateway.down = False
        self._changed.set()

    def close(self) -> None:
        for gateway in self._gateways.values():
            gateway.client.close()

    @staticmethod
    async def _healthy(gateway: Gateway) -> bool:
        try:
            reply = await gateway.client.request("GET", "/health", timeout_s=_HEALTH_S)
        except StreamFailed:
            return False
        return reply.status == 200
