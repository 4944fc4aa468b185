"""Ids that one living process holds at a time: a second holder ends with an error.

A holder answers questions on its id's subject. So a process that starts asks first: whoever is dead does not answer
(its connection broke with it), and whoever was restarted after a crash comes in at once. Where two live all the same,
because neither heard the other, the one that has held the id for less time gives way (``gives_way``).
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
TIE_S = 2.0
"""Holders that began within this of each other are told apart by name: an answer takes less on its way."""


def new_incarnation() -> str:
    """A name of this start of this process. Names have no order: which of two starts was later is not in them."""
    return secrets.token_hex(8)


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
    host, pid, since_s = socket.gethostname(), os.getpid(), time.monotonic()

    async def answer(_: GetHolder) -> Holder:
        return Holder(incarnation=incarnation, host=host, pid=pid, held_s=time.monotonic() - since_s)

    return [await bus.respond(subject, GetHolder, answer) for subject in subjects]


def gives_way(incarnation: str, held_s: float, rival: Holder) -> bool:
    """Whether the process that has held an id for ``held_s`` gives it up to ``rival``, which was asked just now.

    An answer's way makes the rival look younger than it is. So never both give way; neither does only if the two began
    ``TIE_S`` apart to within that way, and then an answer that takes another time decides.
    """
    longer_s = held_s - rival.held_s
    return longer_s < -TIE_S or (longer_s <= TIE_S and incarnation < rival.incarnation)
