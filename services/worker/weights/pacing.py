"""A cap on a link: the token bucket of a feed that shares its way with serving traffic."""

from __future__ import annotations

BURST_S = 0.005
"""Bytes that may go at once, as time at the capped rate: little enough not to queue ahead of serving traffic."""


class TokenBucket:
    """Bytes that may be sent by now. Times are monotonic seconds. Not thread-safe: its flow's lock guards it."""

    def __init__(self, gbps: float, now_s: float) -> None:
        """Raises ``ValueError`` unless ``gbps`` is positive."""
        if gbps <= 0:
            raise ValueError(f"a cap of {gbps} Gbps lets nothing through")
        self._bytes_per_s = gbps * 1e9 / 8
        self._tokens = 0.0
        self._at_s = now_s

    def take(self, num_bytes: int, now_s: float) -> float:
        """Spend tokens for a message; the seconds to wait before trying again, 0 if it may go now.

        A message larger than the burst may go once the bucket is full, and leaves it in debt: the rate holds.
        """
        burst = self._bytes_per_s * BURST_S
        self._tokens = min(burst, self._tokens + (now_s - self._at_s) * self._bytes_per_s)
        self._at_s = now_s
        needed = min(float(num_bytes), burst)
        missing = needed - self._tokens
        if missing >= 1:  # less is rounding
            return missing / self._bytes_per_s
        self._tokens -= num_bytes
        return 0.0
