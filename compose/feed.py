"""The gateway's feed as a reader sees it: bytes to events, events to entities by name. Pure.

A feed that breaks the rules (an event without end, entities of other shapes) raises ``FeedBroken``; what was known
before stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from shared.errors import Internal
from shared.messages.operations import ScaleRecord

MAX_EVENT_BYTES = 32 << 20
MAX_STATE_BYTES = 16 << 20
"""Of all entities. A gateway keeps to half of that."""
_END = b"\n\n"


class FeedBroken(Internal):
    """What comes is no feed of a gateway."""

    code = "feed_broken"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream. A comment has no data."""

    kind: str = ""
    id: str = ""
    data: bytes = b""


class EventSplitter:
    """Bytes as they come in, whole events out."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that ``data`` completes. Raises ``FeedBroken`` for one without end."""
        searched = max(0, len(self._rest) - 1)
        self._rest += data
        begin = 0
        while (end := self._rest.find(_END, max(begin, searched))) >= 0:
            yield _event(bytes(self._rest[begin:end]))
            begin = end + len(_END)
        del self._rest[:begin]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise FeedBroken(f"an event of the feed has more than {MAX_EVENT_BYTES >> 20} MiB")


def _event(text: bytes) -> Event:
    fields = dict.fromkeys((b"event", b"id", b"data"), b"")
    for line in text.split(b"\n"):
        name, colon, value = line.partition(b": ")
        if colon and name in fields:
            fields[name] = value
    # An id goes back in a header: what cannot stand in one is none.
    event_id = fields[b"id"].decode("ascii", errors="ignore")
    return Event(
        fields[b"event"].decode("ascii", errors="ignore"), event_id if event_id.isprintable() else "", fields[b"data"]
    )


class ShownCluster(msgspec.Struct, frozen=True, kw_only=True):
    """``cluster/now``."""

    workers: int = 0
    states: dict[str, int] = {}
    """Workers by state."""
    summarised: bool = False
    """Only workers of running operations are shown one by one."""
    silent: tuple[str, ...] = ()
    """Services that do not answer."""


class ShownModel(msgspec.Struct, frozen=True, kw_only=True):
    """``model/NAME``."""

    name: str
    layers: int = 0
    bytes: int = 0
    hash: str = ""
    min: int = 0
    max: int = 0
    waiting: int = 0
    """Requests, in gateways and at instances."""
    running: int = 0
    tokens_per_s: float = 0.0
    ttft_p50_ms: float | None = None
    """Of all gateways in the last seconds, as the next three; None: there was no token."""
    ttft_p99_ms: float | None = None
    tbt_p50_ms: float | None = None
    tbt_p99_ms: float | None = None
    states: dict[str, int] = {}
    """Instances by ``ROLE STATE``."""


class ShownCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model, in a worker's host memory."""

    hash: str
    state: str = ""
    bytes: int = 0
    cached: bool = False


class ShownWorker(msgspec.Struct, frozen=True, kw_only=True):
    """``worker/ID``, and what its instance has to do."""

    id: str
    state: str = ""
    cordoned: bool = False
    copies: tuple[ShownCopy, ...] = ()
    model: str = ""
    role: str = ""
    layers: int = 0
    running: int | None = None
    """None: its instance does not report."""
    queued: int = 0
    kv_used: int = 0
    kv_total: int = 0


class ShownLack(msgspec.Struct, frozen=True, kw_only=True):
    """``unplanned/MODEL/ROLE``: what is wanted and not possible now."""

    model: str
    role: str = ""
    wanted: int = 0
    why: str = ""


class ShownLoad(msgspec.Struct, frozen=True, kw_only=True):
    """``load/PLAN/WORKER``: how far a target is."""

    plan: str
    worker: str
    layers: int = 0
    bytes: int = 0
    after_s: float = 0.0
    """Since the worker accepted the plan."""

    @property
    def gbps(self) -> float | None:
        """So far."""
        return self.bytes * 8 / self.after_s / 1e9 if self.bytes and self.after_s > 0 else None


