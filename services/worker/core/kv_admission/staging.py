"""Memory for KV on its way to this worker that is not in its KV pool yet."""

from __future__ import annotations

STAGING_BYTES = 512 << 20
"""Eight requests' windows: more senders at once do not make a NIC faster."""
WINDOW_LAYERS = 8
WINDOW_BYTES = 64 << 20
"""Of KV that may be on its way to one request: its receives are posted before it is sent."""


class Staging:
    """Over all requests. Event loop only."""

    def __init__(self) -> None:
        self.used_bytes = 0

    def window(self, layer_bytes: int, num_layers: int) -> Window | None:
        """Memory for some layers of a request, to be closed; None if there is none now. A request whose one layer is
        larger than everything gets it when no other request has anything."""
        layers = min(num_layers, WINDOW_LAYERS, max(1, WINDOW_BYTES // layer_bytes))
        layers = min(layers, (STAGING_BYTES - self.used_bytes) // layer_bytes)
        if layers < 1 and self.used_bytes:
            return None
        return Window(self, max(1, layers), layer_bytes)


class Window:
    """So many layers of one request."""

    def __init__(self, staging: Staging, num_layers: int, layer_bytes: int) -> None:
        self.num_layers = num_layers
        self._staging = staging
        self._num_bytes = num_layers * layer_bytes
        staging.used_bytes += self._num_bytes

    def reopen(self, layer_bytes: int) -> bool:
        """As many layers again, of another size, once it was closed; False if there is no memory now."""
        num_bytes = self.num_layers * layer_bytes
        if self._staging.used_bytes and self._staging.used_bytes + num_bytes > STAGING_BYTES:
            return False
        self._num_bytes = num_bytes
        self._staging.used_bytes += num_bytes
        return True

    def close(self) -> None:
        """No more is received. May be repeated."""
        self._staging.used_bytes -= self._num_bytes
        self._num_bytes = 0
