"""One line per request in the log, when it is over: who asked for what, which instances did it, and what it took."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from services.gateway.core.stream import StreamState
from services.gateway.http.asgi import header, key_of
from services.gateway.http.choice import Choice, usage_of

log = logging.getLogger(__name__)

REQUEST = "blitz.request"
"""In a scope: its ``RequestLog``."""
QUIET = frozenset({"/health", "/ready", "/live", "/metrics"})
"""Routes that are asked every few seconds, whatever happens."""
POLLED = "/admin/status"
"""Asked over and over by whoever waits for something (``blitzscale up`` ten times a second): a line only if refused."""

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(slots=True)
class RequestLog:
    """What is known of one request so far."""

    request_id: str
    """The header ``x-request-id`` of its answer: the caller's own if that can be shown, else the response's id, else,
    until there is one, an id of its own."""
    is_given: bool
    began_s: float
    model: str = ""
    response_id: str = ""
    error: str = ""
    """Code of the error that it ended with."""
    streams: Sequence[StreamState] = ()
    choices: Sequence[Choice] = field(default=())

    @classmethod
    def of(cls, scope: Scope) -> RequestLog:
        """A request that has just come."""
        given = header(scope, b"x-request-id")
        is_given = _GIVEN_ID.fullmatch(given) is not None
        return cls(given if is_given else f"req-{secrets.token_hex(16)}", is_given, time.monotonic())

    def begins(self, model: str, response_id: str) -> None:
        """It is understood, and its answer has an id."""
        self.model, self.response_id = model, response_id
        if not self.is_given:
            self.request_id = response_id

    def say(self, scope: Scope, route: str, status: int) -> None:
        """It is over."""
        if route in QUIET or (route == POLLED and status < 400) or not log.isEnabledFor(logging.INFO):
            return
        fields = self._fields(scope, route, status)
        shown = (f"{name}={','.join(v) if isinstance(v, list) else v}" for name, v in fields.items())
        log.info("request %s", " ".join(shown), extra={"fields": fields})

    def _fields(self, scope: Scope, route: str, status: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": scope["method"],
            "route": route,
            "status": status,
            "took_s": round(time.monotonic() - self.began_s, 4),
        }
        begun = [choice.first_s - choice.arrived_s for choice in self.choices if choice.first_s]
        rest = {
            "response_id": self.response_id,
            "key": key_of(scope),
            "model": self.model,
            "instances": list(dict.fromkeys(i for stream in self.streams for i in stream.instances)),
            "error": self.error,
        }
        fields |= {name: value for name, value in rest.items() if value}
        if self.choices:
            usage = usage_of(self.choices)
            fields["prompt_tokens"] = usage.prompt_tokens
            fields["output_tokens"] = usage.completion_tokens
            fields["finish"] = list(dict.fromkeys(choice.finish_reason or "none" for choice in self.choices))
        if begun:
            fields["ttft_s"] = round(min(begun), 4)
        return fields
