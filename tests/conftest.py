"""Fixtures that every test may use."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.loop_watch import LoopWatch
from tests.moved_clock import MovedClock, MovedLoop, moved_time
from tests.otlp import OtlpReceiver
from tests.servers import nats_server, redis_server

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A script's background job ignores Ctrl-C, and so would everything that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LAB = ("tests/bench/lab/", "tests/bench/scaleout/test_measure.py", "tests/bench/live/test_measure.py")
"""What needs the lab, of which a machine has one."""
LONG = (
    "tests/bench/loaders/test_measure.py",
    "tests/services/gateway/http/test_hostile_bodies.py",
    "tests/services/pool/test_stopped.py",
    "tests/services/worker/engine/test_against_transformers.py",
    "tests/services/worker/core/scheduling/test_lending_machine.py",
)
"""Modules of few tests that take as long as those with stacks."""
MOVED_CLOCK = (
    "tests/services/monitor/",
    "tests/services/planner/",
    "tests/services/gateway/test_dispatcher.py",
    "tests/services/gateway/test_tokenizer_store.py",
    "tests/services/worker/kv_transfer/test_decode_client.py",
    "tests/services/worker/kv_transfer/test_transfer.py",
    "tests/services/worker/live/test_link_to_source.py",
    "tests/services/worker/live/test_link_to_target.py",
    "tests/services/worker/test_link.py",
    "tests/services/worker/test_orders.py",
    "tests/services/worker/weights/test_host_store.py",
    "tests/services/worker/weights/test_pace.py",
    "tests/shared/test_aio.py",
    "tests/shared/test_identity.py",
    "tests/shared/test_load_feed.py",
    "tests/test_moved_clock.py",
)
"""What runs in one event loop, with no sockets, processes or threads of its own, has a clock that stands still while
there is something to do (``tests/moved_clock.py``)."""


@pytest.fixture(autouse=True)
def moved_clock(request: pytest.FixtureRequest) -> Iterator[MovedClock | None]:
    """The clock of a test of ``MOVED_CLOCK``, which can also be moved by hand."""
    if _is_moved(request.node):
        with moved_time() as clock:
            yield clock
    else:
        yield None


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"moved": MovedLoop} if _is_moved(item) else {"real": asyncio.new_event_loop}


def _is_moved(item: pytest.Item) -> bool:
    return item.nodeid.startswith(MOVED_CLOCK) and item.get_closest_marker("asyncio") is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests run in one process, one after the other: those of a module, and all that need the lab.

    The third process and those after it take modules from the back of the order of
    ``pytest_collection_modifyitems``: beside two stacks, which use a machine's processors, run tests that mostly wait.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if int(node.gateway.id.removeprefix("gw")) >= 2:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)  # the first

    config.option.loadscopereorder = False  # they are in order: see pytest_collection_modifyitems
    return ByModule(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The lab, stacks, and then the other modules, those with few tests first. What takes longest is at either end,
    where processes begin; at the end, in between, none has much left to do while the others are done."""
    sizes = Counter(_scope(item.nodeid) for item in items)
    long = {*LONG, *(_scope(item.nodeid) for item in items if item.get_closest_marker("stack") is not None)}

    def place(item: pytest.Item) -> tuple[bool, bool, int, str]:
        scope = _scope(item.nodeid)
        is_long = scope in long
        return scope != "lab", not is_long, -sizes[scope] if is_long else sizes[scope], scope

    items.sort(key=place)


def _scope(nodeid: str) -> str:
    module = nodeid.partition("::")[0]
    return "lab" if module.startswith(LAB) else module


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is imported and collected, now or later: all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def watched_loops() -> Iterator[LoopWatch]:
    watch = LoopWatch()
    with watch.watching():
        yield watch


@pytest.fixture(autouse=True)
def no_long_callbacks(watched_loops: LoopWatch) -> Iterator[None]:
    """A test fails in which a callback of product code kept an event loop from everything else."""
    yield
    long, watched_loops.long = watched_loops.long, []
    if long:
        pytest.fail("\n".join(["the event loop was kept too long", *long]))


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a NATS server with JetStream, shared by the session: use names of your own."""
    server = nats_server(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis server, shared by the session: flush it or use keys of your own."""
    server = redis_server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """An OTLP/HTTP endpoint that keeps the spans it gets."""
    receiver = OtlpReceiver()
    receiver.start()
    yield receiver
    receiver.stop()
