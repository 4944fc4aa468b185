"""What readers of the feed see: a state of entities, and the newest changes to it, numbered. Pure.

There is no queue per reader. A frame is made once, as bytes; a reader says which one it saw last, and gets those after
it, or the whole state where they are not kept any more. So a slow reader costs nothing, and resumes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

MAX_RING_BYTES = 4 << 20
"""Of frames that are kept for readers who come back."""
MAX_STATE_BYTES = 8 << 20
"""Of all entities. What does not fit is left out, and the state says so."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The changes of one moment, as an event of a stream."""

    sequence: int
    event: bytes


class FeedEntities:
    """Entities by their names (``model/NAME``, ``worker/ID``, ...), each a JSON value."""

    def __init__(
        self, incarnation: str, *, ring_bytes: int = MAX_RING_BYTES, state_bytes: int = MAX_STATE_BYTES
    ) -> None:
        """``incarnation``: of this gateway's process; no other has its numbers."""
        self._incarnation = incarnation
        self._ring_bytes, self._state_bytes = ring_bytes, state_bytes
        self._entities: dict[str, bytes] = {}
        self._size = 0
        self._ring: deque[Frame] = deque()
        self._ring_size = 0
        self._sequence = 0
        self._left_out: set[str] = set()
        """What did not fit."""
        self._whole: tuple[int, bytes] | None = None
        """The state as an event, and of which sequence: many readers come at once where a gateway was lost."""

    @property
    def is_empty(self) -> bool:
        """Nothing is known."""
        return not self._entities

    def put(self, at_s: float, found: Mapping[str, Any], *, kinds: Iterable[str]) -> bool:
        """The entities of these kinds are ``found``, and no others. ``at_s``: Unix time, for people. Whether anything
        is new."""
        prefixes = tuple(f"{kind}/" for kind in kinds)
        changed: dict[str, msgspec.Raw] = {}
        was_cut = bool(self._left_out)
        for name, value in found.items():
            encoded = msgspec.json.encode(value)
            before = self._entities.get(name, b"")
            if before == encoded:
                continue
            if self._size + len(encoded) - len(before) > self._state_bytes:
                self._left_out.add(name)
                continue
            self._left_out.discard(name)
            self._entities[name] = encoded
            self._size += len(encoded) - len(before)
            changed[name] = msgspec.Raw(encoded)
        self._left_out &= found.keys()
        gone = [
            name
            for name in self._entities
            if name.startswith(prefixes) and (name not in found or name in self._left_out)  # rather nothing than stale
        ]
        for name in gone:
            self._size -= len(self._entities.pop(name))
        if not changed and not gone and bool(self._left_out) == was_cut:
            return False
        self._sequence += 1
        data = msgspec.json.encode({"at_s": at_s, "changed": changed, "gone": gone, "is_cut": bool(self._left_out)})
        frame = Frame(self._sequence, self._event("frame", data))
        self._ring.append(frame)
        self._ring_size += len(frame.event)
        while self._ring and self._ring_size > self._ring_bytes:
            self._ring_size -= len(self._ring.popleft().event)
        return True

    def clear(self) -> None:
        """Nothing is known any more. Who saw something before gets everything anew."""
        self._sequence += 1
        self._entities.clear()
        self._ring.clear()
        self._size = self._ring_size = 0
        self._left_out.clear()
        self._whole = None

    def last_seen(self, event_id: str) -> int | None:
        """The sequence in a reader's last event id. None: it is no id of this process."""
        incarnation, _, number = event_id.rpartition("-")
        known = incarnation == self._incarnation and number.isdecimal() and len(number) < 20
        return int(number) if known else None

    def since(self, sequence: int | None) -> tuple[int, list[bytes]]:
        """The number of the newest frame, and what brings a reader there who saw that of ``sequence`` last."""
        if sequence is not None and sequence == self._sequence:
            return sequence, []
        first = self._ring[0].sequence if self._ring else self._sequence + 1
        if sequence is None or not first - 1 <= sequence < self._sequence:
            return self._sequence, [self._snapshot()]
        # From behind: nearly all readers lack only the newest of thousands.
        missed = islice(reversed(self._ring), self._sequence - sequence)
        return self._sequence, [frame.event for frame in missed][::-1]

    def _snapshot(self) -> bytes:
        if self._whole is None or self._whole[0] != self._sequence:
            entities = {name: msgspec.Raw(encoded) for name, encoded in self._entities.items()}
            data = msgspec.json.encode({"entities": entities, "is_cut": bool(self._left_out)})
            self._whole = self._sequence, self._event("snapshot", data)
        return self._whole[1]

    def _event(self, kind: str, data: bytes) -> bytes:
        return b"event: %s\nid: %s-%d\ndata: %s\n\n" % (
            kind.encode(), self._incarnation.encode(), self._sequence, data,
        )  # fmt: skip
