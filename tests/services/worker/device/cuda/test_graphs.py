"""What is kept with graphs, and the twin that records: it must find what a graph would not survive."""

from __future__ import annotations

import weakref

import pytest
import torch

from services.worker.device.cuda.graphs import KEPT, CudaGraphs
from tests.services.worker.device.cuda.drivers import HostDecision, PlayedDriver


def test_what_was_made_for_a_key_is_kept_the_least_used_goes() -> None:
    graphs, made = CudaGraphs(PlayedDriver()), list[int]()

    def kept(key: int) -> int:
        return graphs.kept(key, lambda: made.append(key) or len(made))

    assert [kept(key) for key in range(KEPT)] == [*range(1, KEPT + 1)]
    assert kept(0) == 1
    kept(99)
    assert kept(0) == 1
    assert kept(1) == KEPT + 2
    assert made == [*range(KEPT), 99, 1]
    graphs.forget()
    assert kept(1) == KEPT + 3


class Knot:
    """Knows itself, as plans and their wrappers know each other."""

    def __init__(self) -> None:
        self.own = self


def test_what_makes_way_is_gone_at_once_though_it_knows_itself() -> None:
    graphs = CudaGraphs(PlayedDriver())
    first = weakref.ref(graphs.kept(0, Knot))
    for key in range(1, KEPT + 1):
        graphs.kept(key, Knot)
    assert first() is None


def test_a_recording_does_the_same_again_with_what_is_in_the_same_memory() -> None:
    graphs, numbers, out = CudaGraphs(PlayedDriver()), torch.arange(4.0), torch.zeros(4)

    def work() -> None:
        out.copy_(torch.relu(numbers.view(2, 2) * 2 - 3).view(4))

    graph = graphs.record(work, graphs.pool())
    numbers.copy_(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    graph.replay()
    assert out.tolist() == [5.0, 3.0, 1.0, 0.0]


def test_what_the_host_decided_stays_decided_and_what_it_looks_at_is_refused() -> None:
    graphs, numbers, out, factor = CudaGraphs(PlayedDriver()), torch.ones(2), torch.zeros(2), [2.0]
    graph = graphs.record(lambda: out.copy_(numbers * factor[0]), graphs.pool())
    factor[0] = 5.0
    graph.replay()
    assert out.tolist() == [2.0, 2.0]
    with pytest.raises(HostDecision):
        graphs.record(lambda: numbers.sum().item(), graphs.pool())
    with pytest.raises(HostDecision):
        graphs.record(lambda: numbers[numbers > 0], graphs.pool())
