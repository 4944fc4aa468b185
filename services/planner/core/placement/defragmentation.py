"""Whose running requests move so that a prompt that waits for KV can begin. Pure.

The free KV of a model lies in pieces, some on each instance, and a prompt needs all of its KV on one. One that is
queued stays where it is; what runs beside it can move (``docs/decisions/0021-migration.md``). So where the first
waiting request of an instance has lacked KV for a while, and others have as much to spare, they take over that much.

Nothing swaps for ever: each move lets a request begin, nobody gives more than he has to spare, and who was helped
neither gives nor takes for ``REST_S``, nor who has taken gives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from services.planner.core.placement.migration import MAX_DESTINATIONS
from shared.messages.common import Role
from shared.messages.destinations import Destination
from shared.subjects import Process

LACKS_S = 0.5
"""What has lacked KV for so long waits for longer than the end of some short answer."""
REST_S = 5.0
"""As long as a request that has moved stays where it is."""
RESERVE_SHARE = 0.1
"""Of an instance's KV, which it keeps for the answers that grow there."""
QUESTIONS_S = 0.02
BYTES_PER_S = 1e9
"""A move is taken to last for so long, and at this rate: slower than most networks are."""
KINDS: tuple[Role, ...] = ("colocated", "decode")
"""Requests that one instance of these decodes, another one may."""


@dataclass(frozen=True, slots=True)
class Serves:
    """An instance that serves, and stays, by what it reported last. KV is in tokens."""

    worker: Process
    instance_id: str
    role: Role
    context_tokens: int
    """Longest prompt plus output that its requests were promised."""
    free_slots: int
    decoding: int
    """Requests."""
    kv: int
    free_kv: int
    queued_kv: int
    """That prompts will have which are accepted and not computed."""
    head_kv: int
    """That has to be free for its first waiting request to begin; 0: none waits for KV."""
    lacked_s: float
    """For how long there has been such a request."""

    @property
    def lacking_kv(self) -> int:
        return max(0, self.head_kv - self.free_kv)

    @property
    def spare_kv(self) -> int:
        """That others may have."""
        return self.free_kv - max(self.head_kv, self.queued_kv) - int(RESERVE_SHARE * self.kv)


@dataclass(frozen=True, slots=True)
class Relief:
    """Requests of ``source`` go to ``destinations``, as far as that lets its first waiting one begin."""

    source: Serves
    destinations: tuple[Destination, ...]
    why: str


def relief(
    instances: Iterable[Serves],
    kv_bytes_per_token: int,
    *,
    relieved: Collection[str] = (),
    taken: Collection[str] = (),
) -> Relief | None:
    """The smallest move among the instances of one model that lets a waiting request begin; None: none is needed, or
    can be had. ``relieved``, ``taken``: ids of instances whose requests moved, and to which some moved, within the last
    ``REST_S``."""
    instances = [serves for serves in instances if serves.role in KINDS]
    lacking = [
        serves
        for serves in instances
        if serves.lacking_kv
        and serves.decoding
        and serves.instance_id not in relieved
        and serves.instance_id not in taken
        # What has lacked KV for so long is taken to lack it for as long again.
        and serves.lacked_s >= max(LACKS_S, _seconds(serves.lacking_kv * kv_bytes_per_token))
    ]
    for source in sorted(lacking, key=lambda serves: (serves.lacking_kv, serves.instance_id)):
        takers = _takers(source, [serves for serves in instances if serves.instance_id not in relieved])
        if sum(taker.spare_kv for taker in takers) >= source.lacking_kv:
            return Relief(source, tuple(map(_destination, takers)), _why(source, len(takers)))
    return None


def _takers(source: Serves, instances: Sequence[Serves]) -> list[Serves]:
    """Who could take some of the source's requests, those with the most to spare first."""
    suitable = [
        serves
        for serves in instances
        if serves.instance_id != source.instance_id
        and serves.role == source.role
        and not serves.lacking_kv
        and serves.spare_kv > 0 < serves.free_slots
        and serves.context_tokens >= source.context_tokens
    ]
    suitable.sort(key=lambda serves: (-serves.spare_kv, serves.instance_id))
    return suitable[:MAX_DESTINATIONS]


def _destination(taker: Serves) -> Destination:
    return Destination(
        worker_id=taker.worker.id,
        incarnation=taker.worker.incarnation,
        instance_id=taker.instance_id,
        kv_tokens=taker.spare_kv,
    )


def _why(source: Serves, num_takers: int) -> str:
    others = "another instance has" if num_takers == 1 else f"{num_takers} others have"
    return (
        f"the first waiting request of {source.instance_id} has lacked KV of {source.lacking_kv} tokens "
        f"for {source.lacked_s:.1f} s, and {others} that much to spare"
    )


def _seconds(num_bytes: int) -> float:
    """That a move of so much KV takes."""
    return QUESTIONS_S + num_bytes / BYTES_PER_S
