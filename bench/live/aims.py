"""What the mock engine's figures should reach. The torch engine shares the machine's cores with what it measures."""

from __future__ import annotations

ZIGZAG_LAYERS_PER_S = 1.8
"""Of both instances together while half of the batches wait, in units of one instance alone; at least."""
DEVIATION = 0.10
"""Of a measured time from its playback; at most."""
