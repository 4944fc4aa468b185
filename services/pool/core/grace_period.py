"""Grace periods: when silence counts. A bus, Redis or pool outage must not look like a mass death.

A worker is dead when its lease has run out, but a lease also runs out when the pool could not hear or store its
renewal. So after every outage on the pool's own side, and after start-up, the pool expires and grants nothing until one
full lease has passed: by then every living worker has renewed (it renews at least twice per lease).

A pool process that was stopped or busy for a while heard nothing either: renewals wait in its own socket. After that it
expires nothing for as long.
"""

from __future__ import annotations

from shared.errors import Unavailable


class GracePeriod:
    """Knows since when both the bus and the store work. Times are monotonic seconds."""

    def __init__(self, lease_s: float, *, knows_all: bool = False) -> None:
        """``knows_all``: there was no worker before, so the first wait is left out."""
        self._lease_s = lease_s
        self._knows_all = knows_all
        self._looked_s = self._hears_since_s = float("-inf")
        self._healthy_since_s: float | None = None
        self._bus_since_s: float | None = None

    def observe(self, now_s: float, *, bus_since_s: float | None, store_ok: bool) -> None:
        """Record one look at both connections (``bus_since_s`` as ``Bus.connected_since_s``), several per lease."""
        if now_s - self._looked_s > self._lease_s / 2:
            self._hears_since_s = now_s
        self._looked_s = now_s
        works, before_s = bus_since_s is not None and store_ok, self._healthy_since_s
        if before_s is not None and (not works or bus_since_s != self._bus_since_s):
            self._knows_all = False
        if not works:
            self._healthy_since_s = None
        elif before_s is None or bus_since_s != self._bus_since_s:
            # A reconnect between two looks counts from now: renewals may have been lost until it.
            self._healthy_since_s = now_s
        self._bus_since_s = bus_since_s

    def over(self, now_s: float) -> bool:
        """Whether everything works, and has worked for a full lease if there may be workers to hear from."""
        since_s = self._healthy_since_s
        return since_s is not None and (self._knows_all or now_s - since_s >= self._lease_s)

    def silence_counts(self, now_s: float) -> bool:
        """``over``, and this process could hear workers the whole time."""
        return self.over(now_s) and now_s - self._hears_since_s >= self._lease_s

    def check(self, now_s: float) -> None:
        """Raises ``Unavailable`` until it is ``over``: what is granted earlier may belong to another plan already."""
        if not self.over(now_s):
            raise Unavailable(
                "the registry is recovering and grants nothing until a lease has passed",
                retry_after_s=self.remaining_s(now_s),
            )

    def remaining_s(self, now_s: float) -> float:
        """Seconds until ``over`` if nothing breaks; a full lease while something is broken."""
        if self._healthy_since_s is None:
            return self._lease_s
        return 0.0 if self.over(now_s) else self._lease_s - (now_s - self._healthy_since_s)
