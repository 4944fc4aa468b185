"""CUDA graphs, and what was made with some that a worker keeps between its instances."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

from services.worker.device.cuda.driver import Driver
from services.worker.device.graphs import Graph

T = TypeVar("T")

KEPT = 2
"""Layouts: each has some 300 MiB of the device with it (estimated), for graphs and what they are planned in."""


class CudaGraphs:
    """``Graphs`` of a GPU."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._kept: OrderedDict[object, Any] = OrderedDict()

    def pool(self) -> object:
        return self._driver.pool()

    def record(self, work: Callable[[], object], pool: object) -> Graph:
        return self._driver.record(work, pool)

    def kept(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            gc.collect()  # plans and wrappers know each other
            self._kept[key] = make()
        self._kept.move_to_end(key)
        return cast(T, self._kept[key])

    def forget(self) -> None:
        self._kept.clear()
        gc.collect()
