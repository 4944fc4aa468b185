"""Weights that a device copies later than it is asked: nothing counts as here before it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from services.worker.device.completion import waited
from services.worker.device.late import LateDevice, LateStreams, LateTiming
from services.worker.memory.arena import Arena
from services.worker.memory.pieces import cut
from services.worker.memory.weight_copy import WeightCopy
from shared.errors import BadRequest
from shared.layout import CHECK_BYTES
from tests.services.worker.device.waiting import held
from tests.services.worker.weights.feeding_peers import random_copy


@pytest.fixture
def streams() -> Iterator[LateStreams]:
    streams = LateStreams(LateTiming())
    yield streams
    streams.close()


def late_copy(streams: LateStreams, like: WeightCopy) -> WeightCopy:
    return WeightCopy(like.layout, Arena(LateDevice(streams).allocate(like.layout.num_bytes)), like.digests)


def _later(streams: LateStreams, work: Callable[[], Any], is_here: Callable[[], bool]) -> Any:
    """What it gives, once the device has done what it asks for: not before."""
    with ThreadPoolExecutor(1) as threads:
        with held(streams):
            working = threads.submit(work)
            with pytest.raises(TimeoutError):
                working.result(0.1)
            assert not is_here()
        return working.result(30)


def test_a_unit_is_here_when_it_was_copied(streams: LateStreams) -> None:
    source = random_copy()
    copy = late_copy(streams, source)
    told: list[int] = []
    copy.listen(lambda: told.append(1))
    num_units = len(source.layout.units)
    for unit in range(num_units):
        told.clear()
        assert _later(streams, partial(copy.copy_unit, unit, source), lambda: bool(told))
        assert copy.unit_arrived(unit)
    num_bytes = source.layout.num_bytes
    assert bytes(copy.arena.memory(0, num_bytes)) == bytes(source.arena.memory(0, num_bytes))


def test_a_piece_is_here_when_it_was_copied(streams: LateStreams) -> None:
    source = random_copy()
    copy = late_copy(streams, source)
    piece = next(piece for piece in cut(source.layout, CHECK_BYTES) if not piece.is_checksums)
    here = np.asarray(copy.buffer(piece))
    _later(streams, lambda: copy.copy_piece(piece, source), lambda: bool(here.any()))
    assert bytes(here) == bytes(source.buffer(piece))


def test_a_write_outside_is_refused_at_once(streams: LateStreams) -> None:
    memory = LateDevice(streams).allocate(100)
    with pytest.raises(BadRequest):
        memory.write(60, bytes(41))
    waited(memory.write(60, bytes(range(40))))
    assert bytes(memory.memory(60, 40)) == bytes(range(40))
