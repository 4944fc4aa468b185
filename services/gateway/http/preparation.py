"""From a request's bytes to streams that can be dispatched: decoded, checked, rendered, tokenized.

Everything is done once per request. Small requests are prepared on the event loop; large ones in a thread, in steps
that are short or release the interpreter.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from msgspec import structs

from services.gateway.chat_template import ChatTemplate
from services.gateway.core.routes import ModelRoutes
from services.gateway.core.stream import StreamState
from services.gateway.core.text_output import StopScanner, TextOutput
from services.gateway.offload import Offload
from services.gateway.request_bodies.body import read_body, refuse_large_text, required
from services.gateway.request_bodies.chat_request import ChatBody, ChatRequest, read_chat_request
from services.gateway.request_bodies.completion_request import (
    CompletionBody,
    CompletionRequest,
    read_completion_request,
)
from services.gateway.request_bodies.options import Options
from services.gateway.service import Gateway
from services.gateway.template_sandbox import RenderingTooLarge
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import BadRequest, ContextLengthExceeded
from shared.messages.generation import SamplingParams

INLINE_BODY_BYTES = 32_768
"""Larger bodies are decoded in a thread."""
INLINE_CHARACTERS = 4096
"""Up to this length, all texts of a request together are encoded on the event loop (well under a millisecond)."""
INLINE_TOKEN_IDS = 4096
"""The same for token ids that become text."""
INLINE_TEMPLATE_CHARACTERS = 16_384
"""Longer conversations are rendered in a thread."""
INLINE_OPERATIONS = 20_000
INLINE_RENDER_S = 0.02
"""A template that needs more than these for a short conversation starts again in a thread."""
BYTES_PER_TOKEN = 40
"""A place in a tuple, and an integer."""
BYTES_PER_STREAM = 8192
"""What a stream occupies beside its tokens: its state, its text, its tasks."""

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
class PreparedRequest:
    """A request that passed every check and is about to be dispatched."""

    kind: Kind
    response_id: str
    model: ModelRoutes
    context_tokens: int
    """The longest prompt plus output that may be asked for."""
    tokenizer: ModelTokenizer
    options: Options
    prompts: tuple[Prompt, ...]

    @property
    def prompt_param(self) -> str:
        """The parameter that the prompts came from."""
        return "messages" if self.kind == "chat" else "prompt"


_EXAMPLES: dict[Kind, tuple[bytes, ...]] = {
    "chat": (b'{"messages": [{"role": "user", "content": "a"}]}',),
    "completion": (b'{"prompt": "a"}', b'{"prompt": [0]}'),
}


def warm_up(kind: Kind) -> None:
    """Read such bodies: what reads them is made with the first one, for which it takes as long as anything else."""
    for raw in _EXAMPLES[kind]:
        if kind == "chat":
            read_chat_request(raw, read_body(raw, ChatBody), vocab_size=1, max_prompt_bytes=len(raw))
        else:
            read_completion_request(raw, read_body(raw, CompletionBody), vocab_size=1, max_prompt_bytes=len(raw))


class Preparation:
    """One request's way to its dispatch. Both steps raise typed errors that name the parameter at fault."""

    def __init__(self, gateway: Gateway, raw: bytes) -> None:
        self._gateway = gateway
        self._raw = raw

    async def read(self, kind: Kind) -> tuple[Body, ModelRoutes]:
        """The body, checked by itself, and the model that it names."""
        type_: type[Body] = ChatBody if kind == "chat" else CompletionBody
        body: Body = await self._run(lambda: read_body(self._raw, type_))
        return body, self._gateway.find_model(required(body.model, "model"))

    async def prepare(self, body: Body, model: ModelRoutes) -> PreparedRequest:
        """The request for that model."""
        vocab_size = model.record.spec.vocab_size
        max_prompt_bytes = self._gateway.bus.max_payload_bytes
        if isinstance(body, ChatBody):
            chat = await self._run(
                lambda: read_chat_request(self._raw, body, vocab_size=vocab_size, max_prompt_bytes=max_prompt_bytes)
            )
            return await self._prepare_chat(chat, model, max_prompt_bytes)
        completion = await self._run(
            lambda: read_completion_request(self._raw, body, vocab_size=vocab_size, max_prompt_bytes=max_prompt_bytes)
        )
        return await self._prepare_completion(completion, model)

    async def _run(self, step: Callable[[], T]) -> T:
        return step() if len(self._raw) <= INLINE_BODY_BYTES else await self._gateway.offload.run(step)

    async def _prepare_chat(self, chat: ChatRequest, model: ModelRoutes, max_prompt_bytes: int) -> PreparedRequest:
        offload = self._gateway.offload
        tokenizer = await self._gateway.tokenizers.get(model.record)
        template = tokenizer.template
        if template is None:
            raise BadRequest(f"model {model.record.name!r} has no chat template; use /v1/completions", param="messages")
        text = await render(template, chat, offload)
        refuse_large_text(text, max_bytes=max_prompt_bytes, param="messages")
        [ids] = await encode(tokenizer, [text], offload, add_special_tokens=chat.add_special_tokens)
        refuse_unknown_tokens(ids, model.record.spec.vocab_size, param="messages")
        return self._job("chat", f"chatcmpl-{secrets.token_hex(16)}", model, tokenizer, chat.options, Prompt(ids, ""))

    async def _prepare_completion(self, request: CompletionRequest, model: ModelRoutes) -> PreparedRequest:
        offload = self._gateway.offload
        tokenizer = await self._gateway.tokenizers.get(model.record)
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        encoded = iter(
            await encode(tokenizer, texts, offload, add_special_tokens=request.add_special_tokens) if texts else ()
        )
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                ids = next(encoded)
                refuse_unknown_tokens(ids, model.record.spec.vocab_size, param="prompt")
                prompts.append(Prompt(ids, prompt if request.echo else ""))
            else:
                echo = await decode(tokenizer, prompt, offload) if request.echo else ""
                prompts.append(Prompt(prompt, echo))
        return self._job("completion", f"cmpl-{secrets.token_hex(16)}", model, tokenizer, request.options, *prompts)

    def _job(
        self, kind: Kind, response_id: str, model: ModelRoutes, tokenizer: ModelTokenizer, options: Options, *p: Prompt
    ) -> PreparedRequest:
        longest = self._gateway.dispatcher.context_tokens(model)
        return PreparedRequest(kind, response_id, model, longest, tokenizer, options, p)


