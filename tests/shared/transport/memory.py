"""The tensor transport within one process: the honest twin of ``ucx`` for tests."""

from __future__ import annotations

from shared.transport.tags import MAX_UNCLAIMED
from tests.shared.transport.memory_transport import MemoryTransport


class MemoryFabric:
    """What joins memory transports: addresses, the rate of the wire, and the power to kill a peer."""

    def __init__(self) -> None:
        self._transports: dict[bytes, MemoryTransport] = {}
        self._next_id = 1
        self.bytes_per_s: float | None = None

    def start(self, *, name: str, max_unclaimed: int = MAX_UNCLAIMED) -> MemoryTransport:
        """A new transport on this fabric. ``max_unclaimed``: messages kept for a receive not posted yet."""
        address = f"memory:{name}:{self._next_id}".encode()
        self._next_id += 1
        transport = self._transports[address] = MemoryTransport(self, address, name, max_unclaimed)
        return transport

    def find(self, address: bytes) -> MemoryTransport | None:
        """The transport at an address, alive or killed; None when there never was one or it closed."""
        return self._transports.get(address)

    def forget(self, address: bytes) -> None:
        """Take a closed transport off the fabric; it has told its peers."""
        self._transports.pop(address, None)
        for transport in list(self._transports.values()):
            transport.post(lambda transport=transport: transport.peer_left(address))

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Limit each sender to this rate; None lifts the limit."""
        self.bytes_per_s = bytes_per_s

    def kill(self, address: bytes) -> None:
        """Let a peer die without a word: channels between hosts lose it, channels inside a host hang."""
        victim = self._transports[address]
        victim.killed = True
        for transport in list(self._transports.values()):
            if transport is not victim:
                transport.post(lambda transport=transport: transport.peer_lost(address))
