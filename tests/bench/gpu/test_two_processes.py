"""Rows with a second process, on the CPU over UCX: what comes, what does not, and who dies."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from bench.gpu import loads
from bench.gpu import pair as pair_row
from bench.gpu.engines import EnginePlace
from bench.gpu.loads import LoadSettings
from bench.gpu.pair import GreedyBatch, PairSettings
from bench.gpu.processes import second_process
from services.worker.kv_transfer.connector import KvRange
from services.worker.memory.weight_copy import WeightCopy
from shared.errors import TransportError
from shared.layout import layout_of
from shared.transport.ucx import UcxTransport
from tests.bench.gpu.places import TINY, Found, cpu, played_gpu
from tests.bench.gpu.second import dies, raises

WIDE = msgspec.structs.replace(TINY, hidden_size=512, intermediate_size=1024, vocab_size=2048)
"""Of several pieces per unit."""
LOADS = LoadSettings(TINY, rounds=1, peer_spec=WIDE, chunks=(512 << 10,))
PAIR = PairSettings(TINY, prompt_tokens=(3, 40, 100), output_tokens=12)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.ucx
def test_a_model_comes_from_the_host_and_from_a_process_and_the_rest_from_another_one(tmp_path: Path) -> None:
    found = Found("loads", tmp_path)
    loads.measure_on(found.report, cpu(), LOADS)
    assert found.failed == []
    assert (found["host to device, verified: of the time of plain copies"].value or 0) > 0
    assert found["from another process, pieces of 512 KiB: blocks that differ"].value == 0
    assert found["from another process, pieces of 512 KiB"].unit == "GB/s"
    assert "pieces are missing" in found["a sender that is killed"].note
    assert not found["a sender that is killed"].note.startswith("all had come")
    assert found["blocks that differ after a killed sender"].value == 0
    assert found["receives that hang"].value == 0


@pytest.mark.ucx
def test_blocks_that_are_not_what_was_sent_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = WeightCopy.bad_ranges

    def spoilt(self: WeightCopy, unit: int) -> tuple[tuple[int, int], ...]:
        self.arena.memory(0, 1)[0] = 77
        return right(self, unit)

    monkeypatch.setattr(WeightCopy, "bad_ranges", spoilt)
    found = Found("loads", tmp_path)
    loads.measure_on(found.report, cpu(), LOADS)
    assert found["from another process, pieces of 512 KiB: blocks that differ"].value == 1
    assert found["blocks that differ after a killed sender"].value == 1
    assert {name for name in found.off if "differ" in name} == {
        "from another process, pieces of 512 KiB: blocks that differ",
        "blocks that differ after a killed sender",
    }


def _no_ucx(place: EnginePlace, name: str) -> UcxTransport:
    raise TransportError("UCX did not start: No module named 'ucxx'")


def test_without_ucx_only_what_needs_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "transport_on", _no_ucx)
    found = Found("loads", tmp_path)
    loads.measure_on(found.report, played_gpu(), LOADS)
    assert found.failed == ["from another process: TransportError: UCX did not start: No module named 'ucxx'"]
    assert (found["host to device, plain"].value or 0) > 0


def test_a_host_with_little_memory_has_fewer_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_two = layout_of(msgspec.structs.replace(TINY, num_layers=2)).num_bytes
    pages = {"SC_AVPHYS_PAGES": of_two * 3 // 2, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    found = Found("loads", tmp_path)
    monkeypatch.setattr(loads, "transport_on", _no_ucx)
    loads.measure_on(found.report, cpu(), replace(LOADS, spec=msgspec.structs.replace(TINY, num_layers=8)))
    assert found["fewer layers"].note.startswith("2: 0.0 GiB")


@pytest.mark.ucx
def test_a_pair_writes_what_one_process_writes(tmp_path: Path) -> None:
    found = Found("pair", tmp_path)
    pair_row.measure_on(found.report, played_gpu(), PAIR)
    assert found.failed == found.off == []
    assert found["requests with other tokens than alone"].note.startswith("of 3 requests of 12 tokens")
    assert (found["KV from blocks to blocks"].value or 0) > 0


@pytest.mark.ucx
def test_kv_that_is_not_the_prompts_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = GreedyBatch.kv

    def spoilt(self: GreedyBatch) -> KvRange:
        self.engine.cache.v[0].neg_()
        return right(self)

    monkeypatch.setattr(GreedyBatch, "kv", spoilt)
    found = Found("pair", tmp_path)
    pair_row.measure_on(found.report, cpu(), PAIR)
    assert found.off == ["requests with other tokens than alone"]


@pytest.mark.parametrize(
    ("num_gpus", "visible", "second"),
    [(1, None, None), (2, None, "1,0"), (2, "3,5", "5,3"), (4, None, "1,2,3,0")],
)
def test_the_second_process_has_another_gpu_where_there_is_one(
    num_gpus: int, visible: str | None, second: str | None
) -> None:
    assert pair_row.another_first(num_gpus, visible) == second


def test_what_a_second_process_raises_is_said_and_one_that_dies_is_known() -> None:
    with second_process(raises) as peer, pytest.raises(RuntimeError, match="the second process: ValueError: no"):
        peer.answer()
    with second_process(dies) as peer, pytest.raises(EOFError):
        peer.answer()
