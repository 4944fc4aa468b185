"""One streamed completion as a client sees it: its text, and when each token came."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from bench.openai_events import DONE, CompletionRequest, Usage, read_event, write_request
from bench.stream_client import StreamClient, StreamFailed
from shared.errors import BlitzError


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer. Times in seconds since it was asked for."""

    number: int
    text: str
    tokens_s: tuple[float, ...] = ()
    """When each token came; those that came together have one time."""
    error: str = ""
    sent_s: float = 0.0
    """When it was asked for (``time.perf_counter()``)."""
    usage: Usage | None = None
    """None: the server told nothing of it."""

    @property
    def ttft_s(self) -> float | None:
        """None without a token."""
        return self.tokens_s[0] if self.tokens_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between each token and the one before."""
        return tuple(late - early for early, late in zip(self.tokens_s, self.tokens_s[1:], strict=False))

    def longest_gap_s(self, since_s: float, until_s: float) -> float:
        """Between two tokens of which the second came in that time (``time.perf_counter()``)."""
        ends = zip(self.gaps_s, self.tokens_s[1:], strict=True)
        return max((gap_s for gap_s, at_s in ends if since_s <= self.sent_s + at_s <= until_s), default=0.0)


async def ask(
    client: StreamClient,
    number: int,
    request: CompletionRequest,
    *,
    timeout_s: float,
    on_token: Callable[[], None] = lambda: None,
) -> Streamed:
    """Ask, and take the answer to its end; what went wrong is part of it. ``timeout_s``: the longest silence.
    ``on_token``: called for each."""
    pieces: list[str] = []
    tokens_s: list[float] = []
    error, done = "", False
    usage: Usage | None = None

    def on_event(data: bytes, now_s: float) -> None:
        nonlocal error, done, usage
        if data == DONE:
            done = True
            return
        event = read_event(data)
        usage = event.usage or usage
        if event.error is not None:
            error = event.error.message
        elif event.choices:
            tokens_s.append(now_s - sent_s)
            on_token()
            pieces.append(event.choices[0].text)

    sent_s = time.perf_counter()
    try:
        body = write_request(request)
        reply = await client.request("POST", "/v1/completions", body, on_event=on_event, timeout_s=timeout_s)
    except (StreamFailed, msgspec.MsgspecError) as failure:
        return Streamed(number, "", tuple(tokens_s), f"{type(failure).__name__}: {failure}", sent_s)
    except BlitzError as failure:
        return Streamed(number, "", tuple(tokens_s), failure.message, sent_s)
    if reply.status != 200:
        error = f"{reply.status}: {reply.body[:200].decode(errors='replace')}"
    elif not done:
        error = error or "the stream ended without [DONE]"
    return Streamed(number, "".join(pieces), tuple(tokens_s), error, sent_s, usage)
