"""Requests in flight, with a stand-in for ``ucxx``: what its callbacks may do while requests complete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shared.transport.ucx_worker import UcxWorker


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


def worker() -> UcxWorker:
    ucx_worker = SimpleNamespace(
        init_blocking_progress_mode=lambda: None, address=memoryview(b"here"), epoll_file_descriptor=0
    )
    ucx: Any = SimpleNamespace(
        UCXContext=lambda *_: None,
        UCXWorker=lambda _: ucx_worker,
        UCXXTag=int,
        UCXXTagMask=int,
        UCXError=OSError,
        UCXMessageTruncatedError=EOFError,
        Feature=SimpleNamespace(TAG=0, WAKEUP=0),
    )
    return UcxWorker(ucx, bytes)


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
