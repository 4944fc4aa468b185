"""A name server for one domain, over UDP."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import cast

_HEADER = struct.Struct("!HHHHHH")
_ANSWERS, _NO_SUCH_NAME = 0x8580, 0x8583
"""Flags: an answer that this server is the authority for."""
_A, _IN = 1, 1
_TTL_S = 5
_NAME_OF_QUESTION = 0xC00C


class NameServer(asyncio.DatagramProtocol):
    """Answers with addresses. ``find``: those of a name, which may be none; None: there is no such name."""

    def __init__(self, find: Callable[[str], Sequence[str] | None]) -> None:
        self._find = find
        self._transport: asyncio.DatagramTransport | None = None

    async def serve(self, address: str, port: int = 53) -> None:
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, (address, port))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        number, *_ = _HEADER.unpack_from(data)
        labels, at = [], _HEADER.size
        while length := data[at]:
            labels.append(data[at + 1 : at + 1 + length].decode(errors="replace"))
            at += 1 + length
        question = data[_HEADER.size : at + 5]
        (kind,) = struct.unpack_from("!H", data, at + 1)
        found = self._find(".".join(labels).lower())
        # Of any other kind there is nothing, IPv6 addresses among them.
        addresses = found if found and kind == _A else ()
        records = b"".join(
            struct.pack("!HHHIH", _NAME_OF_QUESTION, _A, _IN, _TTL_S, 4) + socket.inet_aton(each) for each in addresses
        )
        flags = _NO_SUCH_NAME if found is None else _ANSWERS
        self._transport.sendto(_HEADER.pack(number, flags, 1, len(addresses), 0, 0) + question + records, addr)
