"""Weights of a GPU between hosts without RDMA: by way of the device's staging memory.

UCX would take memory of a device to TCP piece by piece, and wait for each: 0.5 to 0.8 GB/s were measured on an H100,
whose memory is copied to pinned memory at 55. Here pieces are copied while others are on their way. What lies in the
host's memory, and what goes to a peer of the same host, goes as the transport does it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from services.worker.device.completion import Completion
from services.worker.device.device import Device
from shared.errors import TransportError
from shared.transport.base import CLOSE_TIMEOUT_S, Buffer, Channel, TensorTransport, Transfer
from shared.transport.traffic import TrafficCounters
from shared.transport.transfer import PostedTransfer, ended_within, not_posted


class StagedTransport:
    """``TensorTransport`` over another one, which is closed with it. Transfers of staged memory end on the thread of
    the device's stream, or on the transport's."""

    def __init__(self, inner: TensorTransport, device: Device) -> None:
        self._inner, self._device = inner, device
        self._channels: dict[Channel, StagedChannel] = {}

    @property
    def address(self) -> bytes:
        return self._inner.address

    @property
    def peers(self) -> frozenset[bytes]:
        return self._inner.peers

    async def peer_transports(self) -> Mapping[bytes, tuple[str, ...]]:
        return await self._inner.peer_transports()

    @property
    def traffic(self) -> TrafficCounters:
        return self._inner.traffic

    async def connect(self, address: bytes, *, same_host: bool, timeout_s: float = 10.0, lane: int = 0) -> Channel:
        channel = await self._inner.connect(address, same_host=same_host, timeout_s=timeout_s, lane=lane)
        if same_host:
            return channel
        self._channels = {known: staged for known, staged in self._channels.items() if known.alive}
        return self._channels.setdefault(channel, StagedChannel(channel, self._device))

    def recv(self, buffer: Buffer, tag: int, *, source: Channel | None = None) -> Transfer:
        if not isinstance(source, StagedChannel):
            return self._inner.recv(buffer, tag, source=source)
        if not isinstance(buffer, torch.Tensor):
            return self._inner.recv(buffer, tag, source=source.inner)
        try:
            staged = self._device.staging(len(buffer), "into")
        except TransportError as error:  # who posts the pieces of a flow catches nothing
            return not_posted(tag, error)
        return _Received(self._device, buffer, staged, self._inner.recv(staged, tag, source=source.inner), tag)

    def forget(self, address: bytes) -> None:
        self._inner.forget(address)

    async def close(self) -> None:
        await self._inner.close()


class StagedChannel:
    """``Channel`` to a peer of another host."""

    def __init__(self, inner: Channel, device: Device) -> None:
        self.inner = inner
        self._device = device
        self._sending: set[PostedTransfer] = set()

    @property
    def alive(self) -> bool:
        return self.inner.alive

    def send(self, buffer: Buffer, tag: int) -> Transfer:
        if not isinstance(buffer, torch.Tensor):
            return self.inner.send(buffer, tag)
        try:
            staged = self._device.staging(len(buffer), "out")
        except TransportError as error:  # who posts the pieces of a flow catches nothing
            return not_posted(tag, error)
        sending = _Sent(self.inner, self._device, buffer, tag)
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        sending.start(staged)
        return sending

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        await ended_within(list(self._sending), timeout_s)
        await self.inner.close(timeout_s)

    def abort(self) -> None:
        self.inner.abort()


class _Staged(PostedTransfer):
    """``Transfer`` of device memory by way of ``staged``, which it keeps until both halves are done."""

    __slots__ = ("_inner",)

    def __init__(self, buffer: Buffer, tag: int, inner: Transfer | None) -> None:
        super().__init__(buffer, tag, _give_up)
        self._inner = inner

    def post(self, inner: Transfer) -> None:
        """This is its other half."""
        self._inner = inner
        if self.aborted:  # meanwhile: who asked for it saw nothing to abort
            inner.abort()

    def give_up(self) -> None:
        self.aborted = True
        if self._inner is not None:
            self._inner.abort()


def _give_up(transfer: PostedTransfer) -> None:
    # No method: a transfer that keeps itself keeps its memory until the collector runs.
    assert isinstance(transfer, _Staged)
    transfer.give_up()


class _Sent(_Staged):
    __slots__ = ("_channel", "_device")

    def __init__(self, channel: Channel, device: Device, buffer: torch.Tensor, tag: int) -> None:
        super().__init__(buffer, tag, None)
        self._channel, self._device = channel, device

    def start(self, staged: Buffer) -> None:
        source = self.buffer

        def copy() -> None:
            self._device.tensors.of(staged).copy_(source, non_blocking=True)

        copied = self._device.streams.out.run(copy)
        copied.then(lambda: self._copied(copied, staged))

    def _copied(self, copied: Completion[None], staged: Buffer) -> None:
        if copied.error is not None or self.aborted:
            self.finish_or_abort(_failed(copied))
            return
        sending = self._channel.send(staged, self.tag)
        self.post(sending)
        sending.add_done_callback(lambda sent: self.finish(sent.error))


class _Received(_Staged):
    __slots__ = ("_device",)

    def __init__(self, device: Device, buffer: torch.Tensor, staged: Buffer, inner: Transfer, tag: int) -> None:
        super().__init__(buffer, tag, inner)
        self._device = device
        inner.add_done_callback(lambda received: self._came(received, buffer, staged))

    def _came(self, received: Transfer, target: torch.Tensor, staged: Buffer) -> None:
        if received.error is not None or self.aborted:
            self.finish_or_abort(received.error)
            return

        def copy() -> None:
            target.copy_(self._device.tensors.of(staged), non_blocking=True)

        copied = self._device.streams.into.run(copy)
        copied.then(lambda: self.finish(_failed(copied)))


def _failed(copied: Completion[None]) -> Exception | None:
    return None if copied.error is None else TransportError(f"a copy on the device failed: {copied.error}")
