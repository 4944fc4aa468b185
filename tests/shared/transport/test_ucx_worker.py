"""Requests in flight, with a stand-in for ``ucxx``: what its callbacks may do while requests complete."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ucxx  # noqa: F401 - which sets UCX_RNDV_THRESH by itself, once

from shared.transport import ucx, ucx_worker
from shared.transport.ucx_worker import UcxWorker, open_worker


class Request:
    """One of UCX's, completed when the test says so."""

    completed = False

    def check_error(self) -> None:
        """None occurred."""


class Endpoint:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def tag_send(self, array: object, tag: object) -> Request:
        self.requests.append(Request())
        return self.requests[-1]


def idle_ucx() -> Any:
    return SimpleNamespace(
        init_blocking_progress_mode=lambda: None, address=memoryview(b"here"), epoll_file_descriptor=0
    )


def worker(inner: Any = None) -> UcxWorker:
    inner = inner if inner is not None else idle_ucx()
    stand_in: Any = SimpleNamespace(
        UCXContext=lambda *_: None,
        UCXWorker=lambda _: inner,
        UCXXTag=int,
        UCXXTagMask=int,
        UCXError=OSError,
        UCXMessageTruncatedError=EOFError,
        Feature=SimpleNamespace(TAG=0, WAKEUP=0),
    )
    return UcxWorker(stand_in, bytes, {})


def test_what_waits_for_a_send_may_give_the_endpoint_up() -> None:
    sending, endpoint, ended = worker(), Endpoint(), []

    def give_up(error: Exception | None) -> None:
        ended.append(("first", error))
        sending.give_up(endpoint)

    sending.send(endpoint, b"", 1, give_up)
    sending.send(endpoint, b"", 2, lambda error: ended.append(("second", error)))
    sending.send(endpoint, b"", 3, lambda error: ended.append(("third", error)))
    for request in endpoint.requests[:2]:
        request.completed = True
    sending.end_completed()
    assert ended == [("first", None), ("second", None)]
    assert not sending.busy, "the third may never complete"
    endpoint.requests[2].completed = True
    sending.end_completed()
    sending.end_completed()
    assert ended == [("first", None), ("second", None), ("third", None)], "each ends once"


class BusyUcx:
    """A worker of UCX's to which a peer sends without pause, for longer than anybody should wait; the receive that was
    posted has completed long before."""

    lasts_s = 5.0

    def __init__(self) -> None:
        self.request = Request()
        self._end_s = time.monotonic() + self.lasts_s

    def __getattr__(self, name: str) -> Any:
        return getattr(idle_ucx(), name)

    def tag_recv_with_handle(self, array: object, message: object) -> Request:
        return self.request

    def progress_once(self) -> bool:
        self.request.completed = True
        return time.monotonic() < self._end_s

    def progress(self) -> bool:
        """Ends when nothing comes any more, as UCXX's does."""
        while self.progress_once():
            pass
        return True


def test_what_has_come_is_heard_of_while_a_peer_sends_without_pause() -> None:
    receiving, ended = worker(BusyUcx()), []
    since_s = time.monotonic()
    receiving.receive(object(), b"", ended.append)
    assert receiving.progress()
    receiving.end_completed()
    assert ended == [None]
    assert time.monotonic() - since_s < BusyUcx.lasts_s / 2


@pytest.mark.parametrize("device_memory", [False, True])
def test_memory_of_a_device_is_not_sent_eagerly(monkeypatch: pytest.MonkeyPatch, device_memory: bool) -> None:
    given: list[dict[str, str]] = []
    monkeypatch.setattr(ucx_worker, "RDMA_DEVICES", Path("/nowhere"))
    monkeypatch.setattr(ucx_worker, "UcxWorker", lambda ucx, array, options: given.append(options))
    monkeypatch.delenv("UCX_RNDV_THRESH", raising=False)
    open_worker(device_memory=device_memory)
    assert ("RNDV_THRESH" in given[0]) is not device_memory


@pytest.mark.ucx
async def test_the_transports_thread_enters_the_device_before_ucx_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    real = ucx.open_worker

    def opened(*, device_memory: bool) -> UcxWorker:
        assert device_memory
        calls.append(("opened", threading.get_ident()))
        return real(device_memory=device_memory)

    monkeypatch.setattr(ucx, "open_worker", opened)
    transport = ucx.UcxTransport(name="t", enter=lambda: calls.append(("entered", threading.get_ident())))
    await transport.close()
    assert [what for what, _ in calls] == ["entered", "opened"]
    assert {thread for _, thread in calls} == {calls[0][1]} != {threading.get_ident()}
