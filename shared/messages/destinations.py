"""Where the requests of an instance go that drains, or has too many."""

from __future__ import annotations

from typing import Literal

from shared.messages.codec import Message
from shared.messages.common import AtWorker, Count


class Destination(AtWorker, frozen=True, kw_only=True):
    """An instance of the same weights that takes over requests that run."""

    instance_id: str
    kv_tokens: Count
    """Of KV at most: what it is thought to have free, and others do not get."""


SendBack = Literal["none", "waiting", "all"]
"""Which requests an instance that drains sends back to their gateways' queues, beside those that move: none; those that
have not begun, because other instances take such; or all, because it goes for another model, and nobody takes any."""


class GetDestinations(Message, frozen=True, kw_only=True, tag="get_destinations.v1"):
    """A worker that is being stopped asks the planner what becomes of its instance's requests."""

    worker_id: str
    instance_id: str


class Destinations(Message, frozen=True, kw_only=True, tag="destinations.v1"):
    """As in ``shared.messages.plans.DrainTarget``."""

    destinations: tuple[Destination, ...]
    send_back: SendBack
