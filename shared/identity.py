"""Ids that one living process holds at a time: a second holder ends with an error.

A holder answers questions on its id's subject. So a process that starts asks first: whoever is dead does not answer
(its connection broke with it), and whoever was restarted after a crash comes in at once.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time

from shared.bus.base import Bus, Subscription
from shared.errors import DeadlineExceeded, DuplicateId, NoResponder
from shared.messages.identity import GetHolder, Holder

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 1.0


def new_incarnation() -> str:
    """A name of this start of this process. Names of later starts are greater, as far as clocks agree."""
    return f"{time.time_ns() // 1_000_000:013d}-{secrets.token_hex(4)}"


async def refuse_if_held(bus: Bus, subject: str, what: str) -> None:
    """Raises ``DuplicateId`` when a living process holds the id of ``subject``; ``what`` names it."""
    try:
        holder = await bus.request(subject, GetHolder(), Holder, timeout_s=ASK_TIMEOUT_S)
    except NoResponder:
        return
    except DeadlineExceeded:
        # A machine that is gone keeps its subscriptions until the server notices.
        log.warning("%s may have been held until now: its holder does not answer, and counts as dead", what)
        return
    raise DuplicateId(
        f"{what} is held by process {holder.pid} on {holder.host}, which lives: take another id, or stop that one"
    )


async def hold(bus: Bus, incarnation: str, *subjects: str) -> list[Subscription]:
    """Answer for an id from now on, until the subscriptions are closed."""
    holder = Holder(incarnation=incarnation, host=socket.gethostname(), pid=os.getpid())

    async def answer(_: GetHolder) -> Holder:
        return holder

    return [await bus.respond(subject, GetHolder, answer) for subject in subjects]
