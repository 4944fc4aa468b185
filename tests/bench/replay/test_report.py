from __future__ import annotations

import io

from rich.console import Console

from bench.replay.report import latency_table, totals_table
from tests.bench.replay.documents import document


def _shown(*, with_cluster: bool) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    found = document(with_cluster=with_cluster)
    console.print(totals_table(found), latency_table(found))
    return " ".join(console.export_text().replace("│", " ").split())


def test_objectives_failures_and_the_clusters_side_are_shown() -> None:
    shown = _shown(with_cluster=True)
    for words in (
        "completed 3 of 4", "failed: connect 1", "within TTFT 250 ms, TBT 100 ms 50.0%", "GPU seconds 5.0",
        "sent over the network: weights 3.0 MB", "scale operations 1",
    ):  # fmt: skip
        assert words in shown
    assert "within hosts" not in shown, "nothing was sent there"


def test_of_other_endpoints_only_what_is_known_is_shown() -> None:
    assert "GPU" not in _shown(with_cluster=False)
