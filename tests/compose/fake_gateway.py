"""A gateway's administration routes with canned answers, in a thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeGateway:
    """``answers`` by "METHOD path"; each is (status, JSON) or a list of them, used up one by one."""

    url: str = ""
    answers: dict[str, Any] = field(default_factory=dict)
    requests: list[tuple[str, Any, str | None]] = field(default_factory=list)

    def answer(self, request: str, body: Any, authorization: str | None) -> tuple[int, Any]:
        self.requests.append((request, body, authorization))
        found = self.answers.get(request, self.answers.get(request.partition("?")[0]))
        if isinstance(found, list):
            found = found.pop(0)
        return found if found is not None else (404, {"error": {"message": "no such route", "code": "not_found"}})


@contextmanager
def fake_gateway() -> Iterator[FakeGateway]:
    gateway = FakeGateway()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = gateway.answer(f"{self.command} {self.path}", body, self.headers.get("Authorization"))
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = _handle  # noqa: N815 - the base class's names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    gateway.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield gateway
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
