"""What a tensor transport has carried, by what for: a transfer's tag says that."""

from __future__ import annotations

import itertools
from typing import get_args

from shared.messages.traffic import CarriedBytes, Direction, Purpose, Way
from shared.transport.tags import Carries, carried_by

_PURPOSES: dict[Carries, Purpose] = {
    Carries.WEIGHTS: "weights",
    Carries.KV_TO_DECODE: "kv",
    Carries.PAIR: "activations",
    Carries.PAIR_KV: "kv",
}


class TrafficCounters:
    """Bytes of the transfers that ended well. Counted on the transport's thread, read on any."""

    def __init__(self) -> None:
        # All keys from the beginning: who reads while another thread counts must not meet a growing dict.
        keys = itertools.product(get_args(Direction), get_args(Purpose), get_args(Way))
        self._bytes: dict[tuple[Direction, Purpose, Way], int] = dict.fromkeys(keys, 0)

    def count(self, direction: Direction, tag: int, num_bytes: int, *, same_host: bool) -> None:
        """A transfer with this tag ended well. The transport's thread only."""
        self._bytes[direction, _PURPOSES[carried_by(tag)], "host" if same_host else "network"] += num_bytes

    def carried(self) -> tuple[CarriedBytes, ...]:
        """Everything up to now."""
        return tuple(
            CarriedBytes(direction=direction, purpose=purpose, way=way, num_bytes=num_bytes)
            for (direction, purpose, way), num_bytes in self._bytes.items()
        )
