"""What workers say to each other, written down: messages over the bus, and tensors. Each is on its way for a time that
a seed decides, by who says it, what it is, and how often it was said before; none overtakes an earlier one of its
sender."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from services.worker.live.tensors import Kind, kv_tag, live_tag
from shared import subjects
from shared.bus.base import M, R, Responder, Subscription
from shared.errors import BlitzError, DeadlineExceeded, TransferAborted
from shared.messages.codec import Message
from shared.messages.generation import Submit
from shared.messages.live import LayerRuns
from shared.transport.base import Buffer, Channel, TensorTransport, Transfer
from shared.transport.tags import MAX_NUMBER, Carries, carried_by
from shared.transport.transfer import PostedTransfer
from tests.moved_clock import BEGAN_S
from tests.processes import process
from tests.services.worker.live.turns import LoopMailbox
from tests.shared.bus.memory import MemoryBroker, MemoryBus
from tests.shared.transport.memory import MemoryFabric

Line = tuple[float, str, str, Any]
"""Milliseconds since the beginning, who to whom, what, and its content. Of a tensor that is its size in bytes."""

MESSAGE_S = 0.0002, 0.0015
TENSOR_S = 0.0005, 0.004
AFTER_S = 1e-6
"""Of one message behind another."""
LIVE = ("offer", "hand_over", "seal", "pull", "pull_kv", "settle", "dissolve", "taken")
DECODE = ("reserve", "begin", "release")
"""Not how often a reservation is renewed."""
UNTOLD = {
    "kind",
    "pair_id",
    "started_ago_s",
    "bucket_s",
    "assignment",
    "worker_id",
    "host",
    "transport_address",
    "lease_s",
}
"""Always the same, or as long ago as the time of the message says."""


class Wire:
    """Of one run. ``lines``: what was said, in order."""

    def __init__(
        self, seed: int, worker_ids: Iterable[str], *, lost_answers: float = 0.0, lost_tensors: float = 0.0
    ) -> None:
        """What is lost is a share of all."""
        self._seed = seed
        self._lost_answers, self._lost_tensors = lost_answers, lost_tensors
        self._loop = asyncio.get_running_loop()
        self._said: Counter[tuple[str, str]] = Counter()
        self._arrivals: dict[str, tuple[float, float, float]] = {}
        """Of each sender: when it said the last thing, and when what it said before that time, and all, is there."""
        self._named: dict[str, tuple[str, str]] = {subjects.planner("split"): ("planner", "split")}
        self.names: dict[bytes, str] = {}
        """Of transports, by address."""
        self.lines: list[Line] = []
        self.watchers: list[Callable[[Line], None]] = []
        """Called with each line."""
        self.fabric = MemoryFabric(LoopMailbox)
        self.broker = WireBroker(self)
        for worker_id in worker_ids:
            me = process(worker_id)
            self._named |= {subjects.worker_live(me, one): (worker_id, one) for one in LIVE}
            self._named |= {subjects.worker_decode(me, one): (worker_id, one) for one in DECODE}
            self._named[subjects.worker_cancel(me)] = worker_id, "cancel"
            self._named[subjects.worker_pair_ended(me)] = worker_id, "pair_ended"

    def named(self, subject: str) -> tuple[str, str] | None:
        """Who listens on a subject, and to what; None for what is not written down."""
        return self._named.get(subject)

    def say(self, who: str, what: str, content: object = None) -> None:
        """Write it down. ``who``: or who to whom."""
        line = round(1e3 * (self._loop.time() - BEGAN_S), 3), who, what, content
        self.lines.append(line)
        for watcher in tuple(self.watchers):
            watcher(line)

    @property
    def in_order(self) -> list[Line]:
        """What was said. What was said at the same time has no order."""
        return sorted(self.lines, key=lambda line: line[:3])

    def takes_s(self, who: str, what: str, between_s: tuple[float, float]) -> float:
        """How long something that is said now is on its way. It overtakes what was said at the same time, perhaps."""
        now_s, drawn = self._loop.time(), self._drawn(who, what)
        said_s, before_s, latest_s = self._arrivals.get(who, (0.0, 0.0, 0.0))
        if now_s > said_s:
            before_s = latest_s
        arrives_s = max(now_s + drawn.uniform(*between_s), before_s + AFTER_S * (1 + drawn.random()))
        self._arrivals[who] = now_s, before_s, max(latest_s, arrives_s)
        return arrives_s - now_s

    def loses_answer(self, who: str, what: str) -> bool:
        """Whether one that is here now never came."""
        return self._drawn(who, f"{what}: lost").random() < self._lost_answers

    def loses_tensor(self, who: str, what: str) -> bool:
        """Whether one that is sent now is lost on its way."""
        return self._drawn(who, f"{what}: lost").random() < self._lost_tensors

    def _drawn(self, who: str, what: str) -> random.Random:
        self._said[who, what] += 1
        return random.Random(f"{self._seed} {who} {what} {self._said[who, what]}")


class WireBroker(MemoryBroker):
    """Its buses write down what is said on them."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire

    def bus(self, name: str) -> WireBus:
        bus = WireBus(self, name)
        self._buses.append(bus)
        return bus


