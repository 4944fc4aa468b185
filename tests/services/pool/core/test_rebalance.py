"""Which copy moves so that hosts hold equal shares, and how many hosts are looked at for that."""

from __future__ import annotations

import pytest

from services.pool.core.rebalance import Rebalancer
from tests.records import model
from tests.services.pool.deciding import cluster_of
from tests.services.pool.host_copies import copy_of, holding

MODELS = [model(f"m{i:02}", weights_bytes=100) for i in range(40)]


@pytest.mark.parametrize("uneven", [False, True])
def test_only_hosts_that_a_copy_could_move_to_are_asked_how_much_is_free(
    uneven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [[copy_of(m)] for m in MODELS]
    if uneven:
        held[0] += held[1] + held[2]
        held[1], held[2] = [], []
    cluster = cluster_of(MODELS, [holding(f"w{i:02}", copies) for i, copies in enumerate(held)])
    cluster.refresh()
    asked: list[str] = []
    free_bytes = cluster.memory.free_bytes

    def asks(worker_id: str) -> int:
        asked.append(worker_id)
        return free_bytes(worker_id)

    monkeypatch.setattr(cluster.memory, "free_bytes", asks)
    rebalancer = Rebalancer(cluster)
    move = rebalancer.find(1000)
    if uneven:
        assert move is not None
        assert move[2] == "w01"
        assert set(asked) == {"w01"}
    else:
        assert move is None
        assert rebalancer.is_over
        assert asked == []
