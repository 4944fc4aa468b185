"""How many bytes of weights, KV and activations a worker's tensor transport has carried."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.messages.codec import Message
from shared.messages.common import Count

Direction = Literal["sent", "received"]
Purpose = Literal["weights", "kv", "activations"]
Way = Literal["network", "host"]
"""Over the NIC, or between two processes of one host."""


class CarriedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one kind since the worker's process began."""

    direction: Direction
    purpose: Purpose
    way: Way
    num_bytes: Count


class PeerTransports(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker reaches another one."""

    worker_id: str
    transports: tuple[str, ...]
    """What the connection runs over, as UCX names it: ``tcp/eth0``, ``sysv/memory``, ``cuda_ipc/cuda``. Which of them
    carries a message depends on its size, and on where its bytes are."""


class GetTraffic(Message, frozen=True, kw_only=True, tag="get_traffic.v1"):
    """Gateway to worker: what has your transport carried?"""


class WorkerTraffic(Message, frozen=True, kw_only=True, tag="worker_traffic.v1"):
    """The counters of one process: they begin again with another incarnation."""

    worker_id: str
    incarnation: str
    carried: tuple[CarriedBytes, ...]
    """Without those that are 0."""
    peers: tuple[PeerTransports, ...] = ()
    """Workers that it is connected with."""
