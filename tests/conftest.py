"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.otlp import OtlpReceiver
from tests.servers import nats_server, redis_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests run in one process, one after the other: those of a module, and all that need the one lab."""
    for item in items:
        group = "lab" if item.get_closest_marker("root") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


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
