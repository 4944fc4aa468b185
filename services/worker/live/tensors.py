"""Hidden states and KV between the members of a pair: tags, sizes, sends and receives.

Every message has a tag of its own: the target's lease epoch, and a number of batch or claim. A buffer is the
transport's until its transfer is done.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum

from services.worker.device.device import Device
from shared.errors import BlitzError, DeadlineExceeded, TransportError
from shared.transport.base import Buffer, Channel, TensorTransport, Transfer
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


class Tensors:
    """One member's end. Owns the transfers that it posted until they are done."""

    def __init__(
        self, transport: TensorTransport, channel: Channel, epoch: int, device: Device, *, timeout_s: float
    ) -> None:
        """``device``: receives land in its staging. ``timeout_s``: one that takes longer has failed."""
        self._transport = transport
        self._channel = channel
        self._epoch = epoch
        self._device = device
        self._timeout_s = timeout_s
        self.posted: set[Transfer] = set()
        """Transfers that are not done; changed here alone."""

    @property
    def peer_is_lost(self) -> bool:
        """The connection says so; between processes of one host it cannot tell."""
        return not self._channel.alive

    def send(self, buffer: Buffer, serial: int, kind: Kind) -> Transfer:
        """Post a send; the buffer is kept until it is done."""
        return self._keep(self._channel.send(buffer, live_tag(self._epoch, serial, kind)))

    def send_kv(self, buffer: Buffer, serial: int, layer: int) -> Transfer:
        """As ``send``, of a claim's KV from a layer on."""
        return self._keep(self._channel.send(buffer, kv_tag(self._epoch, serial, layer)))

    async def receive(self, num_bytes: int, serial: int, kind: Kind) -> Buffer:
        """The message's bytes. Raises ``TransportError`` or ``DeadlineExceeded``."""
        return await self._receive(num_bytes, live_tag(self._epoch, serial, kind))

    async def receive_kv(self, num_bytes: int, serial: int, layer: int) -> Buffer:
        """As ``receive``, of a claim's KV from a layer on. The receive is posted before this first waits."""
        return await self._receive(num_bytes, kv_tag(self._epoch, serial, layer))

    async def _receive(self, num_bytes: int, tag: int) -> Buffer:
        buffer = self._device.staging(num_bytes)
        transfer = self._keep(self._transport.recv(buffer, tag, source=self._channel))
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

    def _keep(self, transfer: Transfer) -> Transfer:
        self.posted.add(transfer)
        transfer.add_done_callback(self.posted.discard)
        return transfer
