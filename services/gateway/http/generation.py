"""Endpoints that generate, as plain ASGI: the hot path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Receive, Scope, Send

from services.gateway.active_requests import Sink
from services.gateway.core.scored_stream import ScoredStream
from services.gateway.core.stream import StreamState
from services.gateway.http.asgi import (
    abort_of,
    client_of,
    header,
    in_pieces,
    key_of,
    send_body,
)
from services.gateway.http.call_choice import StreamedCallingChoice, WholeCallingChoice
from services.gateway.http.choice import Choice, StreamedChoice, WholeChoice, usage_of
from services.gateway.http.endpoints.endpoint import Endpoint
from services.gateway.http.formats import AnswerFormat, Reply
from services.gateway.http.preparation import (
    Preparation,
    PreparedRequest,
    memory_bytes,
    read_request,
    streams_of,
    text_output,
    warm_up,
)
from services.gateway.http.prompt_logprobs import ListedPrompt, NoOutputSink, PromptTaker, ScoredSink
from services.gateway.http.request_log import REQUEST, RequestLog
from services.gateway.http.thought_choice import StreamedThinkingChoice, WholeThinkingChoice
from services.gateway.memory import ResponseBuffer
from services.gateway.request_bodies.options import Options, SharedBody
from services.gateway.service import Gateway
from shared.errors import BlitzError, Internal
from shared.telemetry import tracer

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

HELD_COMMENT = b": waiting\n\n"
HELD_COMMENT_EVERY_S = 5.0
"""To a stream without a token yet. The first one comes later than the refusal of what there is no room for, which is a
plain HTTP error so; not that of a model with a longer time of its own: proxies do not wait for it."""


class Generation:
    """One endpoint as an ASGI application. Errors before the first byte are raised."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._endpoint = endpoint
        self.errors = endpoint.errors
        """What they look like here."""
        warm_up(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, endpoint = self._gateway, self._endpoint
        arrived_s, arrived_at_s = time.monotonic(), time.time()
        gateway.refuse_while_draining()
        gateway.api_keys.check(key_of(scope))
        with gateway.request_memory.claim(client_of(scope)) as claim:
            preparation = Preparation(gateway, endpoint, await read_request(gateway, scope, receive, claim))
            body, model = await preparation.read()
            gateway.api_keys.check_model(key_of(scope), model.record.name)
            spans = request_span(
                endpoint.operation, model.record.name, body, header(scope, b"traceparent"), server=scope.get("server")
            )
            with spans as span, gateway.api_keys.bill(key_of(scope)) as bill:
                prepared = await preparation.prepare(body, model)
                request: RequestLog = scope[REQUEST]
                request.begins(model.record.name, prepared.response_id)
                # The text goes, the token ids stay.
                del preparation, body
                claim.resize(memory_bytes(prepared))
                options = bill.limited(
                    prepared.options,
                    [prompt.token_ids for prompt in prepared.prompts for _ in range(prepared.options.n)],
                )
                streams = streams_of(
                    prepared,
                    options,
                    key=bill.key,
                    arrived_at_s=arrived_at_s,
                    seeds=gateway.seeds,
                    prefixes_of=gateway.api_keys.owner_of_prefixes(bill.key) if gateway.config.prefix_cache else None,
                )
                bill.charge(streams)
                format_ = endpoint.format(
                    Reply(
                        prepared.response_id,
                        model.record.name,
                        int(arrived_at_s),
                        include_usage=options.include_usage,
                        continuous_usage=options.continuous_usage,
                        repeated=prepared.repeated,
                        call_is_named=options.tools is not None and options.tools.is_named,
                    )
                )
                with closing(
                    gateway.response_memory.open(prepared.response_id, len(streams), abort_of(scope))
                ) as buffer:
                    trace_id = _kept_trace_id(span)
                    choices = [
                        self._choice(prepared, format_, buffer, i, s, arrived_s, trace_id)
                        for i, s in enumerate(streams)
                    ]
                    self._admit(streams, _sinks(prepared, streams, choices))
                    request.streams, request.choices = streams, choices
                    try:
                        silent_s = gateway.config.no_room_timeout_s + HELD_COMMENT_EVERY_S
                        await _answer(format_, options, receive, send, buffer, choices, silent_s)
                    finally:
                        self._end(streams, choices)
                        set_response_attributes(span, prepared.response_id, model.record.name, choices, buffer.error)

    def _admit(self, streams: list[StreamState], sinks: list[Sink]) -> None:
        """Start all streams and count them as admitted, or none. Raises ``Overloaded``, ``ModelNotFound`` for weights
        that were removed while the prompt was tokenized."""
        gateway, model = self._gateway, streams[0].model
        try:
            for stream, sink in zip(streams, sinks, strict=True):
                gateway.dispatcher.start(stream, sink)
        except BaseException:
            for stream in reversed(streams):
                gateway.dispatcher.cancel(stream.request_id)
            raise
        gateway.metrics.of(model).prompt_tokens += sum(len(stream.prompt_token_ids) for stream in streams)

    def _end(self, streams: list[StreamState], choices: list[Choice]) -> None:
        """The response is over: cancel what still runs for a client that left."""
        for stream, choice in zip(streams, choices, strict=True):
            if choice.finish_reason is None:
                choice.abort()
                self._gateway.dispatcher.cancel(stream.request_id)

    def _choice(
        self,
        prepared: PreparedRequest,
        format_: AnswerFormat,
        buffer: ResponseBuffer,
        index: int,
        stream: StreamState,
        arrived_s: float,
        trace_id: str,
    ) -> Choice:
        options = prepared.options
        of_prompt, number = divmod(index, options.n)
        prompt, logprobs = prepared.prompts[of_prompt], None
        if options.sampling.logprobs is not None:
            echoed = prompt if options.echo_logprobs is not None else None
            logprobs = self._endpoint.logprobs(prepared.tokenizer, echoed)
        kind: type[Choice]
        if prompt.thinking is not None:
            kind = StreamedThinkingChoice if options.stream else WholeThinkingChoice
        elif options.tools is None:
            kind = StreamedChoice if options.stream else WholeChoice
        else:
            kind = StreamedCallingChoice if options.stream else WholeCallingChoice
        return kind(
            buffer,
            format_.events(index, buffer.keep),
            text_output(prepared, prompt, stream),
            self._gateway.metrics.of(prepared.model.record.name),
            stream=stream,
            arrived_s=arrived_s,
            logprobs=logprobs,
            opening_text=prompt.echo,
            continuous_usage=options.continuous_usage,
            trace_id=trace_id,
            number=number,
        )


def _sinks(prepared: PreparedRequest, streams: Sequence[StreamState], choices: Sequence[Choice]) -> list[Sink]:
    """Where the streams' tokens go: to their choices, or through what comes before these."""
    options, listed = prepared.options, None
    sinks: list[Sink] = []
    for index, (stream, choice) in enumerate(zip(streams, choices, strict=True)):
        of_prompt, number = divmod(index, options.n)
        if options.prompt_logprobs is not None and isinstance(choice, WholeChoice):
            if number == 0:
                token_ids = prepared.prompts[of_prompt].token_ids
                listed = ListedPrompt(prepared.tokenizer, token_ids, options.prompt_logprobs)
            choice.prompt_logprobs = listed.entries if listed is not None else None
        sink: Sink = NoOutputSink(choice) if options.no_output else choice
        if isinstance(stream, ScoredStream):
            takers = [one for one in (choice.logprobs, listed if number == 0 else None) if isinstance(one, PromptTaker)]
            sink = ScoredSink(sink, stream, takers, choice.keep)
        sinks.append(sink)
    return sinks


async def _answer(
    format_: AnswerFormat,
    options: Options,
    receive: Receive,
    send: Send,
    buffer: ResponseBuffer,
    choices: list[Choice],
    silent_s: float,
) -> None:
    watcher = asyncio.create_task(_watch(receive, buffer))
    try:
        if options.stream:
            await _hold(send, buffer, silent_s)
            if not buffer.disconnected:
                await _send_stream(send, buffer, format_, choices)
        else:
            await _send_whole(send, buffer, format_, choices)
    finally:
        watcher.cancel()


async def _hold(send: Send, buffer: ResponseBuffer, silent_s: float) -> None:
    """Wait for the first event. Proxies end a connection on which nothing comes: after ``silent_s`` it gets
    comments."""
    while True:
        try:
            async with asyncio.timeout(silent_s):
                await buffer.wait()
            return
        except TimeoutError:
            await _begin(send, buffer)
            await send({"type": "http.response.body", "body": HELD_COMMENT, "more_body": True})
            silent_s = HELD_COMMENT_EVERY_S


async def _begin(send: Send, buffer: ResponseBuffer) -> None:
    if not buffer.begun:
        buffer.begun = True
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})


