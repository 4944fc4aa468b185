"""Tags that a transport remembers for a while."""

from __future__ import annotations

from collections import OrderedDict

MAX_UNCLAIMED = 4096
"""Messages kept for a receive that is not posted yet. Data planes post receives ahead, so a handful is usual."""
MAX_UNCLAIMED_BYTES = 256 * 1024 * 1024
"""Of all of them. Over TCP an unclaimed message takes its size in memory; over shared memory and RDMA a handle."""
_MAX_RECENT = 1 << 16


class RecentTags:
    """The last ``limit`` tags added; older ones are forgotten."""

    def __init__(self, limit: int = _MAX_RECENT) -> None:
        self._limit = limit
        self._tags: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, tag: object) -> bool:
        return tag in self._tags

    def add(self, tag: int) -> None:
        """Remember a tag."""
        self._tags[tag] = None
        if len(self._tags) > self._limit:
            self._tags.popitem(last=False)
