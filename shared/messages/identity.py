"""Who holds an id: gateways and workers answer while they live."""

from __future__ import annotations

from shared.messages.codec import Message
from shared.messages.common import Figure


class GetHolder(Message, frozen=True, kw_only=True, tag="get_holder.v1"):
    """Do you hold the id of this subject?"""


class Holder(Message, frozen=True, kw_only=True, tag="holder.v1"):
    """The process that holds an id."""

    incarnation: str
    """New at every process start."""
    host: str
    pid: int
    held_s: Figure = 0.0
    """For how long, by its own clock."""
