"""Hidden states and KV between the members of a pair: tags, sizes, sends and receives.

Every message has a tag of its own: the target's lease epoch, and a number of batch or claim. A buffer is the
transport's until its transfer is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

from services.worker.engine.base import Engine
from services.worker.kv_transfer.connector import KvConnector, KvInflow, KvOutflow, KvRange
from shared.errors import BlitzError, DeadlineExceeded, TransportError
from shared.transport.base import Buffer, Channel, Transfer
from shared.transport.tags import MAX_NUMBER, Carries, tag_of

_KINDS = 4
_MAX_SERIAL = (MAX_NUMBER + 1) // _KINDS
_MAX_LAYERS = 256
_MAX_KV_SERIAL = (MAX_NUMBER + 1) // _MAX_LAYERS


class Kind(IntEnum):
    """What a message carries."""

    HANDED_HIDDEN = 0
    PULLED_HIDDEN = 1


def live_tag(epoch: int, serial: int, kind: Kind) -> int:
    """The tag of a batch's (handed) or claim's (pulled) tensor. Raises ``TransportError`` beyond 4 million."""
    if serial >= _MAX_SERIAL:
        raise TransportError(f"{serial} is more than a pair can count")
    return tag_of(epoch, serial * _KINDS + kind, Carries.PAIR)


def can_tag_kv(serial: int, num_layers: int) -> bool:
    """Whether KV of these layers of a claim can come apart: up to 256 layers, and 65 thousand claims."""
    return 0 <= serial < _MAX_KV_SERIAL and num_layers <= _MAX_LAYERS


def kv_tag(epoch: int, serial: int, layer: int) -> int:
    """The tag of a claim's KV from a layer on. Raises ``TransportError`` unless ``can_tag_kv``."""
    if not can_tag_kv(serial, layer + 1) or layer < 0:
        raise TransportError(f"KV of layer {layer} of claim {serial} is more than a pair can count")
    return tag_of(epoch, serial * _MAX_LAYERS + layer, Carries.PAIR_KV)


class PairTensors:
    """One member's end. Owns the transfers that it posted until they are done."""

    def __init__(self, connector: KvConnector, channel: Channel, epoch: int, *, timeout_s: float) -> None:
        """``timeout_s``: a receive that takes longer has failed."""
        self._connector = connector
        self._channel = channel
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._outflow: KvOutflow | None = None
        self.posted: set[Transfer] = set()
        """Transfers that are not done; changed here alone."""

    @property
    def peer_is_lost(self) -> bool:
        """The connection says so; between processes of one host it cannot tell."""
        return not self._channel.alive

    def send(self, buffer: Buffer, serial: int, kind: Kind) -> Transfer:
        """Post a send; the buffer is kept until it is done."""
        return self._keep(self._channel.send(buffer, live_tag(self._epoch, serial, kind)))

    def kv_outflow(self, engine: Engine) -> KvOutflow:
        """KV goes to the other member by it: one, of this member's engine."""
        if self._outflow is None:
            self._outflow = self._connector.outflow(engine, self._channel)
        return self._outflow

    def kv_inflow(
        self,
        engine: Engine,
        piece_bytes: int,
        num_pieces: int,
        ask: Callable[[KvRange], Awaitable[object]],
        before_each: Callable[[], Awaitable[None]],
    ) -> KvInflow:
        """KV that comes from the other member in such pieces."""
        window = self._connector.reserve(piece_bytes, num_pieces, is_promised=True)
        assert window is not None  # it was promised: the batch is this member's by now
        return self._connector.inflow(
            engine, self._channel, window, timeout_s=self._timeout_s, ask=ask, before_each=before_each
        )

    def kv_tag(self, serial: int, layer: int) -> int:
        """Of a claim's KV from a layer on."""
        return kv_tag(self._epoch, serial, layer)

    async def receive(self, num_bytes: int, serial: int, kind: Kind) -> Buffer:
        """The message's bytes. Raises ``TransportError`` or ``DeadlineExceeded``."""
        buffer = self._connector.device.staging(num_bytes, "into")
        tag = live_tag(self._epoch, serial, kind)
        transfer = self._keep(self._connector.transport.recv(buffer, tag, source=self._channel))
        try:
            await transfer.wait(self._timeout_s)
        except asyncio.CancelledError:
            transfer.abort()
            raise
        return buffer

    async def sent(self, *transfers: Transfer) -> BlitzError | None:
        """Wait for the ends of sends; the first error, if any. Inside a host only time tells that the peer is dead."""
        failure: BlitzError | None = None
        for transfer in transfers:
            try:
                await transfer.wait(self._timeout_s)
            except (TransportError, DeadlineExceeded) as error:
                failure = failure or error
        return failure

    def abort(self) -> None:
        """Give up what is posted. Buffers stay quarantined until their transfers are done."""
        for transfer in list(self.posted):
            transfer.abort()
        if self._outflow is not None:
            self._outflow.release()

    def _keep(self, transfer: Transfer) -> Transfer:
        self.posted.add(transfer)
        transfer.add_done_callback(self.posted.discard)
        return transfer
