from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.services.worker.late_workers import AT_ONCE, TIMINGS, late_engines
from tests.services.worker.lone_worker import LoneWorker, lone_worker


@pytest.fixture
async def alone() -> AsyncIterator[LoneWorker]:
    """A spare worker with a registry double."""
    async with lone_worker() as running:
        yield running


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """See ``late_workers.also_late``. To be made before what has engines."""
    if request.param == AT_ONCE:
        yield
        return
    with late_engines(TIMINGS[request.param]) as late:
        yield
    late.check()
