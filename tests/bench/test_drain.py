"""What a drain's run says of its streams."""

from __future__ import annotations

from bench.drain import Run, document
from bench.streamed import Streamed


def test_a_pause_counts_in_which_a_piece_was_late_and_not_one_before_or_after() -> None:
    stream = Streamed(0, "abcde", (0.0, 1.0, 1.1, 1.4, 3.0))
    assert round(stream.longest_gap_s(1.05, 2.0), 3) == 0.3
    assert round(stream.longest_gap_s(0.0, 2.0), 3) == 1.0
    assert stream.longest_gap_s(4.0, 5.0) == 0.0


def test_the_document_has_medians_of_drains_and_sums_of_what_moved_and_failed() -> None:
    runs = {"migration": [Run(0.5, 4, (0.03, 0.05), 0.02, 0), Run(0.7, 3, (0.04,), 0.02, 1)], "without": []}
    found = document(runs)
    assert (found["migration"]["free_p50_s"], found["migration"]["free_max_s"]) == (0.6, 0.7)
    assert (found["migration"]["moved"], found["migration"]["failed"]) == (7, 1)
    assert (found["migration"]["pause_p50_ms"], found["migration"]["pause_max_ms"]) == (40.0, 50.0)
    assert found["without"]["free_p50_s"] is None
