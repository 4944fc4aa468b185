"""How long an instance is kept that the load does not need, where no time is set.

Keeping it costs a GPU second a second. Giving it back and fetching it again costs a load: the GPU does nothing else for
that long, and the requests that come first wait for it. Which of the two is cheaper depends on when the next request
comes, which is not known: the ski rental problem. Keeping the instance until that has cost as much as fetching it again
costs at most twice what the best decision in hindsight would have (Karlin, Manasse, Rudolph and Sleator, "Competitive
snoopy caching", Algorithmica 3, 1988), and no deterministic rule does better.

    window = load_s (the GPU) + load_s (the wait of who comes first)
"""

from __future__ import annotations

MIN_WINDOW_S = 0.5
"""However fast the model loads: an instance must not come and go twice within a second."""
MAX_WINDOW_S = 60.0
"""However slowly it loads."""


def idle_window_s(load_s: float) -> float:
    """Seconds for which an instance without anything to do is kept; ``load_s``: to fetch it again."""
    return min(max(2 * load_s, MIN_WINDOW_S), MAX_WINDOW_S)
