"""How pairs of windows become ratios."""

from __future__ import annotations

import pytest

from bench.page import READERS, Ratio, Window, document


def test_ratios_are_made_pair_by_pair() -> None:
    """What changes from pair to pair, and in both windows alike, is no difference."""
    ratio = Ratio.of([(1.0, 1.0), (8.0, 8.0), (3.0, 3.0)])
    assert (ratio.mean, ratio.low, ratio.high) == (1.0, 1.0, 1.0)
    ratio = Ratio.of([(1.1, 1.0), (2.0, 2.0)])
    assert ratio.low < 1.0 < ratio.mean < ratio.high


def test_the_document_has_both_ratios_with_their_intervals() -> None:
    pairs = [(Window(1.1, 1000, 2.0, events=200), Window(1.0, 1000, 2.0))] * 3
    found = document(pairs)
    assert found["gateway_cpu_per_token"] == {"ratio": 1.1, "interval": [1.1, 1.1]}
    assert found["tokens_per_s"] == {"ratio": 1.0, "interval": [1.0, 1.0]}
    assert found["cpu_per_token_us"] == 1000.0
    assert found["events_per_reader_per_s"] == pytest.approx(100.0 / READERS)
