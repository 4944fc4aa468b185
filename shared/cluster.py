"""Whose NATS this is: a process that was given another cluster's servers must not take part in its work.

Passwords keep most of them out. Where there are none, or two clusters have the same, the pool's answer does.
"""

from __future__ import annotations

import asyncio
import logging

from shared import subjects
from shared.bus.base import Bus
from shared.errors import BlitzError, NotPermitted, WrongCluster
from shared.messages.registry import ClusterName, GetCluster

DEFAULT_CLUSTER = "blitzscale"
ASK_TIMEOUT_S = 1.0
AGAIN_S = 1.0

_log = logging.getLogger(__name__)


async def ask(bus: Bus, name: str) -> bool:
    """Whether this bus is the cluster's; raises ``WrongCluster``. False: no pool leads that could say so."""
    try:
        found = await bus.request(subjects.pool("cluster"), GetCluster(), ClusterName, timeout_s=ASK_TIMEOUT_S)
    except NotPermitted as error:
        _log.warning("whose servers these are cannot be asked: %s", error)
        return True
    except BlitzError:
        return False
    if found.name != name:
        raise WrongCluster(
            f"this NATS is of the cluster {found.name!r:.200}, and BLITZ_CLUSTER is {name!r}: another BLITZ_NATS_URL, "
            "or the right name"
        )
    return True


async def ask_until_known(bus: Bus, name: str) -> None:
    """Ask again until a pool leads. Raises ``WrongCluster``."""
    while not await ask(bus, name):
        await asyncio.sleep(AGAIN_S)
