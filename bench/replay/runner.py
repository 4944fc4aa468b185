"""Sends planned requests when they are due, open loop, and records what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from bench.openai_events import (
    DONE,
    CompletionRequest,
    ErrorBody,
    ModelCard,
    read_event,
    read_models,
    write_request,
)
from bench.replay.plan import PlannedRequest, prompt_of
from bench.replay.record import Collector, Failure, RequestRecord, Sample
from bench.stream_client import StreamClient, StreamFailed
from shared.errors import ModelNotFound, Unauthorized, Unavailable

MAX_AHEAD_BYTES = 128 * 1024 * 1024
"""Of bodies made before they are due."""
TIME_TO_MAKE_S = 0.02
"""A longer wait is used to make bodies."""


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How requests are sent. ``timeout_s`` is the longest silence of a stream, before the first token too."""

    model: str
    timeout_s: float = 30.0
    concurrency_limit: int | None = None
    sample_outputs: int = 0
    prompt_seed: int = 0
    token_ids: range = range(10, 250)

    def prompt(self, request: PlannedRequest) -> tuple[int, ...]:
        """The same for the same seed and request."""
        return prompt_of(self.prompt_seed, request.index, request.input_tokens, token_ids=self.token_ids)

    def body(self, request: PlannedRequest) -> bytes:
        """What is sent."""
        return write_request(CompletionRequest.exactly(self.model, self.prompt(request), request.output_tokens))


async def choose_model(client: StreamClient, name: str | None, *, timeout_s: float) -> ModelCard:
    """The served model called ``name``, or the first one.

    Raises ``Unavailable`` when the server cannot be reached or does not answer as one, ``Unauthorized``,
    ``ModelNotFound`` when it has no such model, or none.
    """
    try:
        reply = await client.request("GET", "/v1/models", timeout_s=timeout_s)
    except StreamFailed as error:
        raise Unavailable(f"the server cannot be reached: {error.detail}") from error
    if reply.status in (401, 403):
        raise Unauthorized("the server wants an API key: set BLITZ_API_KEY")
    try:
        if reply.status != 200:
            raise msgspec.DecodeError(f"HTTP status {reply.status}")
        cards = read_models(reply.body).data
    except msgspec.MsgspecError as error:
        raise Unavailable(f"GET /v1/models did not answer with a list of models: {error}") from error
    for card in cards:
        if name is None or card.id == name:
            return card
    served = ", ".join(card.id for card in cards) or "none"
    raise ModelNotFound(f"the server has no model {name!r}; it has: {served}" if name else "the server has no models")


class _Stream:
    """Reads one answer's events."""

    def __init__(self, keep_text: bool) -> None:
        self.token_times_s: list[float] = []
        self.pieces: list[str] | None = [] if keep_text else None
        self.finish_reason: str | None = None
        self.completion_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.error: ErrorBody | None = None
        self.malformed: str | None = None
        self.done = False

    def on_event(self, data: bytes, now_s: float) -> None:
        if data == DONE:
            self.done = True
            return
        try:
            event = read_event(data)
        except msgspec.MsgspecError as error:
            self.malformed = f"{error} in {data[:200]!r}"
            return
        if event.error is not None:
            self.error = event.error
        if event.usage is not None:
            self.completion_tokens = event.usage.completion_tokens
            self.prompt_tokens = event.usage.prompt_tokens
        for choice in event.choices:
            # The last event of some servers carries the finish reason and no token.
            if choice.text or choice.finish_reason is None:
                self.token_times_s.append(now_s)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
            if self.pieces is not None:
                self.pieces.append(choice.text)

    @property
    def num_tokens(self) -> int:
        return len(self.token_times_s) if self.completion_tokens is None else self.completion_tokens

    def failure(self, wanted_tokens: int) -> Failure | None:
        """Why a 200 answer is no success, or None."""
        if self.error is not None:
            return Failure("error_event", f"{self.error.code}: {self.error.message}")
        if self.malformed is not None:
            return Failure("protocol", self.malformed)
        if not self.done:
            return Failure("disconnected", "the stream ended without [DONE]")
        if self.num_tokens < wanted_tokens or not self.token_times_s:
            return Failure("short_output", f"{self.num_tokens} of {wanted_tokens} tokens")
        return None