class WireBus(MemoryBus):
    """Made by ``WireBroker.bus``. An answer is written down when it arrives."""

    def __init__(self, broker: WireBroker, name: str) -> None:
        self._wire = broker.wire
        self._late_s = 0.0
        super().__init__(broker, name)

    async def publish(self, subject: str, message: Message, *, buffer: bool = True) -> None:
        if (named := self._wire.named(subject)) is not None and self.is_up:
            other, what = named
            self._wire.say(f"{self.name}>{other}", what, told(message))
            self._late_s = self._wire.takes_s(self.name, what, MESSAGE_S)
        try:
            await super().publish(subject, message, buffer=buffer)
        finally:
            self._late_s = 0.0

    def send(self, size_bytes: int, deliver: Callable[[], object]) -> None:
        loop, late_s = asyncio.get_running_loop(), self._late_s
        super().send(size_bytes, (lambda: loop.call_later(late_s, deliver)) if late_s else deliver)

    async def request(self, subject: str, message: Message, reply: type[R], *, timeout_s: float) -> R:
        named = self._wire.named(subject)
        if named is None or not self.is_up:
            return await super().request(subject, message, reply, timeout_s=timeout_s)
        other, what = named
        self._wire.say(f"{self.name}>{other}", what, told(message))
        await asyncio.sleep(self._wire.takes_s(self.name, what, MESSAGE_S))
        try:
            answer = await super().request(subject, message, reply, timeout_s=timeout_s)
        except BlitzError as error:
            if self.is_up:
                self._wire.say(f"{other}>{self.name}", what, type(error).__name__)
            raise
        if self._wire.loses_answer(self.name, what):
            await asyncio.sleep(timeout_s)
            self._wire.say(f"{other}>{self.name}", what, "lost")
            raise DeadlineExceeded(f"no answer on {subject} within {timeout_s:g} s")
        if self.is_up:
            self._wire.say(f"{other}>{self.name}", what, told(answer) or "ok")
        return answer

    async def respond(self, subject: str, kind: type[M], responder: Responder[M, R]) -> Subscription:
        async def respond(message: M) -> R:
            try:
                return await responder(message)
            finally:
                if named is not None:
                    await asyncio.sleep(self._wire.takes_s(self.name, f"{named[1]}: answer", MESSAGE_S))

        named = self._wire.named(subject)
        return await super().respond(subject, kind, respond)


def told(message: Message) -> dict[str, object]:
    """A message without what is always the same, and with requests by their names and lengths."""
    values = {name: (getattr(message, name), default) for name, default in _defaults(type(message))}
    return {name: _told(value) for name, (value, default) in values.items() if value != default}


