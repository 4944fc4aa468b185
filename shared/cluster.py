"""Whose NATS this is: a process that was given another cluster's servers must not take part in its work.

Passwords keep most of them out. Where there are none, or two clusters have the same, the servers know: they keep the
name of the first cluster that came, whoever of its processes lives.
"""

from __future__ import annotations

import asyncio
import logging

from shared.bus.base import Bus
from shared.errors import BlitzError, NotPermitted, WrongCluster
from shared.permissions import NAMES_CLUSTER
from shared.subjects import CLUSTER_STREAM

DEFAULT_CLUSTER = "blitzscale"
AGAIN_S = 1.0

_log = logging.getLogger(__name__)


async def is_ours(bus: Bus, kind: str, name: str) -> bool:
    """Whether the servers keep this name, which a pool or a planner gives them if they keep none. False: they cannot
    say, or keep none yet. Raises ``WrongCluster``."""
    try:
        found = await bus.cluster_name(claim=name if kind in NAMES_CLUSTER else "")
    except NotPermitted as error:
        _log.warning("whose servers these are cannot be asked: %s", error)
        return True
    except BlitzError as error:
        _log.debug("%s", error)
        return False
    if found and found != name:
        raise WrongCluster(
            f"this NATS is of the cluster {found!r:.200}, and BLITZ_CLUSTER is {name!r}: another BLITZ_NATS_URL, or "
            f"delete the stream {CLUSTER_STREAM} if the cluster has another name now"
        )
    return bool(found)


async def until_it_is_ours(bus: Bus, kind: str, name: str) -> None:
    """Ask again until the servers say. Raises ``WrongCluster``."""
    while not await is_ours(bus, kind, name):
        await asyncio.sleep(AGAIN_S)
