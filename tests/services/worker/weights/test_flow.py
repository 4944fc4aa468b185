from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from services.worker.device.host import HOST
from services.worker.memory.arena import Arena
from services.worker.memory.pieces import cut
from services.worker.memory.weight_copy import WeightCopy
from services.worker.weights.flow import Inflow
from shared.errors import TransferAborted
from shared.layout import CHECK_BYTES, layout_of
from tests.records import digests_of_zeros, spec

LAYOUT = layout_of(spec())


class Posted:
    """A transfer that ends when it is aborted."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.aborted = False
        self._callback: Callable[[Any], None] | None = None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callback = callback

    def abort(self) -> None:
        self.aborted = True
        self.error = TransferAborted("aborted")
        if self._callback is not None:
            self._callback(self)


class Transport:
    """Calls ``meanwhile`` while the n-th receive is being posted."""

    def __init__(self, number: int, meanwhile: Callable[[], None]) -> None:
        self.posted: list[Posted] = []
        self._number = number
        self._meanwhile = meanwhile

    def recv(self, *_: object, **__: object) -> Posted:
        if len(self.posted) == self._number:
            self._meanwhile()
        self.posted.append(Posted())
        return self.posted[-1]


def _nothing(*_: object) -> None: ...


def inflow(transport: Transport) -> Inflow:
    copy = WeightCopy(LAYOUT, Arena(HOST.allocate(LAYOUT.num_bytes)), digests_of_zeros(LAYOUT))
    nothing: Any = lambda *_: None  # noqa: E731
    return Inflow(
        cast(Any, transport),
        cast(Any, None),
        copy,
        cut(LAYOUT, CHECK_BYTES),
        7,
        0,
        nothing,
        nothing,
        nothing,
        nothing,
    )


def test_a_receive_posted_while_the_flow_is_aborted_is_aborted_too() -> None:
    quiet_meanwhile: list[bool] = []

    def abort() -> None:
        flow.abort()
        quiet_meanwhile.append(flow.quiet)

    transport = Transport(1, abort)
    flow = inflow(transport)
    flow.start()
    assert len(transport.posted) == 2, "nothing is posted after an abort"
    assert all(p.aborted for p in transport.posted)
    assert quiet_meanwhile == [False], "a receive is on its way: the memory is not free yet"
    assert flow.quiet


def test_a_transport_that_refuses_leaves_the_flow_able_to_end() -> None:
    def refuse() -> None:
        raise RuntimeError("no more")

    flow = inflow(Transport(2, refuse))
    with pytest.raises(RuntimeError):
        flow.start()
    flow.abort()
    assert flow.quiet
