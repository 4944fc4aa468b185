"""How long to wait before a question is asked again."""

from __future__ import annotations

from collections.abc import Iterator


def growing(first_s: float, most_s: float) -> Iterator[float]:
    """Pauses that grow by half."""
    while True:
        yield first_s
        first_s = min(most_s, 1.5 * first_s)
