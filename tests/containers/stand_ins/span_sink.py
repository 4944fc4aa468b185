"""Takes spans on port 4318, and answers as Jaeger's query API on 16686: ``/api/services``, ``/api/traces?service=``."""

from __future__ import annotations

import gzip
import json
import signal
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SPANS: dict[str, list[tuple[str, str]]] = defaultdict(list)
"""By service: trace and name."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/v1/traces":
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                named = {pair.key: pair.value.string_value for pair in group.resource.attributes}
                for scope in group.scope_spans:
                    SPANS[named.get("service.name", "")] += [(span.trace_id.hex(), span.name) for span in scope.spans]
        self._answer(b"", "application/x-protobuf")

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        found: object = sorted(SPANS)
        if asked.path == "/api/traces":
            traces = defaultdict(list)
            for trace, name in list(SPANS[parse_qs(asked.query)["service"][0]]):
                traces[trace].append({"operationName": name})
            found = [{"traceID": trace, "spans": spans} for trace, spans in traces.items()]
        self._answer(json.dumps({"data": found}).encode(), "application/json")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


ENDS = {signal.SIGTERM, signal.SIGINT}
# The first process of a container does not get a signal that it does not ask for.
signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
for port in (4318, 16686):
    threading.Thread(target=ThreadingHTTPServer(("0.0.0.0", port), Handler).serve_forever, daemon=True).start()
signal.sigwait(ENDS)
sys.exit(0)