class ShownMove(msgspec.Struct, frozen=True, kw_only=True):
    """``move/MODEL/FROM/TO``: requests that went from one worker to another lately, their streams unbroken."""

    model: str
    source: str = msgspec.field(name="from", default="")
    target: str = msgspec.field(name="to", default="")
    requests: int = 0


_KINDS: Mapping[str, type[Any]] = {
    "cluster": ShownCluster,
    "model": ShownModel,
    "worker": ShownWorker,
    "unplanned": ShownLack,
    "operation": ScaleRecord,
    "load": ShownLoad,
    "move": ShownMove,
}
T = TypeVar("T")


class _Snapshot(msgspec.Struct, frozen=True):
    entities: dict[str, msgspec.Raw]
    is_cut: bool = False


class _Frame(msgspec.Struct, frozen=True):
    changed: dict[str, msgspec.Raw] = {}
    gone: tuple[str, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class _Entity:
    raw: bytes
    value: Any
    """None: of a kind that is not known here."""


class ShownState:
    """The newest state. ``last_id`` is what a reader goes on from."""

    def __init__(self) -> None:
        self.last_id = ""
        self.is_cut = False
        """The gateway knows more than it shows."""
        self._entities: dict[str, _Entity] = {}

    @property
    def is_empty(self) -> bool:
        """Nothing has come yet."""
        return not self._entities

    def take(self, event: Event) -> bool:
        """Whether it was news. Raises ``FeedBroken``."""
        if event.kind not in ("snapshot", "frame") or not event.data:
            return False
        try:
            if event.kind == "snapshot":
                snapshot = msgspec.json.decode(event.data, type=_Snapshot)
                entities, is_cut = _decoded(snapshot.entities), snapshot.is_cut
            else:
                frame = msgspec.json.decode(event.data, type=_Frame)
                entities, is_cut = self._entities | _decoded(frame.changed), frame.is_cut
                for name in frame.gone:
                    entities.pop(name, None)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FeedBroken(f"the gateway's feed is none that this command knows: {error}") from error
        if sum(len(name) + len(entity.raw) for name, entity in entities.items()) > MAX_STATE_BYTES:
            raise FeedBroken(f"the feed's entities have more than {MAX_STATE_BYTES >> 20} MiB")
        self._entities, self.is_cut = entities, is_cut
        self.last_id = event.id or self.last_id
        return True

    def as_json(self) -> bytes:
        """One document, on one line."""
        entities = {name: msgspec.Raw(entity.raw) for name, entity in sorted(self._entities.items())}
        return msgspec.json.encode({"event_id": self.last_id, "is_cut": self.is_cut, "entities": entities})

    @property
    def cluster(self) -> ShownCluster:
        return next(iter(self._of("cluster", ShownCluster)), ShownCluster())

    @property
    def models(self) -> Sequence[ShownModel]:
        """By name."""
        return self._of("model", ShownModel)

    @property
    def workers(self) -> Sequence[ShownWorker]:
        """By id."""
        return self._of("worker", ShownWorker)

    @property
    def lacks(self) -> Sequence[ShownLack]:
        return self._of("unplanned", ShownLack)

    @property
    def operations(self) -> Sequence[ScaleRecord]:
        """The newest first."""
        return sorted(self._of("operation", ScaleRecord), key=lambda record: record.triggered_at_s, reverse=True)

    @property
    def moves(self) -> Sequence[ShownMove]:
        return self._of("move", ShownMove)

    def loads(self, plan_id: str) -> Mapping[str, ShownLoad]:
        """Of one operation, by worker."""
        return {load.worker: load for load in self._of("load", ShownLoad) if load.plan == plan_id}

    def _of(self, kind: str, _: type[T]) -> list[T]:
        return [self._entities[name].value for name in sorted(self._entities) if name.startswith(f"{kind}/")]


def _decoded(entities: Mapping[str, msgspec.Raw]) -> dict[str, _Entity]:
    decoded = {}
    for name, raw in entities.items():
        kind = _KINDS.get(name.partition("/")[0])
        # A copy: a view would keep all of the event.
        own = bytes(raw)
        decoded[name] = _Entity(own, msgspec.json.decode(own, type=kind) if kind is not None else None)
    return decoded