async def encode(
    tokenizer: ModelTokenizer, texts: Sequence[str], offload: Offload, *, add_special_tokens: bool
) -> list[tuple[int, ...]]:
    """The ids of a request's texts, without stalling the other streams."""
    if sum(map(len, texts)) <= INLINE_CHARACTERS:
        return tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
    return await offload.run(tokenizer.encode_all, texts, add_special_tokens=add_special_tokens)


async def decode(tokenizer: ModelTokenizer, token_ids: Sequence[int], offload: Offload) -> str:
    """The text of a prompt of ids."""
    if len(token_ids) <= INLINE_TOKEN_IDS:
        return tokenizer.decode(list(token_ids), skip_special_tokens=False)
    return await offload.run(tokenizer.decode, list(token_ids), skip_special_tokens=False)


async def render(template: ChatTemplate, chat: ChatRequest, offload: Offload) -> str:
    """A conversation as its model's prompt. Raises ``BadRequest``, also when that takes too much."""
    whole = partial(
        template.render,
        chat.messages,
        add_generation_prompt=chat.add_generation_prompt,
        arguments=chat.template_arguments,
    )
    if chat.num_characters <= INLINE_TEMPLATE_CHARACTERS:
        with contextlib.suppress(RenderingTooLarge):
            return whole(max_operations=INLINE_OPERATIONS, max_time_s=INLINE_RENDER_S)
    try:
        return await offload.run(whole)
    except RenderingTooLarge as error:
        raise BadRequest(f"the model's chat template was stopped: {error}", param="messages") from error


def memory_bytes(prepared: PreparedRequest) -> int:
    """What a request occupies from its admission to its end, apart from its output."""
    return sum(BYTES_PER_STREAM + BYTES_PER_TOKEN * len(prompt.token_ids) for prompt in prepared.prompts)


def refuse_unknown_tokens(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raises ``BadRequest`` for a text whose tokens the model does not have."""
    if token_ids and max(token_ids) >= vocab_size:
        raise BadRequest(
            f"{param}: the tokenizer gives token id {max(token_ids)}, the model has only 0..{vocab_size - 1}",
            param=param,
        )


def streams_of(
    prepared: PreparedRequest, options: Options, *, key: str, arrived_at_s: float, seeds: random.Random
) -> list[StreamState]:
    """A stream in its queued state for each of its prompts, which is to be generated with ``options``.

    ``key``: the name of the caller's key; ``arrived_at_s``: Unix time; ``seeds`` draws for callers that gave none.
    Raises ``BadRequest`` for an empty prompt, ``ContextLengthExceeded`` when prompt and output do not fit.
    """
    record = prepared.model.record
    eos = () if options.sampling.ignore_eos else record.spec.eos_token_ids
    end_token_ids = frozenset((*eos, *options.sampling.stop_token_ids))
    return [
        StreamState(
            request_id=f"{prepared.response_id}-{index}",
            model=record.name,
            model_hash=record.model_hash,
            prompt_token_ids=prompt.token_ids,
            sampling=_sampling_of(prepared, options, len(prompt.token_ids), seeds),
            arrived_at_s=arrived_at_s,
            key=key,
            default_max_tokens=options.max_tokens is None,
            end_token_ids=end_token_ids,
        )
        for index, prompt in enumerate(prepared.prompts)
    ]


def _sampling_of(prepared: PreparedRequest, options: Options, num_prompt: int, seeds: random.Random) -> SamplingParams:
    limit = prepared.context_tokens
    if num_prompt == 0:
        raise BadRequest("the prompt has no tokens", param=prepared.prompt_param)
    if num_prompt >= limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens; with at least one of output that exceeds "
            f"this model's context of {limit} tokens",
            param=prepared.prompt_param,
        )
    max_tokens = options.max_tokens
    if max_tokens is None:
        left = limit - num_prompt
        max_tokens = min(left, options.default_max_tokens) if options.default_max_tokens is not None else left
    if num_prompt + max_tokens > limit:
        raise ContextLengthExceeded(
            f"this model's context is {limit} tokens; {num_prompt} of the prompt and {max_tokens} of output exceed it",
            param="max_tokens",
        )
    least = options.sampling.min_tokens
    if least > max_tokens:
        raise BadRequest(f"min_tokens {least} is above the {max_tokens} possible", param="min_tokens")
    seed = options.seed if options.seed is not None else seeds.getrandbits(63)
    return structs.replace(options.sampling, max_tokens=max_tokens, seed=seed % 2**63)


def text_output(options: Options, stream: StreamState, tokenizer: ModelTokenizer) -> TextOutput:
    """The text side of a stream."""
    return TextOutput(
        tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens),
        scanner=StopScanner(options.stop, include=options.include_stop_string) if options.stop else None,
        hidden_ids=frozenset() if options.include_stop_string else stream.end_token_ids,
        min_tokens=options.sampling.min_tokens,
    )
