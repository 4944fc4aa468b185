"""``POST /v1/chat/completions`` and ``POST /v1/completions``, as plain ASGI: the hot path."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from opentelemetry.trace import Span
from starlette.types import Receive, Scope, Send

from services.gateway import admission
from services.gateway.api_keys import Bill
from services.gateway.core.prompt_size import refuse_large_text
from services.gateway.core.routes import ModelRoutes
from services.gateway.core.stream import StreamState
from services.gateway.http.asgi import header, read_body, send_body
from services.gateway.http.auth import key_of
from services.gateway.http.chat_request import read_chat_request
from services.gateway.http.choice import Choice, Outlet, StreamedChoice, WholeChoice
from services.gateway.http.completion_request import read_completion_request
from services.gateway.http.fields import Fields, parse_object
from services.gateway.http.formats import DONE, ChunkFormat, Reply, Usage, error_events
from services.gateway.http.logprobs import ChatLogprobs, CompletionLogprobs, LogprobShape
from services.gateway.http.options import Options
from services.gateway.http.request_span import request_span, set_response_attributes
from services.gateway.service import Gateway
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import BadRequest, Internal

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
INLINE_TEMPLATE_CHARACTERS = 16_384
"""Longer conversations are rendered in a thread."""

Kind = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: tuple[int, ...]
    echo: str


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that passed every check and is about to be dispatched."""

    kind: Kind
    response_id: str
    model: ModelRoutes
    tokenizer: ModelTokenizer
    options: Options
    prompts: tuple[_Prompt, ...]


class Generation:
    """One of the two generating routes as an ASGI application. Errors before the first byte are raised."""

    def __init__(self, gateway: Gateway, kind: Kind) -> None:
        self._gateway = gateway
        self._kind: Kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        arrived_s, arrived_at_s = time.monotonic(), time.time()
        gateway.refuse_while_draining()
        gateway.api_keys.check(key_of(scope))
        body = parse_object(await read_body(scope, receive, max_bytes=gateway.config.max_body_bytes))
        model = gateway.find_model(Fields(body).text("model"))
        gateway.api_keys.check_model(key_of(scope), model.record.name)
        operation = "chat" if self._kind == "chat" else "text_completion"
        bills = gateway.api_keys.bill(key_of(scope))
        with request_span(operation, model.record.name, body, header(scope, b"traceparent")) as span, bills as bill:
            job = await self._check(body, model)
            await self._run(job, bill, receive, send, span, arrived_s, arrived_at_s)

    async def _check(self, body: dict[str, Any], model: ModelRoutes) -> _Job:
        vocab_size = model.record.spec.vocab_size
        max_prompt_bytes = self._gateway.bus.max_payload_bytes
        if self._kind == "chat":
            chat = read_chat_request(body, vocab_size=vocab_size)
            tokenizer = await self._gateway.tokenizer(model)
            template = tokenizer.template
            if template is None:
                raise BadRequest(
                    f"model {model.record.name!r} has no chat template; use /v1/completions", param="messages"
                )
            render = partial(
                template.render,
                chat.messages,
                add_generation_prompt=chat.add_generation_prompt,
                arguments=chat.template_arguments,
            )
            if chat.num_characters > INLINE_TEMPLATE_CHARACTERS:
                text = await asyncio.to_thread(render)
            else:
                text = render()
            refuse_large_text(text, max_bytes=max_prompt_bytes, param="messages")
            ids = await admission.encode(tokenizer, text, add_special_tokens=chat.add_special_tokens)
            admission.refuse_unknown_tokens(ids, vocab_size, param="messages")
            return _Job(
                "chat", f"chatcmpl-{secrets.token_hex(16)}", model, tokenizer, chat.options, (_Prompt(ids, ""),)
            )
        request = read_completion_request(body, vocab_size=vocab_size, max_prompt_bytes=max_prompt_bytes)
        tokenizer = await self._gateway.tokenizer(model)
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                ids = await admission.encode(tokenizer, prompt, add_special_tokens=request.add_special_tokens)
                admission.refuse_unknown_tokens(ids, vocab_size, param="prompt")
                prompts.append(_Prompt(ids, prompt if request.echo else ""))
            else:
                echo = tokenizer.decode(list(prompt), skip_special_tokens=False) if request.echo else ""
                prompts.append(_Prompt(prompt, echo))
        return _Job("completion", f"cmpl-{secrets.token_hex(16)}", model, tokenizer, request.options, tuple(prompts))

    async def _run(
        self, job: _Job, bill: Bill, receive: Receive, send: Send, span: Span, arrived_s: float, arrived_at_s: float
    ) -> None:
        gateway = self._gateway
        options = bill.limited(job.options, [prompt.token_ids for prompt in job.prompts])
        param = "messages" if job.kind == "chat" else "prompt"
        samplings = [
            admission.sampling_params(options, job.model, p.token_ids, param, gateway.seeds) for p in job.prompts
        ]
        streams = [
            admission.stream_state(
                f"{job.response_id}-{index}",
                job.model,
                prompt.token_ids,
                sampling,
                arrived_at_s=arrived_at_s,
                key=bill.key,
                default_max_tokens=options.max_tokens is None,
            )
            for index, (prompt, sampling) in enumerate(zip(job.prompts, samplings, strict=True))
        ]
        bill.charge(streams)
        reply = Reply(job.kind, job.response_id, job.model.record.name, int(arrived_at_s), options.include_usage)
        outlet = Outlet(len(streams))
        choices = [self._choice(job, reply, outlet, stream, index, arrived_s) for index, stream in enumerate(streams)]
        self._admit(streams, choices)
        watcher = asyncio.create_task(_watch(receive, outlet))
        try:
            await outlet.wait()
            if not outlet.disconnected:
                if options.stream:
                    await _send_stream(send, outlet, reply, choices, options)
                else:
                    await _send_whole(send, outlet, reply, choices)
        finally:
            watcher.cancel()
            for stream, choice in zip(streams, choices, strict=True):
                if choice.finish_reason is None:
                    choice.abort()
                    gateway.dispatcher.cancel(stream.request_id)
            set_response_attributes(span, job.response_id, choices)

    def _admit(self, streams: list[StreamState], choices: list[Choice]) -> None:
        """Start all streams and count them as admitted, or none. Raises ``ModelNotFound``, ``Overloaded``."""
        gateway, model = self._gateway, streams[0].model
        # It may have been removed while the prompt was tokenized.
        gateway.find_model(model)
        try:
            for stream, choice in zip(streams, choices, strict=True):
                gateway.dispatcher.start(stream, choice)
        except BaseException:
            for stream in reversed(streams):
                gateway.dispatcher.cancel(stream.request_id)
            raise
        gateway.metrics.of(model).prompt_tokens += sum(len(stream.prompt_token_ids) for stream in streams)

    def _choice(
        self, job: _Job, reply: Reply, outlet: Outlet, stream: StreamState, index: int, arrived_s: float
    ) -> Choice:
        options = job.options
        shape: LogprobShape | None = None
        if options.logprobs is not None:
            shape = ChatLogprobs(job.tokenizer) if job.kind == "chat" else CompletionLogprobs(job.tokenizer)
        arguments = (
            outlet,
            admission.text_output(options, stream, job.tokenizer),
            self._gateway.metrics.of(job.model.record.name),
        )
        keywords: dict[str, Any] = {
            "num_prompt_tokens": len(stream.prompt_token_ids),
            "arrived_s": arrived_s,
            "logprobs": shape,
            "opening_text": job.prompts[index].echo,
        }
        if not options.stream:
            return WholeChoice(*arguments, **keywords)
        return StreamedChoice(
            ChunkFormat(reply, index), *arguments, continuous_usage=options.continuous_usage, **keywords
        )