@functools.cache
def _defaults(kind: type[Message]) -> list[tuple[str, object]]:
    return [(field.name, field.default) for field in msgspec.structs.fields(kind) if field.name not in UNTOLD]


def _told(value: object) -> object:
    match value:
        case Submit():
            sizes = f"{len(value.prompt_token_ids)}+{len(value.output_token_ids)}"
            return f"{value.request_id}.{value.attempt}: {sizes}" + (" decoded elsewhere" if value.decode_at else "")
        case LayerRuns():
            return sum(value.counts)
        case msgspec.Struct():
            return {name: _told(getattr(value, name)) for name in value.__struct_fields__}
        case tuple():
            return [_told(item) for item in value]
        case float():
            return round(value, 6)
        case _:
            return value


def tensor_of(tag: int) -> str | None:
    """What travels under a tag between the members of a pair: its kind, and the number of the batch or claim, with the
    first layer of KV. None: something else."""
    number = tag & MAX_NUMBER
    if carried_by(tag) is Carries.PAIR_KV:
        serial, layer = divmod(number, kv_tag(0, 1, 0) & MAX_NUMBER)
        return f"kv of {serial} from {layer}"
    if carried_by(tag) is Carries.PAIR:
        serial, kind = divmod(number, live_tag(0, 1, Kind(0)) & MAX_NUMBER)
        return f"{Kind(kind).name.lower()} of {serial}"
    return None


class WireTransport(TensorTransport):
    """Writes down what a worker sends."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name
        self.real = wire.fabric.start(name=name)
        wire.names[self.real.address] = name
        self.forget = self.real.forget
        self.peer_transports = self.real.peer_transports
        self.close = self.real.close

    @property
    def address(self) -> bytes:
        return self.real.address

    @property
    def peers(self) -> frozenset[bytes]:
        return self.real.peers

    async def connect(self, address: bytes, *, same_host: bool, timeout_s: float = 10.0, lane: int = 0) -> Channel:
        real = await self.real.connect(address, same_host=same_host, timeout_s=timeout_s, lane=lane)
        return _WireChannel(self, real, self._wire.names[address])

    def recv(self, buffer: Buffer, tag: int, *, source: Channel | None = None) -> Transfer:
        return self.real.recv(buffer, tag, source=source.real if isinstance(source, _WireChannel) else source)

    def takes_s(self, to: str, buffer: Buffer, tag: int) -> float | None:
        """How long what is sent now is on its way; None: it is lost."""
        what = tensor_of(tag)
        if what is None or self.real.killed:
            return self._wire.takes_s(f"{self._name}'s tensors", "other", TENSOR_S)
        lost = self._wire.loses_tensor(self._name, what)
        self._wire.say(f"{self._name}>{to}", what, "lost" if lost else memoryview(buffer).nbytes)
        return None if lost else self._wire.takes_s(f"{self._name}'s tensors", what, TENSOR_S)


class _WireChannel(Channel):
    def __init__(self, transport: WireTransport, real: Channel, to: str) -> None:
        self._transport, self.real, self._to = transport, real, to
        self.close = real.close
        self.abort = real.abort

    @property
    def alive(self) -> bool:
        return self.real.alive

    def send(self, buffer: Buffer, tag: int) -> Transfer:
        sent: list[Transfer] = []

        def abort(transfer: PostedTransfer) -> None:
            if sent:
                sent[0].abort()
            else:
                transfer.finish(TransferAborted("it had not left"))

        def send() -> None:
            if not transfer.done:
                sent.append(self.real.send(buffer, tag))
                sent[0].add_done_callback(lambda real: transfer.finish(real.error))

        transfer = PostedTransfer(buffer, tag, abort)
        takes_s = self._transport.takes_s(self._to, buffer, tag)
        if takes_s is None:
            transfer.finish()
        else:
            asyncio.get_running_loop().call_later(takes_s, send)
        return transfer
