"""From checked options and prompts to streams that can be dispatched."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from services.gateway.core.routes import ModelRoutes
from services.gateway.core.stop_strings import StopScanner
from services.gateway.core.stream import StreamState
from services.gateway.core.text_output import TextOutput
from services.gateway.http.options import Options
from services.gateway.tokenizer import ModelTokenizer
from shared.errors import BadRequest, ContextLengthExceeded
from shared.messages.generation import SamplingParams

INLINE_CHARACTERS = 4096
"""Texts up to this are encoded on the event loop (well under a millisecond); longer ones in a thread."""


async def encode(tokenizer: ModelTokenizer, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """The ids of a text, without stalling the other streams."""
    if len(text) <= INLINE_CHARACTERS:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return tuple(ids)


def refuse_unknown_tokens(token_ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raises ``BadRequest`` for a text of which the tokenizer makes tokens that the model does not have."""
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
        room = limit - num_prompt
        max_tokens = min(room, options.default_max_tokens) if options.default_max_tokens is not None else room
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


def stream_state(
    request_id: str,
    model: ModelRoutes,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    arrived_at_s: float,
    key: str = "",
    default_max_tokens: bool = False,
) -> StreamState:
    """A stream in its queued state. ``arrived_at_s`` is Unix time, ``key`` the name of the caller's key;
    ``default_max_tokens``: the caller left the length of the output open."""
    eos = () if sampling.ignore_eos else model.record.spec.eos_token_ids
    return StreamState(
        request_id=request_id,
        model=model.record.name,
        model_hash=model.record.model_hash,
        prompt_token_ids=prompt,
        sampling=sampling,
        arrived_at_s=arrived_at_s,
        key=key,
        default_max_tokens=default_max_tokens,
        end_token_ids=frozenset((*eos, *sampling.stop_token_ids)),
    )


def text_output(options: Options, stream: StreamState, tokenizer: ModelTokenizer) -> TextOutput:
    """The text side of a stream."""
    return TextOutput(
        tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens),
        scanner=StopScanner(options.stop, include=options.include_stop_string) if options.stop else None,
        hidden_ids=frozenset() if options.include_stop_string else stream.end_token_ids,
        min_tokens=options.min_tokens,
    )
