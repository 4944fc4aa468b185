"""From a request's bytes to a job that can be dispatched: decoded, checked, rendered, tokenized.

Everything is done once per request. Small requests are prepared on the event loop; large ones in a thread, in steps
that are short or release the interpreter.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from services.gateway import admission
from services.gateway.core.prompt_size import refuse_large_text
from services.gateway.core.routes import ModelRoutes
from services.gateway.request_bodies.body import read_body, required
from services.gateway.request_bodies.chat_request import ChatBody, ChatRequest, read_chat_request
from services.gateway.request_bodies.completion_request import (
    CompletionBody,
    CompletionRequest,
    read_completion_request,
)
from services.gateway.request_bodies.options import Options
from services.gateway.service import Gateway
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import BadRequest

INLINE_BODY_BYTES = 32_768
"""Larger bodies are decoded in a thread."""

Kind = Literal["chat", "completion"]
Body = ChatBody | CompletionBody
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request."""

    token_ids: tuple[int, ...]
    echo: str
    """Its text, if the output is to begin with it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request that passed every check and is about to be dispatched."""

    kind: Kind
    response_id: str
    model: ModelRoutes
    tokenizer: ModelTokenizer
    options: Options
    prompts: tuple[Prompt, ...]


class Preparation:
    """One request's way to its job. Both steps raise typed errors that name the parameter at fault."""

    def __init__(self, gateway: Gateway, raw: bytes) -> None:
        self._gateway = gateway
        self._raw = raw

    async def read(self, kind: Kind) -> tuple[Body, ModelRoutes]:
        """The body, checked by itself, and the model that it names."""
        type_: type[Body] = ChatBody if kind == "chat" else CompletionBody
        body: Body = await self._run(lambda: read_body(self._raw, type_))
        return body, self._gateway.find_model(required(body.model, "model"))

    async def job(self, body: Body, model: ModelRoutes) -> Job:
        """The request for that model."""
        vocab_size = model.record.spec.vocab_size
        max_prompt_bytes = self._gateway.bus.max_payload_bytes
        if isinstance(body, ChatBody):
            chat = await self._run(
                lambda: read_chat_request(self._raw, body, vocab_size=vocab_size, max_prompt_bytes=max_prompt_bytes)
            )
            return await self._chat_job(chat, model, max_prompt_bytes)
        completion = await self._run(
            lambda: read_completion_request(self._raw, body, vocab_size=vocab_size, max_prompt_bytes=max_prompt_bytes)
        )
        return await self._completion_job(completion, model)

    async def _run(self, step: Callable[[], T]) -> T:
        return step() if len(self._raw) <= INLINE_BODY_BYTES else await self._gateway.offload.run(step)

    async def _chat_job(self, chat: ChatRequest, model: ModelRoutes, max_prompt_bytes: int) -> Job:
        offload = self._gateway.offload
        tokenizer = await self._gateway.tokenizer(model)
        template = tokenizer.template
        if template is None:
            raise BadRequest(f"model {model.record.name!r} has no chat template; use /v1/completions", param="messages")
        text = await admission.render(template, chat, offload)
        refuse_large_text(text, max_bytes=max_prompt_bytes, param="messages")
        [ids] = await admission.encode(tokenizer, [text], offload, add_special_tokens=chat.add_special_tokens)
        admission.refuse_unknown_tokens(ids, model.record.spec.vocab_size, param="messages")
        return Job("chat", f"chatcmpl-{secrets.token_hex(16)}", model, tokenizer, chat.options, (Prompt(ids, ""),))

    async def _completion_job(self, request: CompletionRequest, model: ModelRoutes) -> Job:
        offload = self._gateway.offload
        tokenizer = await self._gateway.tokenizer(model)
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        encoded = iter(
            await admission.encode(tokenizer, texts, offload, add_special_tokens=request.add_special_tokens)
            if texts
            else ()
        )
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                ids = next(encoded)
                admission.refuse_unknown_tokens(ids, model.record.spec.vocab_size, param="prompt")
                prompts.append(Prompt(ids, prompt if request.echo else ""))
            else:
                echo = await admission.decode(tokenizer, prompt, offload) if request.echo else ""
                prompts.append(Prompt(prompt, echo))
        return Job("completion", f"cmpl-{secrets.token_hex(16)}", model, tokenizer, request.options, tuple(prompts))