async def _send(
    client: StreamClient,
    request: PlannedRequest,
    body: bytes,
    options: SendOptions,
    *,
    start_s: float,
    collector: Collector,
) -> None:
    stream = _Stream(keep_text=request.index < options.sample_outputs)
    due_s = start_s + request.due_s
    lag_s = time.perf_counter() - due_s
    failure: Failure | None
    try:
        reply = await client.request(
            "POST", "/v1/completions", body, on_event=stream.on_event, timeout_s=options.timeout_s
        )
    except StreamFailed as error:
        failure = Failure(error.kind, error.detail)
    else:
        if reply.status != 200:
            failure = Failure(f"http_{reply.status}", reply.body[:300].decode(errors="replace"))
        else:
            failure = stream.failure(request.output_tokens)
    times_s = stream.token_times_s
    collector.records.append(
        RequestRecord(
            index=request.index,
            due_s=request.due_s,
            lag_s=lag_s,
            input_tokens=request.input_tokens if stream.prompt_tokens is None else stream.prompt_tokens,
            output_tokens=stream.num_tokens,
            ttft_s=times_s[0] - due_s if times_s else None,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(times_s)),
            e2e_s=time.perf_counter() - due_s,
            failure=failure,
        )
    )
    if stream.pieces is not None and failure is None:
        prompt, text = options.prompt(request), "".join(stream.pieces)
        collector.samples.append(Sample(request.index, prompt, request.output_tokens, text, stream.finish_reason))


class Bodies:
    """The requests' bodies in their order, made ahead of time: a long prompt takes milliseconds, and in a burst there
    are none between two requests."""

    def __init__(
        self, requests: Sequence[PlannedRequest], options: SendOptions, *, max_bytes: int = MAX_AHEAD_BYTES
    ) -> None:
        """Makes the first ``max_bytes`` of them."""
        self._make = options.body
        self._left = iter(requests)
        self._made: deque[tuple[PlannedRequest, bytes]] = deque()
        self._num_bytes = 0
        self._max_bytes = max_bytes
        while self.make_one():
            pass

    def make_one(self) -> bool:
        """The next one that is not made, if there is one, and room for it."""
        request = next(self._left, None) if self._num_bytes < self._max_bytes else None
        if request is None:
            return False
        body = self._make(request)
        self._made.append((request, body))
        self._num_bytes += len(body)
        return True

    def __iter__(self) -> Iterator[tuple[PlannedRequest, bytes]]:
        while self._made or self.make_one():
            request, body = self._made.popleft()
            self._num_bytes -= len(body)
            yield request, body


async def send_all(
    client: StreamClient,
    bodies: Bodies,
    options: SendOptions,
    collector: Collector,
    *,
    start_s: float | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Send every request at its time after ``start_s`` (``time.perf_counter()``; now); returns when all have ended.

    Times count from the due time, so that a late client, or a concurrency limit, adds to them
    instead of hiding. Cancelling it cancels what is in flight and leaves ``collector`` as it stands.
    """
    limit = asyncio.Semaphore(options.concurrency_limit) if options.concurrency_limit else contextlib.nullcontext()
    begin_s = time.perf_counter() if start_s is None else start_s

    async def one(request: PlannedRequest, body: bytes) -> None:
        async with limit:
            await _send(client, request, body, options, start_s=begin_s, collector=collector)
        on_progress()

    try:
        async with asyncio.TaskGroup() as tasks:
            for request, body in bodies:
                while (wait_s := begin_s + request.due_s - time.perf_counter()) > 0:
                    if wait_s > TIME_TO_MAKE_S and bodies.make_one():
                        await asyncio.sleep(0)  # answers come meanwhile
                    else:
                        await asyncio.sleep(wait_s)
                tasks.create_task(one(request, body))
    finally:
        collector.elapsed_s = time.perf_counter() - begin_s