async def _watch(receive: Receive, outlet: Outlet) -> None:
    """Wait for the client to leave."""
    while (await receive())["type"] != "http.disconnect":
        continue
    outlet.disconnect()


def _usage(choices: list[Choice]) -> Usage:
    return Usage(sum(c.num_prompt_tokens for c in choices), sum(c.num_tokens for c in choices))


async def _send_stream(send: Send, outlet: Outlet, reply: Reply, choices: list[Choice], options: Options) -> None:
    """Send events as they come. Until the first one an error is still a plain HTTP error (raised)."""
    if outlet.error is not None and not outlet.chunks:
        raise outlet.error
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    while True:
        if outlet.chunks:
            await send({"type": "http.response.body", "body": outlet.take(), "more_body": True})
            continue
        if outlet.over:
            break
        await outlet.wait()
    if outlet.disconnected:
        return
    if outlet.error is not None:
        closing = error_events(outlet.error)
    else:
        closing = (reply.usage_event(_usage(choices)) if options.include_usage else b"") + DONE
    await send({"type": "http.response.body", "body": closing})


async def _send_whole(send: Send, outlet: Outlet, reply: Reply, choices: list[Choice]) -> None:
    while not outlet.over:
        await outlet.wait()
    if outlet.disconnected:
        return
    if outlet.error is not None:
        raise outlet.error
    parts = []
    for index, choice in enumerate(choices):
        if not isinstance(choice, WholeChoice) or choice.finish_reason is None:
            raise Internal(f"choice {index} has no end")
        parts.append(reply.choice_json(index, choice.text, choice.finish_reason, choice.logprobs_json))
    await send_body(send, 200, reply.whole(parts, _usage(choices)))
