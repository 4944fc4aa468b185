"""How a receiver gets the pieces of a copy from its holder, and bad blocks again. Between workers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.messages.codec import Message
from shared.messages.common import Count
from shared.subjects import Process

MessageNumber = Annotated[int, Meta(ge=0, lt=1 << 24)]
"""Of a message in its transfer (``shared.transport.tags``)."""


class Feed(Message, frozen=True, kw_only=True, tag="feed.v1"):
    """A receiver asks the holder of a copy for pieces of it, each as soon as the holder has it itself.

    Answered once the sender is connected and begins; the pieces follow over the transport, piece *i* under
    ``tag_of(epoch, attempt_index(attempt, i))``. ``NotFound`` or ``Conflict``: no such copy here.
    """

    plan_id: str
    model_hash: str
    layout_hash: str
    kind: Literal["gpu", "host"] = msgspec.field(name="copy_kind")
    """``kind`` on the wire is the message's tag."""
    chunk_bytes: int
    worker_id: str
    """The receiver, with where to send to."""
    incarnation: str
    """Of the receiver's process."""
    host: str
    transport_address: bytes
    epoch: int
    attempt: int
    """Of this receiver under its epoch: every feed has tags of its own."""
    pieces: bytes
    """A bit per piece, least significant first; set: wanted."""
    cap_gbps: float = 0.0
    instance_id: str
    """Whose GPU copy: another instance of the same weights may wait for the receiver itself. Empty: whichever is
    there."""

    @property
    def worker(self) -> Process:
        """The receiver."""
        return Process(self.worker_id, self.incarnation)


class GetFeedState(Message, frozen=True, kw_only=True, tag="get_feed_state.v1"):
    """A receiver that gets nothing asks whether its sender still lives. ``NotFound``: it sends no such feed."""

    epoch: int
    attempt: int


class FeedState(Message, frozen=True, kw_only=True, tag="feed_state.v1"):
    """The feed is alive."""

    starved: bool
    """The sender waits for its own upstream: the link to the receiver is not to blame."""


class StopFeed(Message, frozen=True, kw_only=True, tag="stop_feed.v1"):
    """A receiver does not want the rest of a feed: it takes nothing more under this attempt."""

    epoch: int
    attempt: int


class FeedEnded(Message, frozen=True, kw_only=True, tag="feed_ended.v1"):
    """A sender tells the receiver that a feed broke; sent once, and it may be lost."""

    epoch: int
    attempt: int
    reason: str


class FetchRange(Message, frozen=True, kw_only=True, tag="fetch_range.v2"):
    """A receiver's bad block: send these arena bytes again, under ``tag_of(epoch, index)``.

    Answered once the sender has the unit verified itself; the bytes follow over the transport.
    """

    plan_id: str
    model_hash: str
    layout_hash: str
    kind: Literal["gpu", "host"] = msgspec.field(name="copy_kind")
    """``kind`` on the wire is the message's tag."""
    worker_id: str
    """The receiver, with where to send to."""
    transport_address: bytes
    host: str
    epoch: Count
    index: MessageNumber
    unit: Count
    offset: Count
    num_bytes: Count


class GetChecksums(Message, frozen=True, kw_only=True, tag="get_checksums.v1"):
    """A receiver's unit does not match: which checksums has the sender, once it has the unit verified itself?"""

    model_hash: str
    layout_hash: str
    kind: Literal["gpu", "host"] = msgspec.field(name="copy_kind")
    unit: int


class UnitChecksums(Message, frozen=True, kw_only=True, tag="unit_checksums.v1"):
    """xxh3-64 of each block of ``CHECK_BYTES`` of the unit."""

    checksums: tuple[int, ...]