async def _watch(receive: Receive, buffer: ResponseBuffer) -> None:
    """Wait for the client to leave."""
    while (await receive())["type"] != "http.disconnect":
        continue
    buffer.disconnect()


async def _send_stream(send: Send, buffer: ResponseBuffer, format_: AnswerFormat, choices: list[Choice]) -> None:
    """Send events as they come. Until the first one, or a comment, an error is still a plain HTTP error (raised)."""
    if buffer.error is not None and not buffer.has_chunks and not buffer.begun:
        raise buffer.error
    await _begin(send, buffer)
    before = 0
    while True:
        if buffer.has_chunks:
            piece = buffer.take()
            buffer.sending = True
            # Waits until the client has taken what was sent before.
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            buffer.sending = False
            buffer.sent(before)
            before = len(piece)
            continue
        if buffer.over:
            break
        await buffer.wait()
    if buffer.disconnected:
        return
    closing = format_.closing(usage_of(choices)) if buffer.error is None else format_.failure(buffer.error)
    await send({"type": "http.response.body", "body": closing})


async def _send_whole(send: Send, buffer: ResponseBuffer, format_: AnswerFormat, choices: list[Choice]) -> None:
    while not buffer.over:
        await buffer.wait()
    if buffer.disconnected:
        return
    if buffer.error is not None:
        raise buffer.error
    results = []
    for index, choice in enumerate(choices):
        if not isinstance(choice, WholeChoice) or choice.finish_reason is None:
            raise Internal(f"choice {index} has no end")
        results.append(choice.result)
    await send_body(in_pieces(send), 200, format_.whole(results, usage_of(choices)))


