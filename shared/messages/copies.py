"""Copies in host memory (one per model in the whole cluster): who holds them, and when one may go."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.codec import Message
from shared.messages.common import AtWorker
from shared.messages.registry import ModelRecord


class CopySource(AtWorker, frozen=True, kw_only=True):
    """A complete copy, and where to ask for it."""

    host: str
    transport_address: bytes
    kind: Literal["gpu", "host"]


class HoldCopy(Message, frozen=True, kw_only=True, tag="hold_copy.v1"):
    """Pool to worker: keep a host copy of this model, loaded from one of ``sources`` (in this order) or your disk.

    Answered once accepted; the heartbeat's ``host_copies`` tell how it goes.
    """

    model: ModelRecord
    epoch: int
    """Unique in the cluster: the tags of the transfer carry it."""
    sources: tuple[CopySource, ...]
    cap_gbps: float = 0.0
    """Of the transfer from the first source; 0: none."""


class DropCopy(Message, frozen=True, kw_only=True, tag="drop_copy.v1"):
    """Pool to worker: retire your host copy of this model, and free it once the pool confirms."""

    model_hash: str


class CanRead(Message, frozen=True, kw_only=True, tag="can_read.v1"):
    """Pool to worker: could you load this model from your disk now? ``Ack``, or the error that it would end with."""

    model: ModelRecord


class RetireCopy(Message, frozen=True, kw_only=True, tag="retire_copy.v1"):
    """Worker to pool: may this copy go? ``Ack`` if another unretired one stays (or the model was removed);
    from then on this one does not count. ``Conflict``: it is the last, keep it.

    Of a worker that stops (``leaving``) the last copy goes, too, once no other worker could take it over."""

    worker_id: str
    kind: Literal["gpu", "host"] = msgspec.field(name="copy_kind")
    """``kind`` on the wire is the message's tag."""
    model: str
    model_hash: str
    instance_id: str = ""
    """Of a GPU copy."""
    undo: bool = False
    """The copy stays after all (a drain was taken back): it counts again."""
    leaving: bool = False
    """The worker stops: whatever it holds is gone soon, and it takes nothing new."""
    stays: bool = False
    """The instance serves on without this copy, which is a source for others alone: it goes only where another copy is
    in some memory."""
    sequence: int = 0
    """Of the worker's newest report when it asked: a later one that shows the instance serving counts it again."""
