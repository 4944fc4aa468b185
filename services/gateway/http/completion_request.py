"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.core.prompt_size import refuse_large_ids, refuse_large_text
from services.gateway.http.fields import Fields, is_token_id
from services.gateway.http.options import MAX_LOGPROBS, Options, read_options, refuse_unsupported
from shared.errors import BadRequest

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked text completion request: one choice per prompt, in order."""

    prompts: tuple[Prompt, ...]
    echo: bool
    add_special_tokens: bool
    options: Options


def read_completion_request(body: dict[str, Any], *, vocab_size: int, max_prompt_bytes: int) -> CompletionRequest:
    """Raises ``BadRequest`` and ``UnsupportedParameter`` naming the parameter.

    Raises ``PayloadTooLarge`` for a single prompt that cannot fit ``max_prompt_bytes``; together they may exceed it.
    """
    fields = Fields(body)
    refuse_unsupported(fields)
    logprobs = fields.optional_integer("logprobs", low=0, high=MAX_LOGPROBS)
    echo = fields.flag("echo", False)
    if echo and logprobs is not None:
        raise fields.unsupported("echo", "echo with logprobs is")
    limit = fields.optional_integer("max_tokens", low=1, high=2**31)
    return CompletionRequest(
        prompts=_prompts(fields, vocab_size, max_prompt_bytes),
        echo=echo,
        add_special_tokens=fields.flag("add_special_tokens", True),
        options=read_options(
            fields,
            vocab_size=vocab_size,
            max_tokens=limit,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=logprobs,
        ),
    )


def _prompts(fields: Fields, vocab_size: int, max_bytes: int) -> tuple[Prompt, ...]:
    value = fields.raw("prompt")
    if value is None:
        raise BadRequest("prompt is required", param="prompt")
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif isinstance(value, list) and value and is_token_id(value[0]):
        prompts = [value]
    else:
        prompts = value
    if not isinstance(prompts, list) or not prompts:
        raise fields.wrong("prompt", "a string, an array of token ids, or a non-empty array of either")
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"prompt has {len(prompts)} prompts; at most {MAX_PROMPTS} are taken", param="prompt")
    return tuple(_prompt(prompt, vocab_size, max_bytes) for prompt in prompts)


def _prompt(prompt: Any, vocab_size: int, max_bytes: int) -> Prompt:
    if isinstance(prompt, str):
        if not prompt:
            raise BadRequest("prompt must not be empty", param="prompt")
        refuse_large_text(prompt, max_bytes=max_bytes, param="prompt")
        return prompt
    if isinstance(prompt, list):
        # First: looking at millions of ids one by one would stall the other streams.
        refuse_large_ids(prompt, max_bytes=max_bytes, param="prompt")
    if not isinstance(prompt, list) or not all(is_token_id(i) for i in prompt):
        raise BadRequest("prompt must be strings or arrays of token ids", param="prompt")
    if not prompt:
        raise BadRequest("prompt must not be empty", param="prompt")
    wrong = next((i for i in prompt if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise BadRequest(f"prompt: token id {wrong} is outside 0..{vocab_size - 1}", param="prompt")
    return tuple(prompt)
