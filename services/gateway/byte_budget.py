"""Memory that clients can make the gateway use, counted and bounded over all of them together."""

from __future__ import annotations

from types import TracebackType

from shared.errors import Overloaded

RETRY_AFTER_S = 1.0


class ByteBudget:
    """Bytes that many users take for one purpose. Everything runs on the event loop."""

    def __init__(self, limit_bytes: int, what: str) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._what = what

    def claim(self) -> Claim:
        """An empty share; use it as a context."""
        return Claim(self)

    def _take(self, num_bytes: int) -> None:
        if num_bytes > 0 and self.used_bytes + num_bytes > self.limit_bytes:
            raise Overloaded(
                f"{self._what} here occupy {self.used_bytes} bytes of memory; with {num_bytes} more they would exceed "
                f"the {self.limit_bytes} that they may occupy; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self.used_bytes += num_bytes


class Claim:
    """One user's share of a budget, given back at the end of its ``with``."""

    __slots__ = ("_budget", "num_bytes")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        """Take more or give back. Raises ``Overloaded`` when the budget is used up; then the share stays as it was."""
        self._budget._take(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resize(0)
