"""The health and metrics endpoint of a service process, in threads of its own."""

from __future__ import annotations

import asyncio
import socketserver
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from shared.errors import Unavailable
from shared.exposition import OPENMETRICS, accepts_openmetrics

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_LOOP_TIMEOUT_S = 5.0
"""A loop that runs nothing for this long is stuck."""
_CONNECTION_TIMEOUT_S = 10.0


class HealthServer:
    """``/live``: 200 while the loop runs. ``/health``, ``/ready``: 200 while ready. ``/metrics``: Prometheus."""

    def __init__(self, loop: asyncio.AbstractEventLoop, is_ready: Callable[[], bool]) -> None:
        self._loop = loop
        self._is_ready = is_ready
        self._metrics = make_wsgi_app()
        self._server: _ThreadingServer | None = None
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> None:
        """Listen. Raises ``Unavailable``, naming the address, when that cannot be."""
        try:
            server = _ThreadingServer((host, port), _QuietHandler)
        except (OSError, OverflowError) as error:
            raise Unavailable(f"cannot listen on {host}:{port} for health and metrics: {error}") from error
        server.set_app(self._app)
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="health", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port listened on."""
        if self._server is None:
            raise RuntimeError("not started")
        return int(self._server.server_address[1])

    def stop(self) -> None:
        """Close the port. Not to be called on the event loop: it waits for the thread."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _app(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            if accepts_openmetrics(environ.get("HTTP_ACCEPT", "")):
                environ["HTTP_ACCEPT"] = OPENMETRICS
            metrics: Iterable[bytes] = self._metrics(environ, start_response)
            return metrics
        if path == "/live":
            alive = self._loop_runs()
            return _answer(start_response, alive, "live" if alive else "the event loop is stuck")
        if path in {"/health", "/ready"}:
            ready = self._is_ready()
            return _answer(start_response, ready, "ready" if ready else "not ready")
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"not found: use /live, /health, /ready or /metrics\n"]

    def _loop_runs(self) -> bool:
        async def nothing() -> None:
            """Runs at the loop's next turn."""

        probe = nothing()
        try:
            future = asyncio.run_coroutine_threadsafe(probe, self._loop)
        except RuntimeError:  # the loop is closed
            probe.close()
            return False
        try:
            future.result(_LOOP_TIMEOUT_S)
        except FutureTimeoutError:
            return False
        return True


def _answer(start_response: StartResponse, good: bool, text: str) -> Iterable[bytes]:
    start_response("200 OK" if good else "503 Service Unavailable", [("Content-Type", "text/plain")])
    return [f"{text}\n".encode()]


class _ThreadingServer(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        # Not the base class's: it looks the host name up, which takes seconds where DNS is slow.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _QuietHandler(WSGIRequestHandler):
    timeout = _CONNECTION_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """A probe every second is no news."""
