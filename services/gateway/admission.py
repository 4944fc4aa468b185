"""From checked options and prompts to streams that can be dispatched."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from functools import partial

from services.gateway.chat_template import ChatTemplate
from services.gateway.core.routes import ModelRoutes
from services.gateway.core.stop_strings import StopScanner
from services.gateway.core.stream import StreamState
from services.gateway.core.text_output import TextOutput
from services.gateway.offload import Offload
from services.gateway.request_bodies.chat_request import ChatRequest
from services.gateway.request_bodies.options import Options
from services.gateway.template_sandbox import RenderingTooLarge
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import BadRequest, ContextLengthExceeded
from shared.messages.generation import SamplingParams

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


def memory_bytes(prompts: Sequence[Sequence[int]]) -> int:
    """What a request occupies from its admission to its end, apart from its output."""
    return sum(BYTES_PER_STREAM + BYTES_PER_TOKEN * len(prompt) for prompt in prompts)


def refuse_unknown_tokens(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raises ``BadRequest`` for a text whose tokens the model does not have."""
    if token_ids and max(token_ids) >= vocab_size:
        raise BadRequest(
            f"{param}: the tokenizer gives token id {max(token_ids)}, the model has only 0..{vocab_size - 1}",
            param=param,
        )


def sampling_params(
    options: Options, model: ModelRoutes, prompt: Sequence[int], param: str, draw: random.Random
) -> SamplingParams:
    """The sampling of one stream: lengths against the context, and a seed, from ``draw`` unless the caller gave one.

    Raises ``BadRequest`` for an empty prompt, ``ContextLengthExceeded`` when prompt and output do not fit.
    """
    limit = model.context_tokens
    num_prompt = len(prompt)
    if num_prompt == 0:
        raise BadRequest("the prompt has no tokens", param=param)
    if num_prompt >= limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens; with at least one of output that exceeds "
            f"this model's context of {limit} tokens",
            param=param,
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
    if options.min_tokens > max_tokens:
        raise BadRequest(f"min_tokens {options.min_tokens} is above the {max_tokens} possible", param="min_tokens")
    seed = options.seed if options.seed is not None else draw.getrandbits(63)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed % 2**63,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_tokens=options.min_tokens,
        ignore_eos=options.ignore_eos,
        stop_token_ids=options.stop_token_ids,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=options.logit_bias,
        logprobs=options.logprobs,
    )


def end_token_ids(options: Options, model: ModelRoutes) -> frozenset[int]:
    """The tokens that end an output; one set serves all of a request's streams."""
    eos = () if options.ignore_eos else model.record.spec.eos_token_ids
    return frozenset((*eos, *options.stop_token_ids))


def stream_state(
    request_id: str,
    model: ModelRoutes,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    arrived_at_s: float,
    end_token_ids: frozenset[int],
    key: str = "",
    default_max_tokens: bool = False,
) -> StreamState:
    """A stream in its queued state. ``arrived_at_s`` is Unix time, ``key`` the name of the caller's key;
    ``default_max_tokens``: the caller left the length of the output open."""
    return StreamState(
        request_id=request_id,
        model=model.record.name,
        model_hash=model.record.model_hash,
        prompt_token_ids=prompt,
        sampling=sampling,
        arrived_at_s=arrived_at_s,
        key=key,
        default_max_tokens=default_max_tokens,
        end_token_ids=end_token_ids,
    )


def text_output(options: Options, stream: StreamState, tokenizer: ModelTokenizer) -> TextOutput:
    """The text side of a stream."""
    return TextOutput(
        tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens),
        scanner=StopScanner(options.stop, include=options.include_stop_string) if options.stop else None,
        hidden_ids=frozenset() if options.include_stop_string else stream.end_token_ids,
        min_tokens=options.min_tokens,
    )