def _kept_trace_id(span: Span) -> str:
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid and context.trace_flags.sampled else ""


_propagator = TraceContextTextMapPropagator()
_PARAMETERS = ("max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")


@contextmanager
def request_span(
    operation: str, model: str, body: SharedBody, traceparent: str, *, server: tuple[str, int | None] | None
) -> Iterator[Span]:
    """A span like ``chat <model>``, child of the caller's ``traceparent`` if it sent one. ``server``: the address that
    the request came to. Attributes are those of OpenTelemetry's conventions for generative AI, without any text."""
    context = _propagator.extract({"traceparent": traceparent}) if traceparent else None
    with tracer().start_as_current_span(f"{operation} {model}", context=context, kind=SpanKind.SERVER) as span:
        if span.is_recording():
            span.set_attribute("gen_ai.operation.name", operation)
            span.set_attribute("gen_ai.system", "blitzscale")
            span.set_attribute("gen_ai.provider.name", "blitzscale")
            span.set_attribute("gen_ai.request.model", model)
            for name in _PARAMETERS:
                value = getattr(body, name)
                if value is not None:
                    span.set_attribute(f"gen_ai.request.{name}", value)
            if body.n not in (None, 1):
                span.set_attribute("gen_ai.request.choice.count", body.n)
            if body.top_k is not None:
                span.set_attribute("gen_ai.request.top_k", float(body.top_k))
            if server is not None and server[1] is not None:
                span.set_attribute("server.address", server[0])
                span.set_attribute("server.port", server[1])
        try:
            yield span
        except BlitzError as error:
            span.set_attribute("error.type", error.code)
            raise


def set_response_attributes(
    span: Span, response_id: str, model: str, choices: Sequence[Choice], error: BlitzError | None
) -> None:
    """What came of it. ``error``: what it ended with."""
    if span.is_recording():
        if error is not None:
            span.set_attribute("error.type", error.code)
            span.set_status(StatusCode.ERROR)
        span.set_attribute("gen_ai.response.model", model)
        span.set_attribute("gen_ai.response.id", response_id)
        usage = usage_of(choices)
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [c.finish_reason or "unknown" for c in choices])
