"""Memory for KV on its way to this worker that is not in its KV pool yet."""

from __future__ import annotations

STAGING_BYTES = 512 << 20
"""Eight requests' windows: more senders at once do not make a NIC faster."""
WINDOW_PIECES = 8
WINDOW_BYTES = 64 << 20
"""Of KV that may be on its way from one sender: receives are posted before it is sent."""


class Staging:
    """Of a worker, over all that comes in. Event loop only."""

    def __init__(self) -> None:
        self.used_bytes = 0

    def reserve(self, piece_bytes: int, num_pieces: int, *, is_promised: bool = False) -> Window | None:
        """Memory for some of the pieces that KV comes in; None if there is none now. A piece larger than everything
        gets it when there is nothing else. ``is_promised``: one piece has room, whatever there is."""
        pieces = min(num_pieces, WINDOW_PIECES, max(1, WINDOW_BYTES // piece_bytes))
        pieces = min(pieces, (STAGING_BYTES - self.used_bytes) // piece_bytes)
        if pieces < 1 and self.used_bytes and not is_promised:
            return None
        return Window(self, max(1, pieces), piece_bytes)


class Window:
    """So many pieces at the same time."""

    def __init__(self, staging: Staging, num_pieces: int, piece_bytes: int) -> None:
        self.num_pieces = num_pieces
        self._staging = staging
        self._num_bytes = num_pieces * piece_bytes
        staging.used_bytes += self._num_bytes

    def reopen(self, piece_bytes: int) -> bool:
        """As many again, of another size, once it was released; False if there is no memory now."""
        num_bytes = self.num_pieces * piece_bytes
        if self._staging.used_bytes and self._staging.used_bytes + num_bytes > STAGING_BYTES:
            return False
        self._num_bytes = num_bytes
        self._staging.used_bytes += num_bytes
        return True

    def release(self) -> None:
        """No more is received. May be repeated."""
        self._staging.used_bytes -= self._num_bytes
        self._num_bytes = 0
