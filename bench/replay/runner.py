"""Sends planned requests when they are due, open loop, and records what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How requests are sent. ``timeout_s`` is the longest silence of a stream, before the first token too."""

    model: str
    timeout_s: float = 30.0
    concurrency_limit: int | None = None
    sample_outputs: int = 0
    prompt_seed: int = 0
    token_ids: range = range(10, 250)


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
    completion: CompletionRequest,
    options: SendOptions,
    *,
    start_s: float,
    collector: Collector,
) -> None:
    body = write_request(completion)
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
        collector.samples.append(
            Sample(
                request.index, completion.prompt, request.output_tokens, "".join(stream.pieces), stream.finish_reason
            )
        )


async def send_all(
    client: StreamClient,
    requests: Sequence[PlannedRequest],
    options: SendOptions,
    collector: Collector,
    *,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Send every request at its time; returns when all have ended.

    Times count from the due time, so that a late client, or a concurrency limit, adds to them
    instead of hiding. Cancelling it cancels what is in flight and leaves ``collector`` as it stands.
    """
    limit = asyncio.Semaphore(options.concurrency_limit) if options.concurrency_limit else contextlib.nullcontext()
    start_s = time.perf_counter()

    async def one(request: PlannedRequest, completion: CompletionRequest) -> None:
        async with limit:
            await _send(client, request, completion, options, start_s=start_s, collector=collector)
        on_progress()

    try:
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                # Made before it is due: a long prompt takes milliseconds.
                prompt = prompt_of(
                    options.prompt_seed, request.index, request.input_tokens, token_ids=options.token_ids
                )
                completion = CompletionRequest.exactly(options.model, prompt, request.output_tokens)
                wait_s = start_s + request.due_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                tasks.create_task(one(request, completion))
    finally:
        collector.elapsed_s = time.perf_counter() - start_s
